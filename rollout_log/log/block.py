"""How events lie on disk: blocks that describe and check themselves (`docs/format.md`).

A block holds consecutive events of one sample. Its header says whose they are, so a block that is
found by scanning the pages of a damaged file can be attributed and believed without LMDB.
"""

from __future__ import annotations

import hashlib
import struct
import threading
import zlib
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import zstandard

from rollout_log.errors import LogDamaged
from rollout_log.events import Closed, Event, Marked, Opened, decode_events, encode_events

if TYPE_CHECKING:
    from rollout_log.stretch import Stretch

__all__ = [
    "MAGIC",
    "Block",
    "Claim",
    "Piece",
    "pack_blocks",
    "pieces_of",
    "read_claim",
    "unpack_block",
    "writer_identity",
]

MAGIC = b"RLB1"
VERSION = 1
RAW, ZSTD, COLUMNS = 0, 1, 2
"""Codecs. Columns: rebuilt from a sealed segment, and never stored as a block. 128 and above: private use."""

COMPRESS_ABOVE = 512
"""Bytes. Above that a value soon leaves its leaf page for overflow pages of 4 kB, so smaller pays twice."""
SPLIT_ABOVE = 64 << 10
"""Bytes of encoded events in one block; a single larger event is not split."""
SPLIT_AT = 192
"""Events in one block: with frames of usual size the bytes are right then, and nothing is encoded twice."""
MOST_BYTES = 1 << 30
"""What a block may expand to: more than a writer's whole queue."""
LEVEL = 1
"""On blocks of some kB, level 3 makes nothing smaller."""

_HEADER = struct.Struct(">4sBBH8sQQIII")
_CHECKSUM = struct.Struct(">I")
HEADER_SIZE = _HEADER.size + _CHECKSUM.size
_of_thread = threading.local()


class Block(msgspec.Struct, frozen=True, gc=False):
    """Consecutive events of one sample, checked and decompressed."""

    writer: bytes
    """`writer_identity` of the folder it was written in."""
    ordinal: int
    first: int
    count: int
    codec: int
    stored: int
    """Bytes on disk, header included."""
    payload: bytes
    """What `encode_events` made."""

    def events(self) -> list[Event]:
        """Decode the events. Raises `LogDamaged` where the payload is not what the header promises."""
        try:
            events = decode_events(self.payload)
        except (msgspec.DecodeError, ValueError, TypeError, RecursionError) as error:
            raise LogDamaged(
                f"block {self.first} of sample {self.ordinal} does not decode: {error}"
            ) from error
        if len(events) != self.count:
            raise LogDamaged(
                f"block {self.first} of sample {self.ordinal} has {len(events)} events, "
                f"and {self.count} by its header"
            )
        return events


class Piece(msgspec.Struct, frozen=True, gc=False):
    """Consecutive events of one sample, as folding takes them."""

    first: int
    count: int
    events: list[Event] | Stretch


def pieces_of(blocks: Iterable[Block], start: int) -> Iterator[Piece]:
    """Yield the events of blocks from `start` on."""
    for block in blocks:
        events = block.events()[max(start - block.first, 0) :]
        yield Piece(max(start, block.first), len(events), events)


def writer_identity(folder_name: str) -> bytes:
    """Return the 8 bytes that stand for a writer in its blocks."""
    return hashlib.blake2b(folder_name.encode(), digest_size=8).digest()


def pack_blocks(
    writer: bytes, ordinal: int, first: int, events: Sequence[Event]
) -> Iterator[tuple[int, bytes]]:
    """Encode consecutive events as one or more blocks: pairs of first sequence and bytes."""
    if len(events) > SPLIT_AT:
        for start in range(0, len(events), SPLIT_AT):
            yield from pack_blocks(writer, ordinal, first + start, events[start : start + SPLIT_AT])
        return
    payload = _encode(events)
    if len(payload) > SPLIT_ABOVE and len(events) > 1:
        half = len(events) // 2
        yield from pack_blocks(writer, ordinal, first, events[:half])
        yield from pack_blocks(writer, ordinal, first + half, events[half:])
        return
    codec, stored = RAW, payload
    if len(payload) > COMPRESS_ABOVE:
        squeezed = _compressor().compress(payload)
        if len(squeezed) < len(payload):
            codec, stored = ZSTD, squeezed
    header = _HEADER.pack(
        MAGIC, VERSION, codec, 0, writer, ordinal, first, len(events), len(payload), len(stored)
    )
    yield first, header + _CHECKSUM.pack(zlib.crc32(stored, zlib.crc32(header))) + stored


def _compressor() -> zstandard.ZstdCompressor:
    """Return this thread's: one is not safe to share, and costs as much to make as to use."""
    found: zstandard.ZstdCompressor | None = getattr(_of_thread, "compressor", None)
    if found is None:
        found = _of_thread.compressor = zstandard.ZstdCompressor(level=LEVEL, write_content_size=True)
    return found


class Claim(NamedTuple):
    """What a header says, true or not."""

    writer: bytes
    ordinal: int
    first: int
    events: int
    """How many."""
    stored: int
    """Bytes after the header."""


def read_claim(header: bytes) -> Claim:
    """Return what a block's header says, unchecked. Raises `LogDamaged` where it is too short."""
    if len(header) < HEADER_SIZE:
        raise LogDamaged(f"block of {len(header)} bytes is shorter than its header of {HEADER_SIZE}")
    _, _, _, _, writer, ordinal, first, count, _, stored = _HEADER.unpack_from(header)
    return Claim(writer, ordinal, first, count, stored)


def unpack_block(data: bytes) -> Block:
    """Check and decompress one block. Raises `LogDamaged`, which says what does not hold."""
    if len(data) < HEADER_SIZE:
        raise LogDamaged(f"block of {len(data)} bytes is shorter than its header of {HEADER_SIZE}")
    magic, version, codec, _, writer, ordinal, first, count, raw, stored = _HEADER.unpack_from(data)
    if magic != MAGIC:
        raise LogDamaged(f"block begins with {magic!r} instead of {MAGIC!r}")
    name = f"block {first} of sample {ordinal}"
    payload = data[HEADER_SIZE : HEADER_SIZE + stored]
    if len(payload) != stored:
        raise LogDamaged(f"{name} has {len(payload)} bytes where its header says {stored}")
    (checksum,) = _CHECKSUM.unpack_from(data, _HEADER.size)
    if zlib.crc32(payload, zlib.crc32(data[: _HEADER.size])) != checksum:
        raise LogDamaged(f"{name} fails its checksum")
    if version != VERSION or codec not in (RAW, ZSTD):
        raise LogDamaged(f"{name} has version {version} and codec {codec}, which this version cannot read")
    if codec == ZSTD:
        try:
            if raw > MOST_BYTES or zstandard.frame_content_size(payload) not in (raw, -1):
                raise LogDamaged(f"{name} says it has {raw} bytes of events, which it has not")
            payload = zstandard.ZstdDecompressor().decompress(payload, max_output_size=raw)
        except zstandard.ZstdError as error:
            raise LogDamaged(f"{name} does not decompress: {error}") from error
    if len(payload) != raw:
        raise LogDamaged(f"{name} has {len(payload)} bytes of events where its header says {raw}")
    return Block(writer, ordinal, first, count, codec, HEADER_SIZE + stored, payload)


def _encode(events: Sequence[Event]) -> bytes:
    try:
        return encode_events(events)
    except (TypeError, ValueError, OverflowError, RecursionError):
        return encode_events([_encodable(event) for event in events])


def _encodable(event: Event) -> Event:
    """Return the event, or what of it can be written: one odd value must not cost the events around it."""
    try:
        encode_events([event])
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        reason = {"unencodable": f"{type(error).__name__}: {error}".encode("ascii", "replace").decode()}
        candidates: list[Event] = []
        if isinstance(event, Opened):
            candidates.append(msgspec.structs.replace(event, metadata=reason))
        elif isinstance(event, Closed):
            candidates.append(msgspec.structs.replace(event, sample=reason))
            candidates.append(msgspec.structs.replace(event, reward=None, sample=reason))
        candidates.append(Marked("unencodable", {"kind": type(event).__name__, **reason}))
        for candidate in candidates:
            try:
                encode_events([candidate])
            except (TypeError, ValueError, OverflowError, RecursionError):
                continue
            return candidate
    return event
