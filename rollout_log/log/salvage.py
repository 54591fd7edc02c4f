"""What damaged segments still have: every batch and chunk whose own checksum holds, wherever it lies.

Files are read with `pread`, a window at a time, without LMDB and without believing any of their tables;
pages that the disk does not give count as zeros. Batches never change, so one that lies on a page that
LMDB has freed is as true as any.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import struct
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path

import msgspec
import zstandard

from rollout_log.errors import LogDamaged, RolloutLogError
from rollout_log.events import Event, decode_events
from rollout_log.log import batch, chunk
from rollout_log.log.batch import Claim, Place, claim_size_of, read_claim, size_of, unpack_batch
from rollout_log.log.block import SPLIT_AT, writer_identity
from rollout_log.log.directory import SEALED, logs_at, segment_number, writers_of
from rollout_log.log.group import encode_items, places_of
from rollout_log.log.group_reader import GroupReader
from rollout_log.log.sealed import HEAD, TAIL, TAIL_MAGIC, decode_page
from rollout_log.log.summary import Summary

__all__ = ["Salvage", "Salvaged"]

WINDOW = 1 << 20
_HELD = 64 << 20
"""Bytes of encoded events that are kept unpacked: samples side by side are packed together."""
_PAGE = 4096
_LARGEST = (1 << 64) - 1
_MAGICS = re.compile(b"|".join(map(re.escape, (batch.MAGIC, chunk.MAGIC))))
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
        """Batches and chunks that fail their checksum, and of which there is no whole copy either."""
        self.unreadable = 0
        """Bytes that the disk did not give."""
        self.damaged = 0
        """Bytes of broken batches, and of sealed files what is in no whole chunk: all of those is chunks."""
        self.cut = 0
        """Sealed files that lack their end."""
        self._names = {writer_identity(folder.name): folder.name for folder in folders}
        self._places: list[bytes] = []
        self._summaries: dict[tuple[bytes, int], Summary] = {}
        self._broken: list[Claim] = []
        self._unpacked: OrderedDict[tuple[int, int], dict[tuple[int, int], bytes]] = OrderedDict()
        """File and offset -> ordinal and first sequence -> encoded events."""
        self._held = 0

    @property
    def windows(self) -> int:
        """How many times `scan` yields, about."""
        return sum(path.stat().st_size // WINDOW + 1 for path in self.files)

    def scan(self) -> Iterator[None]:
        """Look through all files; yields after each window."""
        for number, path in enumerate(self.files):
            yield from self._scan(number, path)
        self._places.sort()
        lost = [claim.stored for claim in self._broken if not self._has(claim)]
        self.broken += len(lost)
        self.damaged += sum(lost)

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
            whole = 0
            for start in range(0, size, WINDOW):
                window = self._read(descriptor, start, WINDOW + len(batch.MAGIC) - 1)
                for found in _MAGICS.finditer(window):
                    if start + found.start() >= done:
                        taken = self._take(descriptor, number, start + found.start(), size)
                        whole += taken
                        done = max(done, start + found.start() + (taken or 1))
                yield
            if path.suffix == SEALED:
                self._count_damage(descriptor, size, whole)
        finally:
            os.close(descriptor)

    def _take(self, descriptor: int, number: int, offset: int, size: int) -> int:
        """Note the batch or chunk at an offset. Returns how many bytes it has, 0 where it is not whole."""
        is_batch = self._read(descriptor, offset, len(batch.MAGIC)) == batch.MAGIC
        try:
            if is_batch:
                return self._take_batch(descriptor, number, offset, size)
            return self._take_chunk(descriptor, number, offset, size)
        except (
            RolloutLogError,
            OSError,
            MemoryError,
            RecursionError,
            zstandard.ZstdError,
            msgspec.DecodeError,
        ):
            if is_batch:
                self._suspect(descriptor, offset)
            else:
                self.broken += 1
            return 0

    def _count_damage(self, descriptor: int, size: int, whole: int) -> None:
        """Count what of a sealed file is neither its ends nor in the `whole` bytes of its chunks."""
        has_tail = self._read(descriptor, max(size - TAIL.size, 0), len(TAIL_MAGIC)) == TAIL_MAGIC
        self.cut += not has_tail
        self.damaged += max(size - whole - len(HEAD) - TAIL.size * has_tail, 0)

    def _suspect(self, descriptor: int, offset: int) -> None:
        """Remember a broken batch, by what it says it has."""
        with contextlib.suppress(RolloutLogError, OSError):
            head = self._read(descriptor, offset, batch.HEADER_SIZE)
            claim = read_claim(self._read(descriptor, offset, claim_size_of(head)))
            if claim.writer in self._names:
                self._broken.append(claim)

    def _has(self, claim: Claim) -> bool:
        """Whether whole batches have the first event of each block that a broken one says it has.

        LMDB leaves torn copies behind wherever it frees space in a page: from the first line on that no
        writer makes, they were written over.
        """

        def made(place: Place) -> bool:
            return 0 < place.events <= SPLIT_AT and place.previous < claim.number

        whole = itertools.takewhile(made, claim.places())
        return all(self._has_event(claim.writer, place.ordinal, place.first) for place in whole)

    def _has_event(self, writer: bytes, ordinal: int, sequence: int) -> bool:
        key = _PLACE.pack(writer, ordinal, min(sequence + 1, _LARGEST), 0, 0, 0)
        at = bisect_left(self._places, key) - 1
        if at < 0:
            return False
        whose, of, first, count, _, _ = _PLACE.unpack(self._places[at])
        return (whose, of) == (writer, ordinal) and sequence < first + count

    def _take_batch(self, descriptor: int, number: int, offset: int, size: int) -> int:
        found = unpack_batch(self._read_batch(descriptor, offset, size))
        for block in found.blocks():
            block.events()
        for place in found.claim.places():
            whose = found.claim.writer, place.ordinal, place.first, place.events
            self._places.append(_PLACE.pack(*whose, number, offset))
        return found.claim.stored

    def _take_chunk(self, descriptor: int, number: int, offset: int, size: int) -> int:
        found = chunk.read_chunk(descriptor, offset, size)
        if found.kind == chunk.EVENTS:
            for ordinal, first, count in places_of(found.content):
                self._places.append(_PLACE.pack(found.writer, ordinal, first, count, number, offset))
        elif found.kind == chunk.SAMPLES:
            for ordinal, summary in decode_page(found.content):
                self._summaries[found.writer, ordinal] = summary
        return found.stored

    def _read_batch(self, descriptor: int, offset: int, size: int) -> bytes:
        """Read a batch whole. Raises `LogDamaged` where the file ends before it does."""
        length = size_of(self._read(descriptor, offset, batch.HEADER_SIZE))
        if length > size - offset:
            raise LogDamaged(f"the batch at {offset} says it has {length} bytes, and the file ends before")
        return self._read(descriptor, offset, length)

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
        """Return the events of a block or a run; what they were packed with is kept for a while."""
        found = self._unpacked.get((number, offset))
        if found is None:
            found = self._unpacked[number, offset] = self._unpack_all(number, offset)
            self._held += sum(map(len, found.values()))
            while self._held > _HELD and len(self._unpacked) > 1:
                self._held -= sum(map(len, self._unpacked.popitem(last=False)[1].values()))
        self._unpacked.move_to_end((number, offset))
        try:
            return decode_events(found.get((ordinal, first), b"\x90"))
        except (msgspec.DecodeError, ValueError, TypeError, RecursionError):
            return []  # seen to be whole when it was scanned

    def _unpack_all(self, number: int, offset: int) -> dict[tuple[int, int], bytes]:
        """Return the encoded events of each block or run at an offset."""
        descriptor = os.open(self.files[number], os.O_RDONLY | os.O_CLOEXEC)
        try:
            size = os.fstat(descriptor).st_size
            if self._read(descriptor, offset, len(batch.MAGIC)) == batch.MAGIC:
                found = unpack_batch(self._read_batch(descriptor, offset, size))
                return {(block.ordinal, block.first): block.payload for block in found.blocks()}
            content = chunk.read_chunk(descriptor, offset, size).content
            runs = GroupReader(content).runs
            return {(run.ordinal, run.first): encode_items(run.events) for run in runs}
        except (RolloutLogError, OSError):
            self.broken += 1
            return {}
        finally:
            os.close(descriptor)
