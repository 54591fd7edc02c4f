"""The pieces of a sealed segment: each says what and whose it is, and checks itself (`docs/format.md`).

Found by scanning a damaged file, a chunk can be attributed and believed without the rest of it.
"""

from __future__ import annotations

import os
import struct
import zlib

import msgspec

from rollout_log.errors import LogDamaged

__all__ = ["EVENTS", "HEADER_SIZE", "MAGIC", "META", "SAMPLES", "TABLE", "Chunk", "pack_chunk", "read_chunk"]

MAGIC = b"RLC1"
EVENTS, SAMPLES, TABLE, META = 1, 2, 3, 4

_HEADER = struct.Struct(">4sB3x8sQ")
_CHECKSUM = struct.Struct(">I")
HEADER_SIZE = _HEADER.size + _CHECKSUM.size


class Chunk(msgspec.Struct, frozen=True, gc=False):
    """A piece whose checksum holds."""

    kind: int
    writer: bytes
    """`writer_identity` of the folder that the segment belongs to."""
    content: bytes

    @property
    def stored(self) -> int:
        """Bytes in the file."""
        return HEADER_SIZE + len(self.content)


def pack_chunk(kind: int, writer: bytes, content: bytes) -> bytes:
    """Put the header before some content."""
    header = _HEADER.pack(MAGIC, kind, writer, len(content))
    return b"".join([header, _CHECKSUM.pack(zlib.crc32(content, zlib.crc32(header))), content])


def read_chunk(descriptor: int, offset: int, limit: int) -> Chunk:
    """Read the chunk at an offset of a file that has `limit` bytes. Raises `LogDamaged`."""
    head = os.pread(descriptor, HEADER_SIZE, offset) if 0 <= offset < limit else b""
    if len(head) < HEADER_SIZE:
        raise LogDamaged(f"there is no chunk at {offset}: the file has {limit} bytes")
    magic, kind, writer, length = _HEADER.unpack_from(head)
    if magic != MAGIC:
        raise LogDamaged(f"the chunk at {offset} begins with {magic!r} instead of {MAGIC!r}")
    if length > limit - offset - HEADER_SIZE:
        raise LogDamaged(f"the chunk at {offset} says it has {length} bytes, and the file ends before")
    content = _read(descriptor, length, offset + HEADER_SIZE)
    if zlib.crc32(content, zlib.crc32(head[: _HEADER.size])) != _CHECKSUM.unpack_from(head, _HEADER.size)[0]:
        raise LogDamaged(f"the chunk at {offset} fails its checksum")
    return Chunk(kind, writer, content)


def _read(descriptor: int, length: int, offset: int) -> bytes:
    """Read all of it: one `pread` returns at most 2 GiB."""
    parts: list[bytes] = []
    while length and (part := os.pread(descriptor, min(length, 1 << 30), offset)):
        parts.append(part)
        length -= len(part)
        offset += len(part)
    return b"".join(parts)
