"""List the samples of a log, in the order they began.

`--step` takes every sample that took part in the step; with `--went-on` only those that were cut there and
belong to a later one now. Times are `2026-05-01T22:30`, `22:30` for today, or `90m` for 90 minutes ago.
Weights are the versions that the engine told; it says "default" while nobody has set one.
A fixture has no date: what is in it began so long after its first sample.

Example:

    rollout-log ls runs/today --step 12 --status aborted
    rollout-log ls runs/today --step 12 --went-on
    rollout-log ls runs/today --key 'math-*' --problem error --since 2h
    rollout-log ls runs/today --json | jq -r 'select(.discarded > 0).name'
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterator
from typing import Annotated

import typer

from rollout_log.cli import steps as steps_verb
from rollout_log.cli._arguments import JsonLines, LogPath, Status, say_nothing, without
from rollout_log.cli._output import print_json
from rollout_log.cli._table import print_table
from rollout_log.cli._times import brief_clock, parse_time
from rollout_log.listing import SampleLine, line
from rollout_log.log import Entry
from rollout_log.log.summary import Summary
from rollout_log.problems import PROBLEMS
from rollout_log.sources import open_source

SEVERITIES = ("info", "warning", "error")
_HEADER = (
    *("key", "step", "status", "tokens", "thrown away"),
    *("requests", "resumed from", "weights", "began", "problems"),
)


def run(
    log: LogPath,
    *,
    steps: Annotated[bool, typer.Option("--steps", help="A line a step instead: the verb `steps`.")] = False,
    step: Annotated[int | None, typer.Option(help="Only samples that took part in this step.")] = None,
    went_on: Annotated[
        bool, typer.Option("--went-on", help="Only samples that left the step, or any, for a later one.")
    ] = False,
    status: Status = None,
    problem: Annotated[
        str | None, typer.Option(help="Only samples with this problem, or with any of this severity.")
    ] = None,
    key: Annotated[str | None, typer.Option(metavar="GLOB", help="Only keys like this: `math-*`.")] = None,
    since: Annotated[str | None, typer.Option(metavar="TIME", help="Only samples active since then.")] = None,
    until: Annotated[str | None, typer.Option(metavar="TIME", help="Only samples begun by then.")] = None,
    json: JsonLines = False,
) -> None:
    filters = {
        "--status": status,
        "--problem": problem,
        "--key": key,
        "--since": since,
        "--until": until,
    }
    if steps:
        without("--steps", {"--step": step, "--went-on": went_on, **filters})
        steps_verb.run(log, json=json)
        return
    codes = _codes(problem)
    after, before = parse_time(since), parse_time(until)
    with open_source(log) as reader:
        entries = reader.samples(step=step, status=status)
        if went_on:
            entries = (entry for entry in entries if _went_on(entry.summary, step))
        found = [line(entry) for entry in _narrow(entries, codes, key, after, before)]
        if not found:
            asked = [f"{name} {value}" for name, value in filters.items() if value is not None]
            say_nothing(reader, step, " ".join(["--went-on"] * went_on + asked))
    if json:
        print_json(*found)
    elif found:
        _print(found)


def _went_on(summary: Summary, step: int | None) -> bool:
    return summary.resumed_from is not None if step is None else summary.step != step


def _codes(problem: str | None) -> set[str] | None:
    if problem is None:
        return None
    if problem in SEVERITIES:
        return {code for code, meaning in PROBLEMS.items() if meaning.severity == problem}
    if problem not in PROBLEMS:
        raise typer.BadParameter(
            f"{problem!r} is no problem: there are {', '.join(SEVERITIES)} and {', '.join(PROBLEMS)}"
        )
    return {problem}


def _narrow(
    entries: Iterator[Entry], codes: set[str] | None, glob: str | None, after: int | None, before: int | None
) -> Iterator[Entry]:
    matches = re.compile(fnmatch.translate(glob)).match if glob is not None else None
    for entry in entries:
        summary = entry.summary
        if codes is not None and codes.isdisjoint(summary.problems):
            continue
        if matches is not None and not (matches(summary.key) or matches(entry.name)):
            continue
        if (after is None or summary.updated_unix_ns >= after) and (
            before is None or summary.opened_unix_ns <= before
        ):
            yield entry


def _print(lines: list[SampleLine]) -> None:
    runs = len({line.run for line in lines}) > 1
    print_table(
        ["run", *_HEADER] if runs else _HEADER,
        ([line.run, *_row(line)] if runs else _row(line) for line in lines),
        right=["step", "tokens", "thrown away", "requests", "resumed from"],
        spare=["began", "weights", "requests", "resumed from"],
    )


def _row(line: SampleLine) -> list[object]:
    step = "" if line.step is None else str(line.step)
    return [
        line.name,
        f"{step} eval" if line.evaluation else step,
        status_of(line),
        f"{line.tokens:,}",
        f"{line.discarded:,}" if line.discarded else "",
        line.requests,
        line.resumed_from,
        steps_verb.versions(line.versions),
        brief_clock(line.opened_unix_ns),
        steps_verb.counts(line.problems),
    ]


def status_of(summary: SampleLine | Summary) -> str:
    """Show the status, and the trainer's where it sees it otherwise."""
    theirs = summary.trainer_status
    return summary.status if theirs in {None, summary.status} else f"{summary.status} (trainer: {theirs})"
