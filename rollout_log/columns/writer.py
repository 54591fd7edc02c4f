"""Columns of values to bytes.

A column of texts is stored as whatever still gives every text back: one constant, integers, floats, the
values of another column looked up in a list, or a list of distinct texts with an index.
"""

from __future__ import annotations

from array import array
from collections import Counter
from typing import TYPE_CHECKING

import zstandard

from rollout_log.columns.layout import Column, Constant, Floats, Mapped, Patched, Plane, Strings, Texts
from rollout_log.columns.planes import LEVEL, encode_ints, little, split
from rollout_log.columns.printing import STYLES, find_floats, find_ints

if TYPE_CHECKING:
    from collections.abc import Container, Mapping, Sequence

__all__ = ["ColumnWriter"]

_INLINE, _INLINE_RAW = 48, 1 << 16
"""A plane that takes no more bytes than this, packed and unpacked, lies in the header, itself packed."""
_PATCHES = 4
"""At most one value in this many may differ from what the rest of a column is."""
_BASES = 8
"""Columns of one length that others may follow from."""


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
        if len(bases) < _BASES:
            bases.append((number, values, len(set(values))))

    def _keep(self, plane: bytes) -> Plane:
        packed = self._compress(plane)
        if len(plane) <= _INLINE or (len(packed) <= _INLINE and len(plane) <= _INLINE_RAW):
            return plane
        self.streams.append(packed if len(packed) < len(plane) else plane)
        return len(self.streams) - 1

    def _encode(self, texts: Sequence[bytes]) -> Column | list[int]:
        times = Counter(texts)
        if len(times) == 1:
            return Constant(texts[0])
        ints = find_ints(times)
        if len(ints) == len(times):
            return list(map(ints.__getitem__, texts))
        if _mostly(ints, times):
            filled = [ints.get(text, 0) for text in texts]
            return self._patch(encode_ints(filled, self._keep), ints, texts)
        style, floats = max(
            ((style, find_floats(times, style)) for style in STYLES), key=lambda found: len(found[1])
        )
        if _mostly(floats, times):
            return self._patch(self._encode_floats(floats, texts, style), floats, texts)
        return self._encode_texts(texts)

    def _encode_floats(self, floats: dict[bytes, float], texts: Sequence[bytes], style: int) -> Column:
        values = array("d", [floats.get(text, 0.0) for text in texts])
        single = array("f", values)
        numbers = single if array("d", single) == values else values
        size = numbers.itemsize
        return Floats([self._keep(plane) for plane in split(little(numbers), size, size)], style)

    def _encode_texts(self, texts: Sequence[bytes]) -> Column:
        distinct = {text: place for place, text in enumerate(dict.fromkeys(texts))}
        n = len(texts)
        best = 3 * n + 5 * len(distinct)
        chosen: tuple[int, list[bytes], list[int]] | None = None
        for number, values, several in self._bases.get(n, ()):
            if 5 * several < best:
                pairs = list(zip(values, texts, strict=True))
                meaning: dict[object, bytes] = dict(reversed(pairs))
                others = [place for place, (value, text) in enumerate(pairs) if meaning[value] != text]
                cost = 5 * several + 8 * len(others)
                if cost < best:
                    chosen = number, [meaning[value] for value in dict.fromkeys(values)], others
                    best = cost
        if chosen is not None:
            number, ours, others = chosen
            return self._patch_at(others, Mapped(number, self._encode_strings(ours)), texts)
        index = encode_ints(list(map(distinct.__getitem__, texts)), self._keep)
        return Texts(self._encode_strings(list(distinct)), index)

    def _encode_strings(self, strings: Sequence[bytes]) -> Strings:
        lengths = encode_ints(list(map(len, strings)), self._keep)
        return Strings(len(strings), lengths, self._keep(b"".join(strings)))

    def _patch(self, column: Column, known: Container[bytes], texts: Sequence[bytes]) -> Column:
        return self._patch_at([place for place, text in enumerate(texts) if text not in known], column, texts)

    def _patch_at(self, places: Sequence[int], column: Column, texts: Sequence[bytes]) -> Column:
        if not places:
            return column
        patches = self._encode_strings([texts[place] for place in places])
        return Patched(column, encode_ints(places, self._keep), patches)


def _mostly(known: Container[bytes], times: Mapping[bytes, int]) -> bool:
    others = sum(several for text, several in times.items() if text not in known)
    return others * _PATCHES <= sum(times.values())
