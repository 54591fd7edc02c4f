"""Check a log: its bytes, and the problems of every sample.

Lengths, checksums, sequences and indexes are checked first, then each sample is folded; both in a process
of their own, since a damaged file can kill its reader. Exit status: 0 for a log without faults, 1 where
samples have problems of severity error, 2 where bytes are damaged.

Example:

    rollout-log verify runs/today
    rollout-log verify runs/today --json | jq '.problems[] | select(.severity == "error")'
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Literal

import msgspec
import typer

from rollout_log.cli._arguments import Json, LogPath
from rollout_log.cli._folding import Folded, fold_all
from rollout_log.cli._output import console, print_facts, print_json, safe
from rollout_log.cli._table import print_table
from rollout_log.counting import several
from rollout_log.errors import LogDamaged
from rollout_log.log.retention import Pruned
from rollout_log.log.verify import Finding, Report, verify
from rollout_log.problems import PROBLEMS, Severity
from rollout_log.sources import open_source


class Damage(msgspec.Struct):
    """Bytes that are not what was written."""

    path: str
    what: str
    detail: str


class SampleProblem(msgspec.Struct):
    """One problem of one sample."""

    name: str
    """What finds the sample: `KEY`, or `KEY@n`."""
    code: str
    severity: Severity
    request: int | None
    position: int | None
    """Of the first token concerned, in the response."""
    message: str


class Verdict(msgspec.Struct):
    """What a check of a whole log found."""

    verdict: Literal["clean", "problems", "damaged"]
    samples: int
    """That there are; in a damaged log, that could be found."""
    blocks: int
    """Here and of events: that were checked."""
    events: int
    folded: int
    """Samples whose problems could be looked at."""
    statuses: dict[str, int]
    """How many of these are completed, truncated, aborted, failed, pending."""
    errors: int
    """Samples with problems of severity error."""
    problems: list[SampleProblem]
    damage: list[Damage]
    pruned: list[Pruned]
    """Segments that were deleted to free the disk, which is no damage."""


_DAMAGED_S = 120
"""How long the samples of a damaged log are looked at."""
_UNFINISHED = ("failed", "aborted", "pending")
_EXIT = {"clean": 0, "problems": 1, "damaged": 2}


def run(log: LogPath, json: Json = False) -> None:
    verdict = check(log)
    if json:
        print_json(verdict)
    else:
        _print(verdict, recoverable=log.is_dir())
    raise typer.Exit(_EXIT[verdict.verdict])


def check(log: Path) -> Verdict:
    """Check the bytes of a log, then its samples. Raises `LogNotFound`, `NotALog`, `LogTooNew`."""
    report = _check_fixture(log) if log.is_file() else verify(log)
    damage = [Damage(str(found.path), found.what, found.detail) for found in report.damage]
    problems: list[SampleProblem] = []
    listed = 0
    statuses: Counter[str] = Counter()
    for found in fold_all(log, report.samples, _DAMAGED_S if damage else None):
        if isinstance(found, Folded):
            listed += 1
            statuses[found.status] += 1
            problems += [
                SampleProblem(found.name, **msgspec.structs.asdict(problem)) for problem in found.problems
            ]
            continue
        listed += found.what != "samples"
        if not any(known.path == found.path for known in damage):
            damage.append(Damage(found.path, found.what, found.detail))
    errors = len({problem.name for problem in problems if problem.severity == "error"})
    return Verdict(
        verdict="damaged" if damage else "problems" if errors else "clean",
        samples=max(report.samples, listed),
        blocks=report.blocks,
        events=report.events,
        folded=statuses.total(),
        statuses=dict(statuses.most_common()),
        errors=errors,
        problems=problems,
        damage=damage,
        pruned=report.pruned,
    )


def _check_fixture(path: Path) -> Report:
    """A fixture's lines are all checked when it is opened."""
    report = Report()
    try:
        with open_source(path) as reader:
            for entry in reader.samples():
                report.samples += 1
                for block in reader.blocks(entry.ref):
                    report.blocks += 1
                    report.events += block.count
    except LogDamaged as error:
        report.damage.append(Finding(path, "line", str(error)))
    return report


def _print(verdict: Verdict, *, recoverable: bool) -> None:
    out = console()
    samples = several(verdict.samples, "sample") + (" found" if verdict.damage else "")
    checked = "; checked: " if verdict.damage else ", "
    out.print(f"{samples}{checked}{several(verdict.blocks, 'block')}, {several(verdict.events, 'event')}")
    if verdict.pruned:
        gone = sum(segment.bytes for segment in verdict.pruned)
        out.print(f"pruned: {several(len(verdict.pruned), 'segment')}, {gone:,} bytes; their events are gone")
    if verdict.problems:
        print()
        _print_problems(verdict.problems)
    if verdict.damage:
        print()
        print_table(["damaged", "what", "detail"], ([d.path, d.what, d.detail] for d in verdict.damage))
    print()
    out.print(safe(_conclusion(verdict, recoverable=recoverable)), style="bold")


def _print_problems(problems: list[SampleProblem]) -> None:
    samples: dict[str, dict[str, None]] = {}
    counts: Counter[str] = Counter(problem.code for problem in problems)
    for problem in problems:
        samples.setdefault(problem.code, {})[problem.name] = None
    severities = ("error", "warning", "info")
    order = sorted(samples, key=lambda code: (severities.index(PROBLEMS[code].severity), code))
    print_table(
        ["problem", "severity", "samples", "times", "for example"],
        (
            [
                code,
                PROBLEMS[code].severity,
                f"{len(samples[code]):,}",
                f"{counts[code]:,}",
                next(iter(samples[code])),
            ]
            for code in order
        ),
        right=["samples", "times"],
    )
    print("\nWhat it means for training:")
    print_facts({code: PROBLEMS[code].meaning for code in order})


def _conclusion(verdict: Verdict, *, recoverable: bool) -> str:
    if verdict.verdict == "damaged":
        hint = "; `rollout-log recover LOG NEWLOG` saves what is whole" if recoverable else ""
        of = f"{verdict.folded:,} of {several(verdict.samples, 'sample')}" if verdict.samples else "no sample"
        return f"damaged: {of} can be read{hint}"
    unfinished = [
        f"{verdict.statuses[status]:,} {status}" for status in _UNFINISHED if status in verdict.statuses
    ]
    also = f"; {', '.join(unfinished)}" if unfinished else ""
    if verdict.verdict == "problems":
        samples = several(verdict.errors, "sample")
        return f"the bytes are sound; {samples} with errors (`ls --problem error`){also}"
    return f"clean: the bytes are sound, and no sample has a problem of severity error{also}"
