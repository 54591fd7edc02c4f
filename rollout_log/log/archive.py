"""Copies of sealed segments in another place, which is a log itself and may lie on a network file system."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from rollout_log.log.directory import SEALED, create_log, segments_of
from rollout_log.log.draft import whole_file
from rollout_log.log.retention import PRUNED
from rollout_log.log.sealed import SealedSegment

__all__ = ["archive_folder", "archive_path"]

_AT_ONCE = 1 << 20


def archive_path(log: Path, archive: Path) -> Path:
    """Return where a log's copies go: `<archive>/<name of the log>`, so one archive holds many logs."""
    return archive / log.absolute().name


def archive_folder(folder: Path, archive: Path) -> list[Path]:
    """Copy the sealed segments of a writer's folder that the archive has not yet. Returns the copies.

    Each is written in one go, read back, synced, and only then given its name. Raises `LogDamaged` where
    a copy is not what was sealed, and `OSError` as it comes.
    """
    place = archive_path(folder.parent, archive)
    copies: list[Path] = []
    for segment in segments_of(folder):
        if segment.suffix == SEALED and not (place / folder.name / segment.name).exists():
            create_log(place)
            copies.append(_copy(segment, place / folder.name / segment.name))
    if (folder / PRUNED).exists() and (place / folder.name).is_dir():
        # What was deleted before it was copied is no damage of the archive either.
        with whole_file(place / folder.name / PRUNED) as file:
            file.write((folder / PRUNED).read_bytes())
    return copies


def _copy(segment: Path, target: Path) -> Path:
    target.parent.mkdir(mode=0o700, exist_ok=True)
    with segment.open("rb") as source:
        modified = os.fstat(source.fileno()).st_mtime_ns
        with whole_file(target, check=_check, modified_ns=modified) as file:
            shutil.copyfileobj(source, file, _AT_ONCE)
    return target


def _check(copy: Path) -> None:
    sealed = SealedSegment.open(copy)
    try:
        sealed.check_hash()
    finally:
        sealed.close()
