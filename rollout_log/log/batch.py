"""How blocks lie on disk: batches that describe and check themselves (`docs/format.md`).

What one commit has of many samples is compressed together: streams of one engine are alike, and what one
sample has of a commit is too little to find that out. The directory says whose each block is, so a batch that
is found by scanning the pages of a damaged file can be attributed and believed without LMDB.
"""

from __future__ import annotations

import struct
import threading
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple, TypeVar

import zstandard

from rollout_log.errors import LogDamaged
from rollout_log.log.block import RAW, ZSTD, Block

__all__ = [
    "HEADER_SIZE",
    "MAGIC",
    "Batch",
    "Batches",
    "Claim",
    "Packer",
    "Place",
    "claim_size_of",
    "read_claim",
    "size_of",
    "unpack_batch",
]

MAGIC = b"RLB1"
VERSION = 1

FULL = 64 << 10
"""Bytes of encoded events that a batch may have, unless it is a single block. Larger ones come out a little
smaller, and reading one sample unpacks every batch that has a block of it."""
COMPRESS_ABOVE = 256
"""Bytes."""
MOST_BYTES = 1 << 30
"""What a batch may expand to: more than a writer's whole queue."""
MOST_BLOCKS = 1 << 16
LEVEL = 1
"""Level 3 takes a third longer and makes nothing smaller."""
HELD = 32 << 20
"""Bytes of batches that a reader keeps unpacked: neighbours share them."""

_HEADER = struct.Struct(">4sBBH8sQIII")
_CHECKSUM = struct.Struct(">I")
HEADER_SIZE = _HEADER.size + _CHECKSUM.size
_PLACE = struct.Struct(">QQQII")
_END = struct.Struct(">I")
_of_thread = threading.local()
_Part = TypeVar("_Part", "Claim", "Batch")


class Place(NamedTuple):
    """One line of a batch's directory: a block of it."""

    ordinal: int
    first: int
    """Sequence of its first event."""
    previous: int
    """The batch before this one that has events of the sample, in the same segment; 0: none."""
    events: int
    """How many."""
    end: int
    """Where they end among the uncompressed events of the batch; they begin where those before them end."""


class _Header(NamedTuple):
    magic: bytes
    version: int
    codec: int
    flags: int
    writer: bytes
    number: int
    blocks: int
    raw: int
    """Bytes of events, uncompressed …"""
    stored: int
    """… and as they lie here."""


class Claim(NamedTuple):
    """What a batch says of itself, true or not."""

    writer: bytes
    number: int
    directory: bytes
    stored: int
    """Bytes in all."""

    def places(self) -> list[Place]:
        """Return the lines of the directory."""
        return list(map(Place._make, _PLACE.iter_unpack(self.directory)))

    def places_of(self, ordinal: int) -> Iterator[tuple[int, Place]]:
        """Yield where the events of one sample begin, and the line that says the rest."""
        wanted, lines = ordinal.to_bytes(8, "big"), self.directory
        at = lines.find(wanted)
        while at >= 0:
            if at % _PLACE.size == 0:
                start = _END.unpack_from(lines, at - _END.size)[0] if at else 0
                yield start, Place._make(_PLACE.unpack_from(lines, at))
            at = lines.find(wanted, at - at % _PLACE.size + _PLACE.size)


class Batch:
    """A batch, checked and decompressed."""

    def __init__(self, claim: Claim, codec: int, payload: bytes) -> None:
        self.claim = claim
        self._codec = codec
        self._payload = payload

    def __len__(self) -> int:
        """Bytes of events."""
        return len(self._payload)

    def blocks(self) -> Iterator[Block]:
        """Yield its blocks, in order."""
        start = 0
        for place in self.claim.places():
            yield self._block(start, place)
            start = place.end

    def blocks_of(self, ordinal: int) -> list[Block]:
        """Return the blocks of one sample."""
        return [self._block(start, place) for start, place in self.claim.places_of(ordinal)]

    def _block(self, start: int, place: Place) -> Block:
        payload = self._payload[start : place.end]
        share = self.claim.stored * len(payload) // max(len(self._payload), 1)
        writer, codec = self.claim.writer, self._codec
        return Block(writer, place.ordinal, place.first, place.events, codec, share, payload)


class Packer:
    """Packs the blocks of one commit, and remembers which batch is the last one of each sample."""

    def __init__(self, writer: bytes, number: int, last: dict[int, int]) -> None:
        """`number`: of the first batch. `last`: by ordinal, the last batch of a sample before this commit."""
        self.last = last
        self._writer = writer
        self._number = number

    def pack(self, blocks: Iterable[tuple[int, int, int, bytes]]) -> Iterator[tuple[int, bytes]]:
        """Yield number and bytes of each batch.

        Blocks are ordinal, first sequence, number of events, payload; a sample's in a row.
        """
        last, put = self.last, _PLACE.pack
        ordinals: list[int] = []
        directory: list[bytes] = []
        payloads: list[bytes] = []
        size = 0
        for ordinal, first, count, payload in blocks:
            if size and (size + len(payload) > FULL or len(ordinals) == MOST_BLOCKS):
                yield self._close(ordinals, directory, payloads)
                ordinals, directory, payloads, size = [], [], [], 0
            size += len(payload)
            ordinals.append(ordinal)
            directory.append(put(ordinal, first, last.get(ordinal, 0), count, size))
            payloads.append(payload)
        if ordinals:
            yield self._close(ordinals, directory, payloads)

    def _close(self, ordinals: list[int], directory: list[bytes], payloads: list[bytes]) -> tuple[int, bytes]:
        number = self._number
        self._number += 1
        self.last.update(dict.fromkeys(ordinals, number))
        return number, _pack(self._writer, number, directory, b"".join(payloads))


class Batches:
    """The batches of a segment, for reading the blocks of one sample after the other."""

    def __init__(self, where: Path, get: Callable[[int], bytes | None]) -> None:
        """`get` returns the bytes of a batch of the file `where` by its number, None where there is none."""
        self._where = where
        self._get = get
        self._held: OrderedDict[int, Batch] = OrderedDict()
        self._size = 0
        self._lock = threading.Lock()

    def blocks(self, ordinal: int, last: int, start: int = 0) -> Iterator[Block]:
        """Yield a sample's blocks that hold events from `start` on; `last` is its last batch.

        Raises `LogDamaged`.
        """
        for number in reversed(self._numbers(ordinal, last, start)):
            for block in self._unpacked(number).blocks_of(ordinal):
                if block.first + block.count > start:
                    yield block

    def _numbers(self, ordinal: int, last: int, start: int) -> list[int]:
        """Return the batches with a sample's events from `start` on, newest first, from their directories."""
        numbers: list[int] = []
        while last:
            _, place = next(self._claim(last).places_of(ordinal), (0, None))
            if place is None or place.previous >= last:
                raise LogDamaged(
                    f"{self._where}: batch {last} should have events of sample {ordinal}, and has none"
                )
            numbers.append(last)
            if place.first <= start:
                break
            last = place.previous
        return numbers

    def _claim(self, number: int) -> Claim:
        held = self._held.get(number)
        return self._read(number, read_claim) if held is None else held.claim

    def _unpacked(self, number: int) -> Batch:
        with self._lock:
            if (held := self._held.get(number)) is not None:
                self._held.move_to_end(number)
                return held
        batch = self._read(number, unpack_batch)
        if batch.claim.number != number:
            raise LogDamaged(f"{self._where}: batch {batch.claim.number} lies where batch {number} belongs")
        with self._lock:
            if self._held.setdefault(number, batch) is batch:
                self._size += len(batch)
            while self._size > HELD and len(self._held) > 1:
                self._size -= len(self._held.popitem(last=False)[1])
        return batch

    def _read(self, number: int, read: Callable[[bytes], _Part]) -> _Part:
        data = self._get(number)
        try:
            if data is None:
                raise LogDamaged(f"batch {number} is missing")
            return read(data)
        except LogDamaged as error:
            raise LogDamaged(f"{self._where}: {error}") from error


def _pack(writer: bytes, number: int, directory: list[bytes], payload: bytes) -> bytes:
    codec, stored = RAW, payload
    if len(payload) > COMPRESS_ABOVE:
        squeezed = _zstd()[0].compress(payload)
        if len(squeezed) < len(payload):
            codec, stored = ZSTD, squeezed
    header = _HEADER.pack(
        *_Header(MAGIC, VERSION, codec, 0, writer, number, len(directory), len(payload), len(stored))
    )
    rest = b"".join((*directory, stored))
    return b"".join((header, _CHECKSUM.pack(zlib.crc32(rest, zlib.crc32(header))), rest))


def _zstd() -> tuple[zstandard.ZstdCompressor, zstandard.ZstdDecompressor]:
    """Return this thread's: they are not safe to share, and cost as much to make as to use."""
    found: tuple[zstandard.ZstdCompressor, zstandard.ZstdDecompressor] | None
    found = getattr(_of_thread, "zstd", None)
    if found is None:
        compressor = zstandard.ZstdCompressor(level=LEVEL, write_content_size=True)
        found = _of_thread.zstd = compressor, zstandard.ZstdDecompressor()
    return found


def size_of(head: bytes) -> int:
    """Return how long the batch says it is that begins with these bytes. Raises `LogDamaged`."""
    header = _read_header(head)
    return _end_of_directory(header) + header.stored


def claim_size_of(head: bytes) -> int:
    """Return how much of it `read_claim` needs. Raises `LogDamaged`."""
    return _end_of_directory(_read_header(head))


def read_claim(data: bytes) -> Claim:
    """Return what a batch says of itself, unchecked; its events need not be there. Raises `LogDamaged`."""
    header = _read_header(data)
    end = _end_of_directory(header)
    if len(data) < end:
        raise LogDamaged(f"batch {header.number} ends within its directory")
    return Claim(header.writer, header.number, data[HEADER_SIZE:end], end + header.stored)


def unpack_batch(data: bytes) -> Batch:
    """Check and decompress one batch. Raises `LogDamaged`, which says what does not hold."""
    header, claim = _read_header(data), read_claim(data)
    name = f"batch {header.number}"
    if len(data) < claim.stored:
        raise LogDamaged(f"{name} has {len(data)} bytes where its header says {claim.stored}")
    (checksum,) = _CHECKSUM.unpack_from(data, _HEADER.size)
    rest = memoryview(data)[HEADER_SIZE : claim.stored]
    if zlib.crc32(rest, zlib.crc32(data[: _HEADER.size])) != checksum:
        raise LogDamaged(f"{name} fails its checksum")
    if header.version != VERSION or header.codec not in (RAW, ZSTD):
        raise LogDamaged(
            f"{name} has version {header.version} and codec {header.codec}, which this version cannot read"
        )
    payload = data[claim.stored - header.stored : claim.stored]
    if header.codec == ZSTD:
        payload = _decompress(payload, header.raw, name)
    (end,) = _END.unpack_from(claim.directory, len(claim.directory) - _END.size)
    if not len(payload) == header.raw == end:
        raise LogDamaged(f"{name} has {len(payload)} bytes of events where its header says {header.raw}")
    return Batch(claim, header.codec, payload)


def _decompress(data: bytes, size: int, name: str) -> bytes:
    try:
        if size > MOST_BYTES or zstandard.frame_content_size(data) not in (size, -1):
            raise LogDamaged(f"{name} says it has {size} bytes of events, which it has not")
        return _zstd()[1].decompress(data, max_output_size=size)
    except zstandard.ZstdError as error:
        raise LogDamaged(f"{name} does not decompress: {error}") from error


def _end_of_directory(header: _Header) -> int:
    return HEADER_SIZE + header.blocks * _PLACE.size


def _read_header(data: bytes) -> _Header:
    if len(data) < HEADER_SIZE:
        raise LogDamaged(f"batch of {len(data)} bytes is shorter than its header of {HEADER_SIZE}")
    header = _Header._make(_HEADER.unpack_from(data))
    if header.magic != MAGIC:
        raise LogDamaged(f"batch begins with {header.magic!r} instead of {MAGIC!r}")
    if not 0 < header.blocks <= MOST_BLOCKS:
        raise LogDamaged(f"batch {header.number} says it has {header.blocks} blocks")
    return header
