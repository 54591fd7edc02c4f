"""Seal what writers that are gone left: a tenth of the size, read as before.

A writer seals what it has rotated by itself; this does the rest, the last segment above all. Each is
checked before the segment that it was made of is removed. Events are packed a megabyte together, and damage
costs as much: in a small log that is all of it. Sealing is done at the lowest priority; beside a run, --cpu
keeps it to a share of one core. Exit status: 1 where some could not be sealed.

Example:

    rollout-log seal runs/today
    rollout-log seal runs/today --cpu 0.3
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from rollout_log.cli._arguments import JsonLines, LogDirectory
from rollout_log.cli._output import print_json, safe
from rollout_log.cli._progress import progress
from rollout_log.cli._table import print_table
from rollout_log.log.directory import is_live, logs_at, writers_of
from rollout_log.log.keeper import Done, Plan, run_child


def run(
    log: LogDirectory,
    *,
    cpu: Annotated[
        float | None, typer.Option(metavar="SHARE", help="At most so much of one core.", min=0.01, max=1.0)
    ] = None,
    json: JsonLines = False,
) -> None:
    live = [folder for folder in _folders(log) if is_live(folder)]
    done = list(
        progress("seal", _seal(log, cpu), sum(len(list(folder.glob("*.rlog"))) for folder in _folders(log)))
    )
    if json:
        print_json(*done)
    elif done:
        print_table(
            ["", "segment", "bytes", "before", "detail"],
            ([each.what, each.path, f"{each.bytes:,}", f"{each.before:,}", each.detail] for each in done),
            right=["bytes", "before"],
        )
    else:
        print("nothing to seal")
    for folder in live:
        typer.echo(f"{safe(folder)} is being written: its writer seals it", err=True)
    if any(each.what == "failed" for each in done):
        raise typer.Exit(1)


def _folders(log: Path) -> list[Path]:
    return [folder.absolute() for one in logs_at(log) for folder in writers_of(one)]


def _seal(log: Path, cpu: float | None) -> Iterator[Done]:
    for folder in _folders(log):
        if not is_live(folder):
            yield from run_child(Plan(folder, cpu=cpu))
