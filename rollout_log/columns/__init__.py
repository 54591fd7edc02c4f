"""Streams of JSON texts as columns: small, byte-exact, and readable without rendering a text.

    data = pack(frames)                      # the data frames of one sample's stream
    assert unpack(data) == frames            # always, whatever the bytes are
    columns = read_columns(data)
    columns.numbers("choices[].token_ids[]").values    # an array of all ids
    columns.counts("choices[].token_ids[]")            # how many in each frame

Nothing here knows a field's name. What is alike in all frames is found in the frames and kept once;
what differs becomes one column per JSON path; equal columns are kept once. Numbers are kept as numbers
only where printing them gives the same bytes again; otherwise their text is kept. A frame that is not
JSON, or does not come apart exactly, is kept as it is.

Frames are packed in groups of bounded size, each with its own checksum, so that memory is bounded on
both sides. `docs/format-columns.md` has the bytes. Whatever is wrong with them is a `LogDamaged`.
"""

from __future__ import annotations

from contextlib import suppress
from itertools import chain
from typing import TYPE_CHECKING

import msgspec
import zstandard

from rollout_log.columns.alike import Alike
from rollout_log.columns.container import read_groups, write_group, write_groups
from rollout_log.columns.layout import Group, Ints
from rollout_log.columns.paths import Columns, Numbers
from rollout_log.columns.planes import LEVEL, decode_ints, encode_ints, inflate
from rollout_log.columns.reader import ColumnReader
from rollout_log.columns.rendering import render
from rollout_log.columns.tree import Tree, grow
from rollout_log.columns.values import Values
from rollout_log.columns.writer import ColumnWriter
from rollout_log.errors import LogDamaged

if TYPE_CHECKING:
    from array import array
    from collections.abc import Iterator, Sequence

__all__ = ["Alike", "Columns", "Numbers", "pack", "pack_ints", "read_columns", "unpack", "unpack_ints"]

GROUP = 1 << 24
"""Bytes of frames that are packed together; a longer frame is a group of its own."""
LIMIT = 1 << 30
"""Bytes of one group, or integers of one list, that reading agrees to unless told otherwise."""


def pack(frames: Sequence[bytes], *, level: int = LEVEL) -> bytes:
    """Pack byte strings, in order; `unpack` returns them exactly. `level` is zstd's, 1 to 22."""
    return write_groups([_pack_group(group, level) for group in _batches(frames)])


def unpack(data: bytes, *, limit: int = LIMIT) -> list[bytes]:
    """Return what `pack` was given. Raises `LogDamaged` on anything else, `LogTooNew` on later versions."""
    return list(chain.from_iterable(_render(*group) for group in read_groups(data, limit)))


def read_columns(data: bytes, *, limit: int = LIMIT) -> Columns:
    """Open packed frames by path. Raises as `unpack`."""
    return Columns(list(read_groups(data, limit)))


def pack_ints(values: Sequence[int], *, level: int = LEVEL) -> bytes:
    """Pack integers of 64 bits (times, sizes): differences where those are smaller, in planes, squeezed."""
    compress = zstandard.ZstdCompressor(level=level).compress

    def keep(plane: bytes) -> bytes:
        packed = compress(plane)
        return packed if len(packed) < len(plane) else plane

    return msgspec.msgpack.encode((len(values), encode_ints(values, keep)))


def unpack_ints(data: bytes, *, limit: int = LIMIT) -> array[int]:
    """Return the integers that `pack_ints` was given. Raises `LogDamaged` on anything else."""

    def find(plane: bytes | int, size: int) -> bytes:
        if isinstance(plane, int):
            raise LogDamaged("packed integers: a plane is missing")
        return plane if len(plane) == size else inflate(plane, size)

    try:
        n, column = _decode_ints(data)
    except msgspec.DecodeError as error:
        raise LogDamaged(f"packed integers cannot be read: {error}") from None
    if not 0 <= n <= limit:
        raise LogDamaged(f"packed integers: {n} of them; the limit is {limit}")
    return decode_ints(column, n, find)


_decode_ints = msgspec.msgpack.Decoder(tuple[int, Ints]).decode


def _batches(frames: Sequence[bytes]) -> Iterator[Sequence[bytes]]:
    start = size = 0
    for place, frame in enumerate(frames):
        if size + len(frame) > GROUP and place > start:
            yield frames[start:place]
            start, size = place, 0
        size += len(frame)
    if frames:
        yield frames[start:]


def _pack_group(frames: Sequence[bytes], level: int) -> bytes:
    """Take the frames apart; should they not come back exactly, keep each as one text."""
    for tree in (grow(frames), _whole(frames)):
        writer = ColumnWriter(level)
        for texts in sorted(tree.columns(), key=_is_string):  # strings often follow from numbers
            writer.add_texts(texts)
        root = tree.write(writer)
        size = sum(map(len, frames)) + len(frames)
        group = Group(len(frames), size, writer.columns, list(map(len, writer.streams)), root)
        packed = write_group(group, writer.streams)
        with suppress(LogDamaged):
            if packed is not None and _render(group, writer.streams) == list(frames):
                return packed
    raise AssertionError("frames kept whole did not come back")


def _is_string(texts: Sequence[bytes]) -> bool:
    return texts[0][:1] == b'"'


def _whole(frames: Sequence[bytes]) -> Tree:
    tree = Tree()
    tree.add_scalars(frames)
    return tree


def _render(group: Group, streams: Sequence[bytes]) -> list[bytes]:
    frames = render(Values(group.root, group.frames, ColumnReader(group.columns, streams, group.size)))
    if sum(map(len, frames)) + len(frames) != group.size:
        raise LogDamaged("packed columns: the frames of a group are not as long as its header says")
    return frames
