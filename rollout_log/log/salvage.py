"""What damaged segments still have: every block and chunk whose own checksum holds, wherever it lies.

Files are read with `pread`, a window at a time, without LMDB and without believing any of their tables;
pages that the disk does not give count as zeros. Blocks never change, so one that lies on a page that
LMDB has freed is as true as any.
"""

from __future__ import annotations

import contextlib
import os
import re
import struct
from bisect import bisect_left
from collections.abc import Iterator
from pathlib import Path

import msgspec
import zstandard

from rollout_log.errors import LogDamaged, RolloutLogError
from rollout_log.events import Event, decode_events
from rollout_log.log import block, chunk
from rollout_log.log.block import Claim, read_claim, unpack_block, writer_identity
from rollout_log.log.directory import logs_at, segment_number, writers_of
from rollout_log.log.group import encode_items, places_of
from rollout_log.log.group_reader import GroupReader
from rollout_log.log.sealed import decode_page
from rollout_log.log.summary import Summary

__all__ = ["Salvage", "Salvaged"]

WINDOW = 1 << 20
_PAGE = 4096
_LARGEST = (1 << 64) - 1
_MAGICS = re.compile(b"|".join(map(re.escape, (block.MAGIC, chunk.MAGIC))))
_PLACE = struct.Struct(">8sQQQIQ")
"""Writer, ordinal, first sequence, number of events, file, offset: sorts by sample and sequence."""


class Salvaged(msgspec.Struct):
    """What is left of one sample."""

    folder: str
    """Its writer's, as far as it is known, else the writer's identity in hex."""
    ordinal: int
    summary: Summary | None
    """The newest that a sealed segment has; LMDB's are not believed, since they have no checksum."""
    events: Iterator[tuple[int, Event]]
    """Numbered; gaps are what was lost."""


class Salvage:
    """Everything intact in the segments of a log: `scan` first, then `samples`."""

    def __init__(self, log: Path) -> None:
        self.log = log
        folders = (writers_of(log) if log.is_dir() else []) or [
            f for one in logs_at(log) for f in writers_of(one)
        ]
        self.files = [
            path for folder in folders for path in sorted(folder.glob("segment-*.*"), key=segment_number)
        ]
        self.files = [path for path in self.files if segment_number(path)]
        self.broken = 0
        """Blocks and chunks that fail their checksum, and of which there is no whole copy either."""
        self.unreadable = 0
        """Bytes that the disk did not give."""
        self._names = {writer_identity(folder.name): folder.name for folder in folders}
        self._places: list[bytes] = []
        self._summaries: dict[tuple[bytes, int], Summary] = {}
        self._broken: list[Claim] = []
        self._unpacked: tuple[tuple[int, int], dict[tuple[int, int], list[Event]]] | None = None

    @property
    def windows(self) -> int:
        """How many times `scan` yields, about."""
        return sum(path.stat().st_size // WINDOW + 1 for path in self.files)

    def scan(self) -> Iterator[None]:
        """Look through all files; yields after each window."""
        for number, path in enumerate(self.files):
            yield from self._scan(number, path)
        self._places.sort()
        self.broken += sum(not self._has(claim) for claim in self._broken)

    def samples(self) -> Iterator[Salvaged]:
        """Yield what is left of each sample, by writer and ordinal. Its events want to be read at once."""
        start = 0
        known = dict.fromkeys(self._summaries)
        while start < len(self._places):
            whose = self._places[start][:16]
            end = start
            while end < len(self._places) and self._places[end].startswith(whose):
                end += 1
            writer, ordinal = whose[:8], int.from_bytes(whose[8:], "big")
            known.pop((writer, ordinal), None)
            yield self._salvaged(writer, ordinal, self._events(start, end))
            start = end
        for writer, ordinal in known:  # nothing of them is left but their summaries
            yield self._salvaged(writer, ordinal, iter(()))

    def _salvaged(self, writer: bytes, ordinal: int, events: Iterator[tuple[int, Event]]) -> Salvaged:
        name = self._names.get(writer, writer.hex())
        return Salvaged(name, ordinal, self._summaries.get((writer, ordinal)), events)

    def _scan(self, number: int, path: Path) -> Iterator[None]:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            size = os.fstat(descriptor).st_size
            done = 0  # up to here everything is known
            for start in range(0, size, WINDOW):
                window = self._read(descriptor, start, WINDOW + len(block.MAGIC) - 1)
                for found in _MAGICS.finditer(window):
                    if start + found.start() >= done:
                        done = max(done, self._take(descriptor, number, start + found.start(), size))
                yield
        finally:
            os.close(descriptor)

    def _take(self, descriptor: int, number: int, offset: int, size: int) -> int:
        """Note the block or chunk at an offset, if it is whole. Returns where the search goes on."""
        is_block = self._read(descriptor, offset, len(block.MAGIC)) == block.MAGIC
        try:
            if is_block:
                return offset + self._take_block(descriptor, number, offset)
            return offset + self._take_chunk(descriptor, number, offset, size)
        except (
            RolloutLogError,
            OSError,
            MemoryError,
            RecursionError,
            zstandard.ZstdError,
            msgspec.DecodeError,
        ):
            if is_block:
                self._suspect(self._read(descriptor, offset, block.HEADER_SIZE))
            else:
                self.broken += 1
            return offset + 1

    def _suspect(self, header: bytes) -> None:
        """Remember a broken block. LMDB leaves torn copies behind wherever it frees space in a page.

        What no writer puts into a header was torn there, and is no block that anything reads.
        """
        with contextlib.suppress(LogDamaged):
            claim = read_claim(header)
            if claim.writer in self._names and 1 <= claim.events <= block.SPLIT_AT and claim.stored:
                self._broken.append(claim)

    def _has(self, claim: Claim) -> bool:
        """Whether a whole block has the first event that a broken one says it has."""
        key = _PLACE.pack(claim.writer, claim.ordinal, min(claim.first + 1, _LARGEST), 0, 0, 0)
        at = bisect_left(self._places, key) - 1
        if at < 0:
            return False
        writer, ordinal, first, count, _, _ = _PLACE.unpack(self._places[at])
        return (writer, ordinal) == claim[:2] and claim.first < first + count

    def _take_block(self, descriptor: int, number: int, offset: int) -> int:
        found = unpack_block(self._read_block(descriptor, offset))
        found.events()
        place = found.writer, found.ordinal, found.first, found.count, number, offset
        self._places.append(_PLACE.pack(*place))
        return found.stored

    def _take_chunk(self, descriptor: int, number: int, offset: int, size: int) -> int:
        found = chunk.read_chunk(descriptor, offset, size)
        if found.kind == chunk.EVENTS:
            for ordinal, first, count in places_of(found.content):
                self._places.append(_PLACE.pack(found.writer, ordinal, first, count, number, offset))
        elif found.kind == chunk.SAMPLES:
            for ordinal, summary in decode_page(found.content):
                self._summaries[found.writer, ordinal] = summary
        return found.stored

    def _read_block(self, descriptor: int, offset: int) -> bytes:
        head = self._read(descriptor, offset, block.HEADER_SIZE)
        return head + self._read(descriptor, offset + len(head), read_claim(head).stored)

    def _read(self, descriptor: int, offset: int, length: int) -> bytes:
        try:
            return os.pread(descriptor, length, offset)
        except OSError:
            return b"".join(
                self._read_page(descriptor, at, min(_PAGE, offset + length - at))
                for at in range(offset, offset + length, _PAGE)
            )

    def _read_page(self, descriptor: int, offset: int, length: int) -> bytes:
        try:
            return os.pread(descriptor, length, offset)
        except OSError:
            self.unreadable += length
            return bytes(length)

    def _events(self, start: int, end: int) -> Iterator[tuple[int, Event]]:
        following = 0
        for place in self._places[start:end]:
            _, ordinal, first, count, number, offset = _PLACE.unpack(place)
            if first + count <= following:
                continue  # another copy of what has been read
            for sequence, event in enumerate(self._unpack(number, offset, ordinal, first), first):
                if sequence >= following:
                    yield sequence, event
                    following = sequence + 1

    def _unpack(self, number: int, offset: int, ordinal: int, first: int) -> list[Event]:
        """Return the events of a run, and keep those of the others in its chunk."""
        if self._unpacked is None or self._unpacked[0] != (number, offset):
            self._unpacked = (number, offset), self._unpack_all(number, offset)
        return self._unpacked[1].get((ordinal, first), [])

    def _unpack_all(self, number: int, offset: int) -> dict[tuple[int, int], list[Event]]:
        descriptor = os.open(self.files[number], os.O_RDONLY | os.O_CLOEXEC)
        try:
            if self._read(descriptor, offset, 4) == block.MAGIC:
                found = unpack_block(self._read_block(descriptor, offset))
                return {(found.ordinal, found.first): found.events()}
            content = chunk.read_chunk(descriptor, offset, os.fstat(descriptor).st_size).content
            runs = GroupReader(content).runs
            return {(run.ordinal, run.first): decode_events(encode_items(run.events)) for run in runs}
        except (RolloutLogError, OSError, msgspec.DecodeError):
            self.broken += 1
            return {}
        finally:
            os.close(descriptor)
