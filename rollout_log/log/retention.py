"""Which segments go when a log has to be smaller, and what is said of those that went.

Whole segments are deleted, the oldest first, never one that a live writer writes. What went is told by
`pruned.json` in the writer's folder, written before the file is removed.
"""

from __future__ import annotations

import contextlib
import logging
import shutil
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import lmdb
import msgspec

from rollout_log.errors import LogDamaged, LogInUse, RolloutLogError
from rollout_log.log.directory import hold_folder, is_live, segment_number, segments_of, writers_of
from rollout_log.log.draft import whole_file
from rollout_log.log.opening import open_segment

__all__ = ["Pruned", "cap_of", "prune", "read_pruned", "size_of", "straddling"]

PRUNED = "pruned.json"
MOST = 100 * 10**9
"""Bytes a log may have by default …"""
SHARE = 0.2
"""… or this share of what is free on its disk, itself included, where that is less."""

_logger = logging.getLogger("rollout_log")


class Pruned(msgspec.Struct):
    """A segment that was deleted to free the disk."""

    writer: str
    """The folder it was in."""
    segment: int
    bytes: int
    modified_unix_ns: int
    """Its last commit."""
    pruned_unix_ns: int
    reason: str
    samples: int | None = None
    """None, here and below, where it could not be read any more."""
    first_step: int | None = None
    last_step: int | None = None


class _Candidate(msgspec.Struct):
    path: Path
    bytes: int
    modified: int


def cap_of(log: Path) -> int:
    """Return the default cap of a log's size, in bytes."""
    try:
        place = next(path for path in (log, *log.parents) if path.exists())
        return min(MOST, int(SHARE * (shutil.disk_usage(place).free + size_of(log))))
    except OSError:
        return MOST


def size_of(log: Path) -> int:
    """Return the bytes of all segments of a log on the disk, sparse files counted as what they take."""
    return sum(candidate.bytes for folder in _folders(log) for candidate in _segments(folder))


def read_pruned(folder: Path) -> list[Pruned]:
    """Return what was deleted of a writer's segments, by number. Raises `LogDamaged`."""
    try:
        return msgspec.json.decode((folder / PRUNED).read_bytes(), type=list[Pruned])
    except (FileNotFoundError, NotADirectoryError):  # a fixture is a file
        return []
    except msgspec.DecodeError as error:
        raise LogDamaged(f"{folder / PRUNED} cannot be read: {error}") from error


def prune(
    log: Path,
    *,
    keep_bytes: int | None = None,
    before_step: int | None = None,
    before_unix_ns: int | None = None,
    mine: str | None = None,
    dry_run: bool = False,
) -> list[Pruned]:
    """Delete segments, oldest first, and return what they were.

    `keep_bytes`: as many as it takes for the log to have no more than that. `before_step`: those that
    have samples of earlier steps alone. `before_unix_ns`: those whose last commit is older. Several of
    them: all of what any asks for. Folders of live writers are theirs to prune, so they are passed over,
    but for `mine`: the writer on whose behalf this is. `dry_run` deletes nothing.
    """
    left = size_of(log)
    gone: list[Pruned] = []
    for candidate in sorted(_deletable(log, mine), key=lambda each: each.modified):
        reason = None
        if keep_bytes is not None and left > keep_bytes:
            reason = f"the log had {left:,} bytes, and may have {keep_bytes:,}"
        elif before_unix_ns is not None and candidate.modified < before_unix_ns:
            reason = "it was older than asked for"
        elif before_step is None:
            continue  # without looking into it
        known = _describe(candidate)
        if reason is None and before_step is not None and known.last_step is not None:
            reason = f"it had no step from {before_step} on" if known.last_step < before_step else None
        if reason is None:
            continue
        known.reason = reason
        if dry_run or _delete(candidate.path, known):
            left -= candidate.bytes
            gone.append(known)
    return gone


def straddling(log: Path, before_step: int) -> list[Pruned]:
    """Return the segments that are kept for their later steps, and have some of before that step as well."""
    known = [_describe(candidate) for candidate in _deletable(log, None)]
    return [
        each
        for each in known
        if each.first_step is not None
        and each.last_step is not None
        and each.first_step < before_step <= each.last_step
    ]


def _folders(log: Path) -> list[Path]:
    return writers_of(log) if log.is_dir() else []


def _segments(folder: Path) -> Iterator[_Candidate]:
    for path in segments_of(folder):
        with contextlib.suppress(FileNotFoundError):
            status = path.stat()
            yield _Candidate(path, status.st_blocks * 512, status.st_mtime_ns)


def _deletable(log: Path, mine: str | None) -> Iterator[_Candidate]:
    for folder in writers_of(log):
        segments = list(_segments(folder))
        if folder.name == mine:
            yield from segments[:-1]
        elif not is_live(folder):
            yield from segments


def _describe(candidate: _Candidate) -> Pruned:
    path = candidate.path
    known = Pruned(
        writer=path.parent.name,
        segment=segment_number(path),
        bytes=candidate.bytes,
        modified_unix_ns=candidate.modified,
        pruned_unix_ns=time.time_ns(),
        reason="",
    )
    with contextlib.suppress(RolloutLogError, lmdb.Error, OSError):
        segment = open_segment(path)
        try:
            known.samples = segment.count()
            known.first_step, known.last_step = _ends(segment.steps())
        finally:
            segment.close()
    return known


def _ends(steps: Iterable[int]) -> tuple[int | None, int | None]:
    first = last = None
    for last in steps:
        first = last if first is None else first
    return first, last


def _delete(path: Path, known: Pruned) -> bool:
    """Say that a segment goes, then remove it. Returns False where somebody else is at its folder, or was."""
    folder = path.parent
    try:
        with hold_folder(folder):
            said = {each.segment: each for each in _said(folder)}
            said[known.segment] = known
            with whole_file(folder / PRUNED) as file:
                records = [said[number] for number in sorted(said)]
                file.write(msgspec.json.format(msgspec.json.encode(records)))
            for name in folder.glob(f"{path.stem}.*"):  # its lock file, and what it was sealed from
                name.unlink(missing_ok=True)
    except (LogInUse, FileNotFoundError):  # nothing was recorded there, and its writer took it away
        return False
    _logger.info(
        "deleted %s (%d bytes, %s samples, steps %s to %s): %s",
        path,
        known.bytes,
        known.samples,
        known.first_step,
        known.last_step,
        known.reason,
    )
    return True


def _said(folder: Path) -> list[Pruned]:
    try:
        return read_pruned(folder)
    except LogDamaged as error:
        _logger.warning("%s; it is written anew", error)
        return []
