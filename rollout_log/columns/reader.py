"""Columns of values from bytes, nothing of which is believed."""

from __future__ import annotations

from array import array
from itertools import accumulate, chain, pairwise
from typing import TYPE_CHECKING

from rollout_log.columns.layout import Column, Constant, Floats, Ints, Mapped, Patched, Plane, Strings, Texts
from rollout_log.columns.planes import decode_ints, in_a_row, inflate, join
from rollout_log.columns.printing import STYLES, find_number, print_floats, print_ints
from rollout_log.errors import LogDamaged

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["ColumnReader"]

_TYPECODES = {4: "f", 8: "d"}


class ColumnReader:
    """Decodes columns on demand, for at most as many values and bytes as the group says it has."""

    def __init__(self, columns: Sequence[Column], streams: Sequence[bytes], size: int) -> None:
        self._columns = columns
        self._streams = streams
        self._limit = self._values = self._bytes = size
        self._texts: dict[tuple[int, int, int], list[bytes] | bytes] = {}
        self._meanings: dict[int, dict[object, bytes]] = {}
        self._numbers: dict[int, array[int] | array[float]] = {}
        self._lengths: dict[int, int] = {}

    def pay_values(self, values: int) -> None:
        """Account for values before they are made: every value takes at least a byte of a frame."""
        self._values -= values
        if self._values < 0:
            raise LogDamaged("packed columns: a group holds more than its header says")

    def pay_bytes(self, size: int) -> None:
        """Account for bytes of frames before they are made."""
        self._bytes -= size
        if self._bytes < 0:
            raise LogDamaged("packed columns: a group holds more than its header says")

    def begin_rendering(self) -> None:
        """Begin to make frames: all of them, or some once more."""
        self._bytes = self._limit
        self._texts.clear()

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
            value = find_number(column.text)
            if value is None:
                return None
            return (array("q", [value]) if isinstance(value, int) else array("d", [value])) * n, others
        if isinstance(column, (Ints, Floats)):
            return self._plain(number, column, n), others
        return None

    def texts(self, number: int, n: int, start: int, end: int) -> list[bytes] | bytes:
        """Return the texts `[start, end)` of a column, or the one text of a constant column."""
        column = self._column(number, n)
        key = number, start, end
        if key not in self._texts:
            self._texts[key] = self._decode(number, column, n, start, end)
        return self._texts[key]

    def changes(self, number: int, n: int) -> Sequence[int]:
        """Return where in a column something else begins: any two numbers are alike, two texts are not."""
        column = self._column(number, n)
        if isinstance(column, (Constant, Ints, Floats)):
            return ()
        if isinstance(column, Patched) and isinstance(column.column, (Ints, Floats)):
            return [at for place in self._patches(column, n) for at in (place, place + 1)]
        if isinstance(column, Texts):
            return list(accumulate(times for _, times in in_a_row(self._index(number, column, n))))[:-1]
        texts = self.texts(number, n, 0, n)
        return [at for at, (one, other) in enumerate(pairwise(texts), 1) if one != other]

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
                if size not in _TYPECODES or column.style not in STYLES:
                    raise LogDamaged(f"packed columns: column {number} is of an unknown kind of float")
                planes = [self._find(plane, n) for plane in column.planes]
                self._numbers[number] = join(planes, _TYPECODES[size], n)
        return self._numbers[number]

    def _decode(self, number: int, column: Column, n: int, start: int, end: int) -> list[bytes] | bytes:
        if isinstance(column, Constant):
            return column.text
        if isinstance(column, Ints):
            return print_ints(self._plain(number, column, n)[start:end])  # type: ignore[arg-type]
        if isinstance(column, Floats):
            return print_floats(self._plain(number, column, n)[start:end], column.style)
        try:
            if isinstance(column, Texts):
                strings = self._strings(column.texts, n)
                return list(map(strings.__getitem__, self._index(number, column, n)[start:end]))
            if isinstance(column, Mapped):
                return self._look_up(number, column, n, start, end)
        except (IndexError, KeyError):
            raise LogDamaged(f"packed columns: column {number} points to a text that is not there") from None
        if isinstance(column.column, Patched):
            raise LogDamaged(f"packed columns: column {number} is patched twice")
        texts = self._decode(number, column.column, n, start, end)
        texts = [texts] * (end - start) if isinstance(texts, bytes) else texts
        for place, text in self._patches(column, n).items():
            if start <= place < end:
                texts[place - start] = text
        return texts

    def _index(self, number: int, column: Texts, n: int) -> array[int]:
        if number not in self._numbers:
            index = self._numbers[number] = decode_ints(column.index, n, self._find)
            if n and min(index) < 0:
                raise LogDamaged(f"packed columns: column {number} points to a text before the first")
        return self._numbers[number]  # type: ignore[return-value]

    def _look_up(self, number: int, column: Mapped, n: int, start: int, end: int) -> list[bytes]:
        if not 0 <= column.column < number:
            raise LogDamaged(f"packed columns: column {number} follows from one that is not before it")
        basis = self._column(column.column, n)
        values: Sequence[object]
        if isinstance(basis, Ints):
            values = self._plain(column.column, basis, n)
        else:
            texts = self.texts(column.column, n, 0, n)
            values = [texts] * n if isinstance(texts, bytes) else texts
        meaning = self._meanings.get(number)
        if meaning is None:
            pairs = zip(dict.fromkeys(values), self._strings(column.texts, n), strict=False)
            meaning = self._meanings[number] = dict(pairs)
        return list(map(meaning.__getitem__, values[start:end]))

    def _strings(self, strings: Strings, n: int) -> list[bytes]:
        if not 0 <= strings.count <= n:
            raise LogDamaged(f"packed columns: {strings.count} texts for {n} values")
        lengths = decode_ints(strings.lengths, strings.count, self._find)
        if strings.count and min(lengths) < 0:
            raise LogDamaged("packed columns: a text has a negative length")
        ends = list(accumulate(lengths))
        blob = self._find(strings.blob, ends[-1] if ends else 0)
        return [blob[start:end] for start, end in zip(chain((0,), ends), ends, strict=False)]

    def _patches(self, column: Patched, n: int) -> dict[int, bytes]:
        texts = self._strings(column.texts, n)
        places = decode_ints(column.positions, len(texts), self._find)
        if texts and not (min(places) >= 0 and max(places) < n):
            raise LogDamaged(f"packed columns: a text is for a position outside of {n} values")
        return dict(zip(places, texts, strict=True))
