"""Print a line for each step: what became of its samples, and what it cost.

A sample counts in its latest step, with its retries and thrown-away tokens, whenever they were; `report`
has those in the step in which they happened. "went on" says how many began in a step and are counted in a
later one (`ls --step N --went-on`). "began" and "took" are the step's own: from the first request sent in it
to the last end of one, also of samples that went on. "thrown away" are tokens that were generated and
dropped by a retry or a trim. Weights are the versions that the engine told; it says "default" while nobody
has set one. A fixture has no date: what is in it began so long after its first sample.

Example:

    rollout-log steps runs/today
    rollout-log steps runs/today --json | jq 'select(.aborted > 0)'
"""

from __future__ import annotations

from rollout_log.cli._arguments import JsonLines, LogPath, say_nothing
from rollout_log.cli._output import print_json
from rollout_log.cli._table import print_table
from rollout_log.cli._times import brief_clock, duration
from rollout_log.sources import open_source
from rollout_log.steps import StepView, by_step
from rollout_log.versions import number_of

COLUMNS = {
    "step": "right",
    "samples": "right",
    "completed": "right",
    "truncated": "right",
    "aborted": "right",
    "failed": "right",
    "pending": "right",
    "resumed from": "left",
    "went on": "right",
    "requests": "right",
    "retries": "left",
    "tokens": "right",
    "thrown away": "right",
    "weights": "left",
    "began": "left",
    "took": "right",
    "problems": "left",
}


def run(log: LogPath, json: JsonLines = False) -> None:
    with open_source(log) as reader:
        steps = by_step(reader.summaries())
        if not steps:
            say_nothing(reader, None)
    if json:
        print_json(*steps)
    elif steps:
        _print(steps)


def _print(steps: list[StepView]) -> None:
    runs = len({step.run for step in steps}) > 1
    header = [*(["run"] if runs else []), *COLUMNS]
    rows = [[*([step.run] if runs else []), *_row(step)] for step in steps]
    print_table(
        header,
        rows,
        right=[name for name, side in COLUMNS.items() if side == "right"],
        spare=["began", "took", "weights", "requests", "resumed from", "retries"],
    )


def _row(step: StepView) -> list[str]:
    name = "none" if step.step is None else str(step.step)
    share = f" ({step.discarded_share:.1%})" if step.discarded and step.discarded_share is not None else ""
    took = (step.updated_unix_ns - step.began_unix_ns) / 1e9 if step.began_unix_ns else None
    return [
        f"{name} eval" if step.evaluation else name,
        *map(_count, (step.samples, step.completed, step.truncated, step.aborted, step.failed, step.pending)),
        ", ".join(f"{earlier}: {count}" for earlier, count in step.resumed_from.items()),
        _count(step.went_on),
        _count(step.requests),
        counts(step.retries),
        _count(step.tokens),
        _count(step.discarded) + share,
        versions(step.weight_versions),
        brief_clock(step.began_unix_ns),
        duration(took),
        counts(step.problems),
    ]


def _count(number: int) -> str:
    return f"{number:,}" if number else ""


def counts(found: dict[str, int]) -> str:
    """Show `reset 3, http_error 1`."""
    return ", ".join(f"{name} {count:,}" for name, count in found.items())


def versions(found: list[str]) -> str:
    """Show weight versions; a long unbroken row of numbers as its ends."""
    numbers = [number for version in found if (number := number_of(version)) is not None]
    if 2 < len(found) == len(numbers) and numbers[-1] - numbers[0] == len(found) - 1:
        return f"{numbers[0]}–{numbers[-1]}"
    return ", ".join(found)
