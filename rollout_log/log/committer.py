"""This process's folder in a log: what the writer's thread does to the disk."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import lmdb

from rollout_log.errors import RolloutLogError
from rollout_log.events import Event
from rollout_log.log.batch import Packer
from rollout_log.log.block import writer_identity
from rollout_log.log.directory import (
    claim_folder,
    create_log,
    discard_folder,
    release_folder,
    sealed_path,
    segment_path,
    segments_of,
)
from rollout_log.log.environment import Row
from rollout_log.log.filesystem import refuse_network
from rollout_log.log.opening import open_segment
from rollout_log.log.pending import Part
from rollout_log.log.segment import BATCHES, Segment, batch_row, last_rows
from rollout_log.log.summary import Summary

if TYPE_CHECKING:
    from rollout_log.log.sealed import SealedSegment

__all__ = ["Committer"]

_logger = logging.getLogger("rollout_log")


class Committer:
    """Turns what waits into rows, and commits them to the active segment. Used by one thread at a time."""

    def __init__(self, log: Path, writer: str, run: str, segment_bytes: int) -> None:
        self.log = log
        self.folder = log / writer
        self.run = run
        self.segment_bytes = segment_bytes
        self.number = 0
        """Of the active segment; 0 before there is one."""
        self._identity = writer_identity(writer)
        self._segment: Segment | None = None
        self._descriptor: int | None = None
        self._wrote = False
        """Whether a commit was tried, so that something may be on disk."""

    def start(self) -> None:
        """Make the log, the folder and the first segment where they are still missing."""
        if self._segment is not None:
            return
        refuse_network(self.log)
        create_log(self.log)
        if self._descriptor is None:
            self._descriptor = claim_folder(self.log, self.folder.name)
        self.rotate()

    def encode(self, parts: Iterable[Part]) -> list[Row]:
        """Return the rows of a commit; those of its batches come with all that makes their samples known."""
        if self._segment is None:
            raise FileNotFoundError(f"{self.folder} has no segment yet")
        # Neighbours share batches, and are read together.
        parts = sorted(parts, key=lambda part: part.ordinal)
        before, last = self._segment.last(part.ordinal for part in parts if part.segment == self.number)
        packer = Packer(self._identity, before + 1, last)
        blocks = ((part.ordinal, *block) for part in parts for block in part.blocks())
        rows = [batch_row(number, data) for number, data in packer.pack(blocks)]
        rows += last_rows(packer.last)
        for part in parts:
            known = None
            if part.summary is None and part.segment != self.number:
                known = self._known(part.ordinal) or Summary()
            rows += part.rows(known)
        return rows

    def write(self, rows: list[Row]) -> int:
        """Commit rows. Returns the bytes of their batches."""
        if self._segment is None:
            raise FileNotFoundError(f"{self.folder} has no segment yet")
        self._wrote = True
        self._segment.write(rows)
        return sum(len(data) for table, _, data in rows if table == BATCHES)

    def is_full(self) -> bool:
        """Whether the active segment has reached its size."""
        return self._segment is not None and self._segment.size() >= self.segment_bytes

    def rotate(self) -> None:
        """Go on in a new segment; where it cannot be made, the old one stays."""
        segment = Segment.create(segment_path(self.folder, self.number + 1), self.run)
        if self._segment is not None:
            self._segment.close()
        self._segment = segment
        self.number += 1

    def read_back(self, ordinal: int, first: int, end: int) -> list[Event]:
        """Read committed events `[first, end)` of a sample. From any thread."""
        found: list[Event] = []
        for segment in self._segments():
            events: list[Event] = []
            for block in segment.blocks(ordinal, first):
                if block.first >= end:
                    break
                events += block.events()[max(first - block.first, 0) : end - block.first]
            found[:0] = events
        return found

    def find(self, key: str) -> int | None:
        """Return the newest sample of a key that was committed, None where there is none. From any thread."""
        ordinals = (ordinal for segment in self._segments() for ordinal in segment.with_key(key))
        return max(ordinals, default=None)

    def close(self) -> None:
        """Close the segment and give up the folder's lock; a folder without any event goes."""
        if self._segment is not None:
            self._segment.close()
            self._segment = None
        if self._descriptor is not None:
            if not self._wrote:
                discard_folder(self.folder)
            release_folder(self.folder.name, self._descriptor)
            self._descriptor = None

    def _known(self, ordinal: int) -> Summary | None:
        """Return a sample's summary from the segments before the active one."""
        try:
            found = (segment.summary(ordinal) for segment in self._segments())
            return next((summary for summary in found if summary is not None), None)
        except (RolloutLogError, lmdb.Error, OSError) as error:
            _logger.debug("cannot look for sample %d in %s: %s", ordinal, self.folder, error)
            return None

    def _segments(self) -> Iterator[Segment | SealedSegment]:
        """Yield the folder's segments, newest first, each open until the next one is asked for."""
        for path in reversed(segments_of(self.folder)):
            for there in (path, sealed_path(path)):
                try:
                    segment = open_segment(there)
                except FileNotFoundError:
                    continue  # sealed meanwhile, or deleted
                try:
                    yield segment
                finally:
                    segment.close()
                break
