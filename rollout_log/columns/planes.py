"""Numbers as planes of bytes: all lowest bytes, all next bytes, …, which zstd squeezes best."""

from __future__ import annotations

import re
import sys
from array import array
from itertools import accumulate, groupby, repeat
from operator import sub
from typing import TYPE_CHECKING

import zstandard

from rollout_log.columns.layout import Ints, Plane
from rollout_log.errors import LogDamaged

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

__all__ = ["LEVEL", "decode_ints", "encode_ints", "in_a_row", "inflate", "join", "little", "split"]

LEVEL = 19
"""Of zstd: packing is done once, in the background."""
_LEAST, _MOST = -(1 << 63), (1 << 63) - 1
_UNSIGNED = {1: "B", 2: "H", 4: "I", 8: "Q"}


def inflate(packed: bytes, size: int) -> bytes:
    """Decompress one zstd frame of exactly `size` bytes; nothing is allocated before that is known."""
    try:
        if zstandard.frame_content_size(packed) != size:
            raise LogDamaged(f"packed columns: a stream does not have the {size} bytes it should have")
        return zstandard.ZstdDecompressor().decompress(packed)
    except zstandard.ZstdError as error:
        raise LogDamaged(f"packed columns: a stream does not decompress: {error}") from None


def little(numbers: array[int] | array[float]) -> bytes:
    if sys.byteorder == "big":
        numbers = numbers[:]
        numbers.byteswap()
    return numbers.tobytes()


def split(data: bytes, width: int, size: int) -> list[bytes]:
    return [data[place::size] for place in range(width)]


def join(planes: Sequence[bytes], typecode: str, n: int) -> array[int] | array[float]:
    numbers: array[int] | array[float] = array(typecode)
    size = numbers.itemsize
    data = bytearray(n * size)
    for place, plane in enumerate(planes):
        data[place::size] = plane
    numbers.frombytes(bytes(data))
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers


def _width(number: int) -> int:
    return (number.bit_length() + 7) // 8


def _size(width: int) -> int:
    return next(size for size in _UNSIGNED if size >= width)


def _range(values: Sequence[int]) -> tuple[int, int]:
    """Return a base, 0 where that costs nothing, and the bytes that each value takes above it."""
    low, high = min(values), max(values)
    width = _width(high - low)
    return (0 if low >= 0 and 0 < _width(high) == width else low), width


def encode_ints(values: Sequence[int], keep: Callable[[bytes], Plane]) -> Ints:
    """Describe integers of 64 bits, handing each plane to `keep`."""
    if not values:
        return Ints(0, [])
    base, width = _range(values)
    start, deltas, numbers = 0, False, values
    if width:
        steps = list(map(sub, values[1:], values))
        least, narrower = _range(steps)
        if narrower < width and _LEAST <= least <= _MOST:
            base, width, start, deltas, numbers = least, narrower, values[0], True, steps
    if width == 0:
        return Ints(base, [], deltas, start)
    size = _size(width)
    unsigned = array(_UNSIGNED[size], [number - base for number in numbers] if base else numbers)
    return Ints(base, [keep(plane) for plane in split(little(unsigned), width, size)], deltas, start)


def decode_ints(column: Ints, n: int, find: Callable[[Plane, int], bytes]) -> array[int]:
    """Return the `n` integers of a column; `find` gives a plane of a stated length."""
    if n == 0:
        return array("q")
    width = len(column.planes)
    if width > 8 or not (_LEAST <= column.base <= _MOST and _LEAST <= column.start <= _MOST):
        raise LogDamaged("packed columns: an integer column is wider than 64 bits")
    m = n - 1 if column.deltas else n
    if width == 0:
        if not column.deltas:
            return array("B" if 0 <= column.base < 256 else "q", [column.base]) * n
        numbers: Iterable[int] = repeat(column.base, m)
    else:
        unsigned = join([find(plane, m) for plane in column.planes], _UNSIGNED[_size(width)], m)
        base = column.base
        if not column.deltas and base == 0:
            return unsigned  # type: ignore[return-value]  # a typecode of _UNSIGNED holds integers
        numbers = [base + int(number) for number in unsigned] if base else unsigned  # type: ignore[assignment]
    try:
        return array("q", accumulate(numbers, initial=column.start) if column.deltas else numbers)
    except OverflowError:
        raise LogDamaged("packed columns: an integer does not fit into 64 bits") from None


_SAME = re.compile(rb"(.)\1*", re.DOTALL).finditer


def in_a_row(numbers: array[int]) -> Iterator[tuple[int, int]]:
    """Yield equal numbers in a row, with how many they are."""
    if numbers.typecode == "B":
        return ((found[1][0], found.end() - found.start()) for found in _SAME(numbers.tobytes()))
    return ((number, len(list(same))) for number, same in groupby(numbers))
