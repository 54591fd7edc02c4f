"""Save what a damaged log still has into a new one, and count what is lost.

Its files are read page by page, without LMDB; what is believed are batches and chunks whose own checksum
holds. A sample that lost events says so (`log_gap`). Exit status: 1 where something is lost.

Example:

    rollout-log recover runs/today runs/today-recovered
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rollout_log.cli._arguments import Json
from rollout_log.cli._output import print_facts, print_json
from rollout_log.cli._progress import progress
from rollout_log.counting import several
from rollout_log.recovery import Recovery, recover


def run(
    log: Annotated[Path, typer.Argument(metavar="LOG", help="The damaged log, which is left as it is.")],
    new: Annotated[Path, typer.Argument(metavar="NEWLOG", help="A directory that does not exist yet.")],
    *,
    json: Json = False,
) -> None:
    found = Recovery()
    for _ in progress("recover", recover(log, new, found), None):
        pass
    if json:
        print_json(found)
    else:
        print_facts(
            {
                "read": f"{several(found.files, 'file')}, {several(found.bytes, 'byte')}",
                "unreadable": f"{several(found.unreadable_bytes, 'byte')}",
                "broken": f"{found.broken:,} of the batches and chunks",
                "recovered": f"{several(found.samples, 'sample')}, {several(found.events, 'event')}",
                "of them damaged": f"{found.damaged_samples:,} ({found.nameless_samples:,} without a key)",
                "lost": f"{several(found.lost_events, 'event')} and {several(found.lost_samples, 'sample')}, "
                "as far as is known",
                **({"not known": _unknown(found)} if _unknown(found) else {}),
            }
        )
    if _unknown(found) or found.broken or found.lost_events or found.lost_samples:
        raise typer.Exit(1)


def _unknown(found: Recovery) -> str:
    """Say what cannot be told of the loss; nothing where all of it is known."""
    parts = []
    if found.unreadable_bytes:
        parts.append(f"how much was in {several(found.unreadable_bytes, 'byte')} that the disk did not give")
    if found.damaged_bytes:
        parts.append(f"how much was in {several(found.damaged_bytes, 'byte')} that could not be read")
    if found.cut_files:
        parts.append(f"how much {several(found.cut_files, 'sealed file')} had behind a cut")
    return ", and ".join(parts)
