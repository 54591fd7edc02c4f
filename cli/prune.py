"""Delete the oldest segments, by size, step or age, and say what went.

Whole segments go, never one of a process that is still recording. What went is remembered in the log, so
that `verify` does not take it for damage. At least one of --step, --older-than and --keep-bytes is needed.

Example:

    rollout-log prune runs/today --keep-bytes 20GB --dry-run
    rollout-log prune runs/today --step 100
    rollout-log prune runs/today --older-than 7d
"""

from __future__ import annotations

import re
from typing import Annotated

import typer

from rollout_log.cli._arguments import JsonLines, LogDirectory
from rollout_log.cli._output import print_json, safe
from rollout_log.cli._table import print_table
from rollout_log.cli._times import brief_clock, parse_time
from rollout_log.counting import several
from rollout_log.log.directory import is_live, logs_at, writers_of
from rollout_log.log.retention import Pruned, prune, straddling

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)b?", re.IGNORECASE)
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}


def run(
    log: LogDirectory,
    *,
    step: Annotated[
        int | None,
        typer.Option(help="Delete segments in which every sample belongs to steps before this one."),
    ] = None,
    older_than: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="Delete segments written last before 2026-05-01T22:30, or 7d ago."),
    ] = None,
    keep_bytes: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Delete the oldest until each log has 500MB, 20GB, …")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would go.")] = False,
    json: JsonLines = False,
) -> None:
    if step is None and older_than is None and keep_bytes is None:
        raise typer.BadParameter("give --step, --older-than or --keep-bytes")
    live = [folder for one in logs_at(log) for folder in writers_of(one) if is_live(folder)]
    gone: list[Pruned] = []
    for one in logs_at(log):
        gone += prune(
            one,
            keep_bytes=None if keep_bytes is None else _size(keep_bytes),
            before_step=step,
            before_unix_ns=parse_time(older_than),
            dry_run=dry_run,
        )
    if json:
        print_json(*gone)
    else:
        _print(gone, dry_run)
    for folder in live:
        typer.echo(f"{safe(folder)} is being written: only its writer deletes from it", err=True)
    kept = [] if step is None else [each for one in logs_at(log) for each in straddling(one, step)]
    for each in kept:
        where = f"segment {each.segment} of {each.writer} has steps {_steps(each)}, so it stays"
        typer.echo(f"{safe(where)}: segments go as a whole", err=True)


def _print(gone: list[Pruned], dry_run: bool) -> None:
    if gone:
        print_table(
            ["writer", "segment", "bytes", "samples", "steps", "last written", "why"],
            (
                [
                    each.writer,
                    each.segment,
                    f"{each.bytes:,}",
                    each.samples,
                    _steps(each),
                    brief_clock(each.modified_unix_ns),
                    each.reason,
                ]
                for each in gone
            ),
            right=["segment", "bytes", "samples"],
            spare=["last written", "samples", "steps"],
        )
    verb = "would be deleted" if dry_run else "deleted"
    print(f"{several(len(gone), 'segment')} {verb}, {sum(each.bytes for each in gone):,} bytes")


def _steps(each: Pruned) -> str:
    return "" if each.first_step is None else f"{each.first_step} to {each.last_step}"


def _size(text: str) -> int:
    found = _SIZE.fullmatch(text.strip())
    if found is None:
        raise typer.BadParameter(f"{text!r} is no size: give 500MB or 20GB", param_hint="--keep-bytes")
    return int(float(found[1]) * _UNITS[found[2].lower()])
