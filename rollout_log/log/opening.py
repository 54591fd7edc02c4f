"""Opening a segment, whatever it is by now: LMDB's, or sealed."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from rollout_log.errors import LogDamaged
from rollout_log.log.directory import SEALED
from rollout_log.log.segment import Segment

if TYPE_CHECKING:
    from rollout_log.log.sealed import SealedSegment

__all__ = ["open_segment"]


def open_segment(path: Path) -> Segment | SealedSegment:
    """Open a segment for reading.

    Raises `LogTooNew`, `LogDamaged`; `FileNotFoundError` where it was sealed or deleted meanwhile.
    """
    if path.suffix == SEALED:
        from rollout_log.log.sealed import SealedSegment  # brings the codec

        return SealedSegment.open(path)
    try:
        return Segment.open(path)
    except LogDamaged:
        if not path.exists():
            raise FileNotFoundError(f"{path} is gone") from None
        raise
