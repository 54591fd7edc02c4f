"""A sealed segment: one immutable file, read with `pread` and without locks (`docs/format.md`).

Chunks of events come first, then the summaries, then tables of sorted rows that are searched in place,
and at the end where everything is. Nothing is believed whose checksum does not hold.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import struct
from bisect import bisect_left
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import zstandard

from rollout_log.errors import LogDamaged
from rollout_log.events import decode_events
from rollout_log.log.block import COLUMNS, Block, Piece, writer_identity
from rollout_log.log.chunk import EVENTS, HEADER_SIZE, META, SAMPLES, TABLE, Chunk, read_chunk
from rollout_log.log.directory import FORMAT, check_format, segment_number
from rollout_log.log.group import Run, encode_items
from rollout_log.log.group_reader import GroupReader
from rollout_log.log.segment import hash_key, key_of_step
from rollout_log.log.summary import Summary, decode_summary

__all__ = [
    "HEAD",
    "PLACE",
    "TAIL",
    "WIDTHS",
    "ContentHash",
    "Meta",
    "SealedSegment",
    "decode_page",
    "file_hash",
]

HEAD = b"RLSEALED" + struct.pack(">HHI", *FORMAT, 0)
TAIL = struct.Struct(">8sQ32s")
"""Magic, offset of the chunk that says where everything is, BLAKE2b-32 of all bytes before."""
TAIL_MAGIC = b"RLSEALE1"
PLACE = struct.Struct(">QQQQ")
"""A row of `places`: ordinal, first sequence, number of events, offset of their chunk."""
_PAGE = struct.Struct(">QQ")
_ORDINAL = struct.Struct(">Q")
WIDTHS = {"places": PLACE.size, "pages": _PAGE.size, "keys": 24, "steps": 16}
"""Table -> bytes of a row. `pages`: first ordinal, offset; `keys` and `steps` as the keys of a segment."""

_ROWS_AT_ONCE = 4096
_PAGE_LIMIT = 1 << 28

_decode_page = msgspec.msgpack.Decoder(list[tuple[int, bytes]]).decode


class Meta(msgspec.Struct):
    """What a sealed segment says of itself. JSON, in the last chunk."""

    format: tuple[int, int]
    writer: str
    run: str
    segment: int
    created_unix_ns: int
    sealed_unix_ns: int
    samples: int
    events: int
    content: str
    """`ContentHash` of all events: the same however they were packed."""
    tables: dict[str, tuple[int, int]]
    """Name -> offset of its chunk, number of rows."""


class SealedSegment:
    """One sealed segment, open for reading. Close it when done; any thread may use it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.number = segment_number(path)
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            self._size = os.fstat(self._descriptor).st_size
            self.meta = self._read_meta()
        except BaseException:
            os.close(self._descriptor)
            raise
        self._writer = writer_identity(self.meta.writer)
        self._tables: dict[str, _Rows] = {}
        self._page: tuple[int, dict[int, Summary]] = (-1, {})
        self._last: tuple[int, int, GroupReader] | None = None

    @classmethod
    def open(cls, path: Path) -> SealedSegment:
        """Open a sealed segment. Raises `LogTooNew`, `LogDamaged`, `FileNotFoundError`."""
        return cls(path)

    def close(self) -> None:
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def header(self) -> dict[str, Any]:
        """What the segment says of itself."""
        return msgspec.structs.asdict(self.meta)

    def size(self) -> int:
        """Bytes on disk."""
        return self._size

    def count(self) -> int:
        """How many samples it has."""
        return self.meta.samples

    def summary(self, ordinal: int) -> Summary | None:
        """Return a sample's summary as of this segment."""
        pages = self._table("pages")
        at = bisect_left(pages, _PAGE.pack(ordinal + 1, 0)) - 1
        if at < 0:
            return None
        return self._summaries(_PAGE.unpack(pages[at])[1]).get(ordinal)

    def summaries(self) -> Iterator[tuple[int, Summary]]:
        """Yield all samples of this segment, by ordinal."""
        for row in self._table("pages"):
            yield from self._summaries(_PAGE.unpack(row)[1]).items()

    def with_key(self, key: str) -> list[int]:
        """Return the ordinals of all samples of a key."""
        rows = self._table("keys").with_prefix(hash_key(key.encode("utf-8", "surrogatepass")))
        return [_ORDINAL.unpack(row[16:])[0] for row in rows]

    def in_step(self, step: int) -> list[int]:
        """Return the ordinals of all samples that took part in a step."""
        return [_ORDINAL.unpack(row[8:])[0] for row in self._table("steps").with_prefix(key_of_step(step))]

    def steps(self) -> Iterator[int]:
        """Yield every step that a sample took part in, ascending."""
        last = None
        for row in self._table("steps"):
            if row[:8] != last:
                last = row[:8]
                yield _ORDINAL.unpack(last)[0] - (1 << 63)

    def blocks(self, ordinal: int, start: int = 0) -> Iterator[Block]:
        """Yield a sample's blocks that hold events from `start` on, rebuilt. Raises `LogDamaged`."""
        for stored, group, place in self._runs_of(ordinal, start):
            run = group.runs[place]
            count = len(run.events)
            share = stored * count // max(sum(count for _, _, count in group.places), 1)
            payload = encode_items(run.events)
            yield Block(self._writer, ordinal, run.first, count, COLUMNS, share, payload)

    def pieces(self, ordinal: int, start: int = 0) -> Iterator[Piece]:
        """Yield a sample's events from `start` on, as columns where that goes. Raises `LogDamaged`."""
        for _, group, place in self._runs_of(ordinal, start):
            first = group.places[place][1]
            if first < start:
                events = decode_events(encode_items(group.runs[place].events[start - first :]))
                yield Piece(start, len(events), events)
                continue
            for part in group.parts(place):
                several = len(part) if isinstance(part, list) else part.events
                yield Piece(first, several, part)
                first += several

    def groups(self) -> Iterator[list[Run]]:
        """Yield the runs of each chunk of events, in the order of the file."""
        for offset in sorted({offset for _, _, _, offset in self.places()}):
            yield self._group(offset)[1].runs

    def events_chunk(self, offset: int) -> Chunk:
        """Return the chunk of events at an offset."""
        return self._chunk(offset, EVENTS)

    def places(self) -> Iterator[tuple[int, int, int, int]]:
        """Yield the rows of `places`: ordinal, first sequence, number of events, offset of their chunk."""
        return (PLACE.unpack(row) for row in self._table("places"))

    def index_rows(self, table: str) -> set[bytes]:
        """Return all rows of `keys` or `steps`."""
        return set(self._table(table))

    def check_hash(self) -> None:
        """Raise `LogDamaged` where any byte of the file is another than was sealed."""
        told = TAIL.unpack(self._pread(TAIL.size, self._size - TAIL.size))[2]
        if file_hash(self._descriptor, self._size - TAIL.size) != told:
            raise LogDamaged(f"{self.path} does not have the hash that it was sealed with")

    # Parts

    def _read_meta(self) -> Meta:
        head = self._pread(len(HEAD), 0)
        if head[:8] != HEAD[:8]:
            raise LogDamaged(
                f"{self.path} does not begin as a sealed segment does: it was overwritten or cut"
            )
        if len(head) == len(HEAD):
            check_format(struct.unpack_from(">HH", head, 8), self.path)
        if self._size < len(HEAD) + TAIL.size:
            raise LogDamaged(f"{self.path} has {self._size} bytes, too few for a sealed segment")
        magic, offset, _ = TAIL.unpack(self._pread(TAIL.size, self._size - TAIL.size))
        if magic != TAIL_MAGIC:
            raise LogDamaged(f"{self.path} has not the end of a sealed segment; it was cut or overwritten")
        try:
            return msgspec.json.decode(self._chunk(offset, META).content, type=Meta)
        except msgspec.DecodeError as error:
            raise LogDamaged(f"{self.path} has a last chunk that cannot be read: {error}") from error

    def _table(self, name: str) -> _Rows:
        found = self._tables.get(name)
        if found is None:
            offset, count = self.meta.tables.get(name, (-1, 0))
            content = self._chunk(offset, TABLE).content
            if len(content) != count * WIDTHS[name]:
                raise LogDamaged(f"{self.path}: table {name} has not the {count} rows it should have")
            found = self._tables[name] = _Rows(self, offset + HEADER_SIZE, WIDTHS[name], count)
        return found

    def _summaries(self, offset: int) -> dict[int, Summary]:
        known, page = self._page
        if known != offset:
            try:
                page = dict(decode_page(self._chunk(offset, SAMPLES).content))
            except (zstandard.ZstdError, msgspec.DecodeError) as error:
                raise LogDamaged(f"{self.path}: the summaries at {offset} cannot be read: {error}") from error
            self._page = offset, page
        return page

    def _runs_of(self, ordinal: int, start: int) -> Iterator[tuple[int, GroupReader, int]]:
        """Yield the bytes of a group, the group, and the place of a run that has events from `start` on."""
        for row in self._table("places").with_prefix(_ORDINAL.pack(ordinal)):
            _, first, count, offset = PLACE.unpack(row)
            if first + count <= start:
                continue
            stored, group = self._group(offset)
            if (ordinal, first, count) not in group.places:
                raise LogDamaged(
                    f"{self.path}: the chunk at {offset} has not events {first} to {first + count - 1} of "
                    f"sample {ordinal}"
                )
            yield stored, group, group.places.index((ordinal, first, count))

    def _group(self, offset: int) -> tuple[int, GroupReader]:
        """Return how many bytes a group takes, and what reads it: the same as last time, where it is."""
        if self._last is None or self._last[0] != offset:
            chunk = self._chunk(offset, EVENTS)
            self._last = offset, chunk.stored, GroupReader(chunk.content, f"{self.path}, chunk at {offset}")
        return self._last[1:]

    def _chunk(self, offset: int, kind: int) -> Chunk:
        try:
            chunk = read_chunk(self._descriptor, offset, self._size - TAIL.size)
        except (LogDamaged, OSError) as error:
            raise LogDamaged(f"{self.path}: {error}") from error
        if chunk.kind != kind:
            raise LogDamaged(f"{self.path}: the chunk at {offset} is of kind {chunk.kind} instead of {kind}")
        return chunk

    def _pread(self, length: int, offset: int) -> bytes:
        try:
            return os.pread(self._descriptor, length, offset)
        except OSError as error:
            raise LogDamaged(f"{self.path} cannot be read at {offset}: {error}") from error


class _Rows:
    """Sorted rows of one width, in the file."""

    def __init__(self, segment: SealedSegment, offset: int, width: int, count: int) -> None:
        self._segment = segment
        self._offset = offset
        self._width = width
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, at: int) -> bytes:
        return self._segment._pread(self._width, self._offset + at * self._width)

    def __iter__(self) -> Iterator[bytes]:
        return self._from(0)

    def with_prefix(self, prefix: bytes) -> Iterator[bytes]:
        """Yield the rows that begin with a prefix."""
        return itertools.takewhile(lambda row: row.startswith(prefix), self._from(bisect_left(self, prefix)))

    def _from(self, start: int) -> Iterator[bytes]:
        several = 16
        while start < self._count:
            several = min(several, self._count - start)
            data = self._segment._pread(several * self._width, self._offset + start * self._width)
            for at in range(0, len(data), self._width):
                yield data[at : at + self._width]
            start += several
            several = _ROWS_AT_ONCE


def decode_page(content: bytes) -> list[tuple[int, Summary]]:
    """Decode a chunk of summaries. Raises `LogDamaged`, and what zstandard and msgspec raise."""
    size = zstandard.frame_content_size(content)
    if not 0 <= size <= _PAGE_LIMIT:
        raise LogDamaged(f"a page of summaries says that it has {size} bytes; the limit is {_PAGE_LIMIT}")
    rows = _decode_page(zstandard.ZstdDecompressor().decompress(content))
    return [(ordinal, decode_summary(data)) for ordinal, data in rows]


class ContentHash:
    """A hash of events and whose they are, however they are grouped. Give events in one order."""

    def __init__(self) -> None:
        self._hash = hashlib.blake2b(digest_size=32)
        self._next: tuple[int, int] | None = None

    def update(self, run: Run) -> None:
        if (run.ordinal, run.first) != self._next:
            self._hash.update(struct.pack(">QQ", run.ordinal, run.first))
        data = encode_items(run.events)
        self._hash.update(memoryview(data)[{0xDC: 3, 0xDD: 5}.get(data[0], 1) :])
        self._next = run.ordinal, run.first + len(run.events)

    def hexdigest(self) -> str:
        return self._hash.hexdigest()


def file_hash(descriptor: int, length: int) -> bytes:
    """Hash the first bytes of a file."""
    found = hashlib.blake2b(digest_size=32)
    offset = 0
    while offset < length:
        part = os.pread(descriptor, min(length - offset, 1 << 20), offset)
        if not part:
            break
        found.update(part)
        offset += len(part)
    return found.digest()
