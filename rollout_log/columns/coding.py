"""Columns of values to and from bytes.

A column of texts is stored as whatever is smallest and still gives every text back: one constant,
integers, floats, the values of another column looked up in a list, or a list of distinct texts with an
index. Numbers are split into planes (all lowest bytes, all next bytes, …), which zstd squeezes best.
"""

from __future__ import annotations

import re
import sys
from array import array
from itertools import accumulate, chain
from operator import ne, sub
from typing import TYPE_CHECKING

import zstandard

from rollout_log.columns.layout import Column, Constant, Floats, Ints, Mapped, Patched, Plane, Strings, Texts
from rollout_log.errors import LogDamaged

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

__all__ = ["ColumnReader", "ColumnWriter", "Numbers", "decode_ints", "encode_ints", "inflate"]

LEVEL = 19
INLINE = 48
"""A plane that takes no more bytes than this, packed, lies in the header, which is packed as a whole."""
INLINE_RAW = 1 << 16

Numbers = array  # of int or float

_INT = re.compile(rb"(?:0|-?[1-9][0-9]{0,17})\Z").match
_UNSIGNED = {1: "B", 2: "H", 4: "I", 8: "Q"}
_FLOAT = {4: "f", 8: "d"}
_PATCHES = 4
"""At most one value in this many may differ from what the rest of a column is."""


# ---- planes -----------------------------------------------------------------------------------------


def _little(numbers: array[int] | array[float]) -> bytes:
    if sys.byteorder == "big":
        numbers = numbers[:]
        numbers.byteswap()
    return numbers.tobytes()


def _split(data: bytes, width: int, size: int) -> list[bytes]:
    return [data[place::size] for place in range(width)]


def _join(planes: Sequence[bytes], typecode: str, n: int) -> array[int] | array[float]:
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


def encode_ints(values: Sequence[int], keep: Callable[[bytes], Plane]) -> Ints:
    """Describe integers of 64 bits, handing each plane to `keep`."""
    if not values:
        return Ints(0, [])
    low, high = min(values), max(values)
    base = 0 if low >= 0 and _width(high) == _width(high - low) and low != high else low
    start, deltas, numbers = 0, False, values
    if high - low > 0:
        steps = list(map(sub, values[1:], values))
        least, most = min(steps), max(steps)
        if _width(most - least) < _width(high - base):
            start, deltas, numbers, low, high = values[0], True, steps, least, most
            base = 0 if least >= 0 and _width(most) == _width(most - least) and least != most else least
    width = _width(high - base)
    if width == 0:
        return Ints(base, [], deltas, start)
    size = _size(width)
    unsigned = array(_UNSIGNED[size], [number - base for number in numbers] if base else numbers)
    return Ints(base, [keep(plane) for plane in _split(_little(unsigned), width, size)], deltas, start)


def decode_ints(column: Ints, n: int, find: Callable[[Plane, int], bytes]) -> array[int]:
    """Return the `n` integers of a column; `find` gives a plane of a stated length."""
    if n == 0:
        return array("q")
    width = len(column.planes)
    if width > 8 or not -(1 << 63) <= column.base < 1 << 63 or not -(1 << 63) <= column.start < 1 << 63:
        raise LogDamaged("packed columns: an integer column is wider than 64 bits")
    m = n - 1 if column.deltas else n
    if width == 0:
        if not column.deltas:
            return array("q", [column.base]) * n
        numbers: Iterable[int] = (column.base,) * m
    else:
        unsigned = _join([find(plane, m) for plane in column.planes], _UNSIGNED[_size(width)], m)
        base = column.base
        if not column.deltas and base == 0:
            return unsigned  # type: ignore[return-value]  # a typecode of _UNSIGNED holds integers
        numbers = [base + int(number) for number in unsigned] if base else unsigned  # type: ignore[assignment]
    try:
        return array("q", accumulate(numbers, initial=column.start) if column.deltas else numbers)
    except OverflowError:
        raise LogDamaged("packed columns: an integer does not fit into 64 bits") from None


# ---- texts of numbers -------------------------------------------------------------------------------


def _short(text: str) -> str:
    """Turn Python's `1.5e-05` into `0.000015` and `1e-07` into `1e-7`, as Rust's and C++'s printers write."""
    digits, _, exponent = text.partition("e-")
    if not exponent:
        return text
    if exponent != "05":
        return f"{digits}e-{int(exponent)}"
    sign, digits = ("-", digits[1:]) if digits[0] == "-" else ("", digits)
    return f"{sign}0.0000{digits.replace('.', '')}"


def _print_floats(values: Iterable[float], style: int) -> list[bytes]:
    texts = list(map(repr, values))
    if style == 1:
        texts = [_short(text) if "e" in text else text for text in texts]
    return "\n".join(texts).encode().split(b"\n") if texts else []


def _print_ints(values: Iterable[int]) -> list[bytes]:
    text = ",".join(map(str, values))
    return text.encode().split(b",") if text else []


def _parse_float(text: bytes) -> float:
    try:
        return float(text) if len(text) < 40 else 0.0
    except ValueError:
        return 0.0


def _differences(ours: Sequence[bytes], texts: Sequence[bytes]) -> list[int]:
    if ours == texts:
        return []
    return [place for place, differs in enumerate(map(ne, ours, texts)) if differs]


# ---- writing ----------------------------------------------------------------------------------------


class ColumnWriter:
    """Encodes columns into a table and a list of streams, each distinct column once."""

    def __init__(self, level: int = LEVEL) -> None:
        self.columns: list[Column] = []
        self.streams: list[bytes] = []
        self._places: dict[tuple[object, ...], int] = {}
        self._bases: dict[int, list[tuple[int, Sequence[bytes] | Sequence[int], int]]] = {}
        self._compress = zstandard.ZstdCompressor(level=level).compress

    def add_ints(self, values: Sequence[int]) -> int:
        """Return the number of a column of integers."""
        key = (int, tuple(values))
        if key not in self._places:
            self._add(key, encode_ints(values, self._keep))
        return self._places[key]

    def add_texts(self, texts: Sequence[bytes]) -> int:
        """Return the number of a column of texts."""
        key = (bytes, tuple(texts))
        if key not in self._places:
            column = self._encode(texts)
            if isinstance(column, list):
                self._places[key] = self.add_ints(column)
                self._offer(self._places[key], column)
            else:
                self._add(key, column)
                if not isinstance(column, Constant):
                    self._offer(self._places[key], texts)
        return self._places[key]

    def _add(self, key: tuple[object, ...], column: Column) -> None:
        self._places[key] = len(self.columns)
        self.columns.append(column)

    def _offer(self, number: int, values: Sequence[bytes] | Sequence[int]) -> None:
        """Remember a column as one that others may follow from."""
        bases = self._bases.setdefault(len(values), [])
        if len(bases) < 8:
            bases.append((number, values, len(set(values))))

    def _keep(self, plane: bytes) -> Plane:
        packed = self._compress(plane)
        if len(plane) <= INLINE or (len(packed) <= INLINE and len(plane) <= INLINE_RAW):
            return plane
        self.streams.append(packed if len(packed) < len(plane) else plane)
        return len(self.streams) - 1

    def _encode(self, texts: Sequence[bytes]) -> Column | list[int]:
        if texts.count(texts[0]) == len(texts):
            return Constant(texts[0])
        if sum(text[:1] == b'"' for text in texts) * _PATCHES <= len(texts):
            return self._encode_ints(texts) or self._encode_floats(texts) or self._encode_texts(texts)
        return self._encode_texts(texts)

    def _encode_ints(self, texts: Sequence[bytes]) -> Column | list[int] | None:
        values = [int(text) if _INT(text) else None for text in texts]
        others = [place for place, value in enumerate(values) if value is None]
        if not others:
            return values  # type: ignore[return-value]  # none is None
        if len(others) * _PATCHES > len(texts):
            return None
        filled = [value or 0 for value in values]
        return self._patch(encode_ints(filled, self._keep), others, texts)

    def _encode_floats(self, texts: Sequence[bytes]) -> Column | None:
        try:
            values = array("d", map(float, texts))
        except ValueError:
            values = array("d", map(_parse_float, texts))
        style, others = 0, _differences(_print_floats(values, 0), texts)
        if others:
            short = _differences(_print_floats(values, 1), texts)
            if len(short) < len(others):
                style, others = 1, short
        if len(others) * _PATCHES > len(texts):
            return None
        for place in others:
            values[place] = 0.0
        single = array("f", values)
        numbers = single if array("d", single) == values else values
        size = numbers.itemsize
        planes = [self._keep(plane) for plane in _split(_little(numbers), size, size)]
        return self._patch(Floats(planes, style), others, texts)

    def _encode_texts(self, texts: Sequence[bytes]) -> Column:
        distinct = {text: place for place, text in enumerate(dict.fromkeys(texts))}
        n = len(texts)
        best = 3 * n + 5 * len(distinct)
        chosen: tuple[int, dict[object, bytes], list[int]] | None = None
        for number, values, several in self._bases.get(n, ()):
            if 5 * several < best:
                pairs = list(zip(values, texts))
                meaning: dict[object, bytes] = dict(reversed(pairs))
                others = _differences(list(map(meaning.__getitem__, values)), texts)
                cost = 5 * several + 8 * len(others)
                if cost < best:
                    chosen = number, {value: meaning[value] for value in dict.fromkeys(values)}, others
                    best = cost
        if chosen is not None:
            number, meaning, others = chosen
            return self._patch(Mapped(number, self._encode_strings(list(meaning.values()))), others, texts)
        index = encode_ints(list(map(distinct.__getitem__, texts)), self._keep)
        return Texts(self._encode_strings(list(distinct)), index)

    def _encode_strings(self, strings: Sequence[bytes]) -> Strings:
        lengths = encode_ints(list(map(len, strings)), self._keep)
        return Strings(len(strings), lengths, self._keep(b"".join(strings)))

    def _patch(self, column: Column, places: Sequence[int], texts: Sequence[bytes]) -> Column:
        if not places:
            return column
        patches = self._encode_strings([texts[place] for place in places])
        return Patched(column, encode_ints(places, self._keep), patches)


# ---- reading ----------------------------------------------------------------------------------------


def inflate(packed: bytes, size: int) -> bytes:
    """Decompress one zstd frame of exactly `size` bytes; nothing is allocated before that is known."""
    try:
        if zstandard.frame_content_size(packed) != size:
            raise LogDamaged(f"packed columns: a stream does not have the {size} bytes it should have")
        return zstandard.ZstdDecompressor().decompress(packed)
    except zstandard.ZstdError as error:
        raise LogDamaged(f"packed columns: a stream does not decompress: {error}") from None


class ColumnReader:
    """Decodes columns on demand, for at most as many values and bytes as the group says it has."""

    def __init__(self, columns: Sequence[Column], streams: Sequence[bytes], size: int) -> None:
        self._columns = columns
        self._streams = streams
        self._limit = self._values = self._bytes = size
        self._texts: dict[int, list[bytes] | bytes] = {}
        self._numbers: dict[int, array[int] | array[float]] = {}
        self._lengths: dict[int, int] = {}

    def pay(self, values: int, size: int) -> None:
        """Account for values and bytes before they are made: every value takes at least a byte of a frame."""
        self._values -= values
        self._bytes -= size
        if self._values < 0 or self._bytes < 0:
            raise LogDamaged("packed columns: a group holds more than its header says")

    def ints(self, number: int, n: int) -> array[int]:
        """Return an integer column."""
        column = self._column(number, n)
        if not isinstance(column, Ints):
            raise LogDamaged(f"packed columns: column {number} should hold integers")
        return self._plain(number, column, n)  # type: ignore[return-value]

    def numbers(self, number: int, n: int) -> tuple[array[int] | array[float], dict[int, bytes]] | None:
        """Return a number column and the texts at its other positions; None when it is no number column."""
        column = self._column(number, n)
        others: dict[int, bytes] = {}
        if isinstance(column, Patched):
            others = self._patches(column, n)
            column = column.column
        if isinstance(column, Constant):
            column = _number(column.text)
            if column is None:
                return None
            return array("q" if isinstance(column, int) else "d", [column]) * n, others
        if isinstance(column, (Ints, Floats)):
            return self._plain(number, column, n), others
        return None

    def texts(self, number: int, n: int) -> list[bytes] | bytes:
        """Return a column's texts, or the one text of a constant column."""
        column = self._column(number, n)
        if number not in self._texts:
            self._texts[number] = self._decode(number, column, n)
        return self._texts[number]

    def _column(self, number: int, n: int) -> Column:
        if not 0 <= number < len(self._columns):
            raise LogDamaged(f"packed columns: there is no column {number}")
        if n > self._limit or self._lengths.setdefault(number, n) != n:
            raise LogDamaged(f"packed columns: column {number} cannot have {n} values")
        return self._columns[number]

    def _find(self, plane: Plane, size: int) -> bytes:
        if size > self._limit:
            raise LogDamaged(f"packed columns: a stream of {size} bytes is above the limit of {self._limit}")
        if isinstance(plane, int):
            if not 0 <= plane < len(self._streams):
                raise LogDamaged(f"packed columns: there is no stream {plane}")
            stored = self._streams[plane]
            return stored if len(stored) == size else inflate(stored, size)
        if len(plane) != size:
            raise LogDamaged(f"packed columns: {len(plane)} bytes where {size} should be")
        return plane

    def _plain(self, number: int, column: Ints | Floats, n: int) -> array[int] | array[float]:
        if number not in self._numbers:
            if isinstance(column, Ints):
                self._numbers[number] = decode_ints(column, n, self._find)
            else:
                size = len(column.planes)
                if size not in _FLOAT or column.style not in {0, 1}:
                    raise LogDamaged(f"packed columns: column {number} is of an unknown kind of float")
                planes = [self._find(plane, n) for plane in column.planes]
                self._numbers[number] = _join(planes, _FLOAT[size], n)
        return self._numbers[number]

    def _decode(self, number: int, column: Column, n: int) -> list[bytes] | bytes:
        if isinstance(column, Constant):
            return column.text
        if isinstance(column, Ints):
            return _print_ints(self._plain(number, column, n))  # type: ignore[arg-type]
        if isinstance(column, Floats):
            return _print_floats(self._plain(number, column, n), column.style)
        try:
            if isinstance(column, Texts):
                strings = self._strings(column.texts, n)
                return list(map(strings.__getitem__, decode_ints(column.index, n, self._find)))
            if isinstance(column, Mapped):
                return self._look_up(number, column, n)
        except (IndexError, KeyError):
            raise LogDamaged(f"packed columns: column {number} points to a text that is not there") from None
        if isinstance(column.column, Patched):
            raise LogDamaged(f"packed columns: column {number} is patched twice")
        texts = self._decode(number, column.column, n)
        texts = [texts] * n if isinstance(texts, bytes) else texts
        for place, text in self._patches(column, n).items():
            texts[place] = text
        return texts

    def _look_up(self, number: int, column: Mapped, n: int) -> list[bytes]:
        if not 0 <= column.column < number:
            raise LogDamaged(f"packed columns: column {number} follows from one that is not before it")
        basis = self._column(column.column, n)
        values: Sequence[object]
        if isinstance(basis, Ints):
            values = self._plain(column.column, basis, n)
        else:
            texts = self.texts(column.column, n)
            values = [texts] * n if isinstance(texts, bytes) else texts
        meaning = dict(zip(dict.fromkeys(values), self._strings(column.texts, n)))
        return list(map(meaning.__getitem__, values))

    def _strings(self, strings: Strings, n: int) -> list[bytes]:
        if not 0 <= strings.count <= n:
            raise LogDamaged(f"packed columns: {strings.count} texts for {n} values")
        lengths = decode_ints(strings.lengths, strings.count, self._find)
        if strings.count and min(lengths) < 0:
            raise LogDamaged("packed columns: a text has a negative length")
        ends = list(accumulate(lengths))
        blob = self._find(strings.blob, ends[-1] if ends else 0)
        return [blob[start:end] for start, end in zip(chain((0,), ends), ends)]

    def _patches(self, column: Patched, n: int) -> dict[int, bytes]:
        texts = self._strings(column.texts, n)
        places = decode_ints(column.positions, len(texts), self._find)
        if texts and not (0 <= min(places) and max(places) < n):
            raise LogDamaged(f"packed columns: a text is for a position outside of {n} values")
        return dict(zip(places, texts))


def _number(text: bytes) -> int | float | None:
    try:
        return int(text) if _INT(text) else float(text) if len(text) < 40 else None
    except ValueError:
        return None
