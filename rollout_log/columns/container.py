"""Packed groups as bytes: magic, checksums, and lengths that are checked before anything is allocated."""

from __future__ import annotations

import struct
import zlib
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

import msgspec
import zstandard

from rollout_log.columns.layout import Group, fits_together
from rollout_log.columns.planes import LEVEL, inflate
from rollout_log.errors import LogDamaged, LogTooNew

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = ["HEADER_LIMIT", "read_groups", "write_group", "write_groups"]

MAGIC = b"RLCF"
VERSION = 1
HEADER_LIMIT = 1 << 24
"""Bytes of one group's header, unpacked."""
_FILE = struct.Struct("<4sBI")  # magic, version, number of groups
_GROUP = struct.Struct("<IQ")  # packed header, everything after the checksum
_CHECKSUM = struct.Struct("<I")

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Group).decode


def write_groups(groups: Sequence[bytes]) -> bytes:
    """Join what `write_group` made."""
    return b"".join([_FILE.pack(MAGIC, VERSION, len(groups)), *groups])


def write_group(group: Group, streams: Sequence[bytes]) -> bytes | None:
    """Return a group as bytes; None when its header is larger than a reader accepts."""
    header = _encode(group)
    if len(header) > HEADER_LIMIT:
        return None
    packed = zstandard.ZstdCompressor(level=LEVEL).compress(header)
    body = b"".join([packed, *streams])
    lengths = _GROUP.pack(len(packed), len(body))
    return b"".join([lengths, _CHECKSUM.pack(zlib.crc32(body, zlib.crc32(lengths))), body])


def read_groups(data: bytes, limit: int) -> Iterator[tuple[Group, list[bytes]]]:
    """Yield header and streams of each group. Raises `LogDamaged`, and `LogTooNew` on later versions."""
    if len(data) < _FILE.size:
        raise LogDamaged(f"packed columns: {len(data)} bytes are too few")
    magic, version, several = _FILE.unpack_from(data)
    if magic != MAGIC or version == 0:
        raise LogDamaged("packed columns: the bytes do not begin like packed columns")
    if version > VERSION:
        raise LogTooNew(f"packed columns of version {version}; this release reads up to {VERSION}: upgrade")
    at = _FILE.size
    for number in range(several):
        group, streams, at = _read_group(data, at, limit, f"packed columns, group {number}")
        yield group, streams
    if at != len(data):
        raise LogDamaged(f"packed columns: {len(data) - at} bytes too many")


def _read_group(data: bytes, at: int, limit: int, where: str) -> tuple[Group, list[bytes], int]:
    start = at + _GROUP.size + _CHECKSUM.size
    if start > len(data):
        raise LogDamaged(f"{where}: cut off")
    header_length, body_length = _GROUP.unpack_from(data, at)
    (checksum,) = _CHECKSUM.unpack_from(data, at + _GROUP.size)
    if not header_length <= body_length <= len(data) - start:
        raise LogDamaged(f"{where}: cut off")
    body = memoryview(data)[start : start + body_length]
    if zlib.crc32(body, zlib.crc32(data[at : at + _GROUP.size])) != checksum:
        raise LogDamaged(f"{where}: the checksum does not match")
    group = _read_header(bytes(body[:header_length]), where)
    if not 0 <= group.frames <= group.size <= limit:
        raise LogDamaged(f"{where}: {group.frames} frames of {group.size} bytes; the limit is {limit}")
    if not fits_together(group.root):
        raise LogDamaged(f"{where}: its tree of forms does not fit together")
    if any(length < 0 for length in group.streams) or header_length + sum(group.streams) != body_length:
        raise LogDamaged(f"{where}: its streams are not as long as its header says")
    ends = list(accumulate(group.streams, initial=header_length))
    streams = [bytes(body[begin:end]) for begin, end in pairwise(ends)]
    return group, streams, start + body_length


def _read_header(packed: bytes, where: str) -> Group:
    try:
        size = zstandard.frame_content_size(packed)
        if not 0 <= size <= HEADER_LIMIT:
            raise LogDamaged(f"{where}: a header of {size} bytes; the limit is {HEADER_LIMIT}")
        return _decode(inflate(packed, size))
    except (zstandard.ZstdError, msgspec.DecodeError, RecursionError) as error:
        raise LogDamaged(f"{where}: the header cannot be read: {error}") from None
