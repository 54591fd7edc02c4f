"""What keeps a writer's folder in order: seal, copy to the archive, delete above the cap.

Done in a process of its own, which `keeper` starts: LMDB dies of some kinds of damage.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import lmdb
import msgspec

from rollout_log.errors import RolloutLogError
from rollout_log.log.archive import archive_folder
from rollout_log.log.directory import hold_folder, segment_number
from rollout_log.log.duty import limit_cpu
from rollout_log.log.keeper import ENDED, SLACK, Done, Plan
from rollout_log.log.retention import prune, size_of
from rollout_log.log.sealing import seal

__all__ = ["keep", "main"]


def keep(plan: Plan) -> Iterator[Done]:
    """Do what a plan says, in this process."""
    yield from _prune(plan, SLACK)  # sealing is behind: the disk goes before the archive
    for path in sorted(plan.folder.glob("segment-*.rlog"), key=segment_number):
        if plan.active is not None and segment_number(path) >= plan.active:
            continue
        yield from _seal(path)
        yield from _archive(plan)
        yield from _prune(plan)
    yield from _archive(plan)
    yield from _prune(plan)


def _seal(path: Path) -> Iterator[Done]:
    try:
        status = path.stat()
        if not status.st_size:
            return  # its writer died before the first commit
        with hold_folder(path.parent):
            sealed = seal(path)
        yield Done("sealed", str(sealed), sealed.stat().st_size, status.st_blocks * 512)
    except FileNotFoundError:
        return  # pruned meanwhile
    except (RolloutLogError, lmdb.Error, OSError) as error:
        yield Done("failed", str(path), detail=f"cannot be sealed: {error}")


def _archive(plan: Plan) -> Iterator[Done]:
    if plan.archive is None:
        return
    try:
        for copy in archive_folder(plan.folder, plan.archive):
            size = copy.stat().st_size
            yield Done("archived", str(copy), size, size)
    except (RolloutLogError, OSError) as error:
        yield Done("failed", str(plan.archive), detail=f"{plan.folder} cannot be copied there: {error}")


def _prune(plan: Plan, slack: float = 1.0) -> Iterator[Done]:
    log = plan.folder.parent
    if plan.max_bytes is None or size_of(log) <= plan.max_bytes * slack:
        return
    mine = None if plan.active is None else plan.folder.name
    try:
        for gone in prune(log, keep_bytes=plan.max_bytes, mine=mine):
            path = log / gone.writer / f"segment-{gone.segment:06}"
            yield Done("pruned", str(path), 0, gone.bytes, gone.reason)
    except (RolloutLogError, lmdb.Error, OSError) as error:
        yield Done("failed", str(log), detail=f"cannot be pruned: {error}")


def main(argument: str) -> None:
    """What the child does."""
    with contextlib.suppress(OSError):
        os.nice(19)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(ENDED))  # drafts are removed on the way out
    plan = msgspec.json.decode(argument, type=Plan, dec_hook=lambda kind, value: kind(value))
    if plan.cpu is not None:
        limit_cpu(plan.cpu)
    for done in keep(plan):
        print(msgspec.json.encode(done).decode(), flush=True)  # noqa: T201 - how the child answers
