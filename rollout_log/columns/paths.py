"""Packed frames by path, without rendering them."""

from __future__ import annotations

from array import array
from functools import cached_property
from itertools import accumulate, chain
from math import nan
from typing import TYPE_CHECKING, NamedTuple

from rollout_log.columns.alike import Alike, Stretches
from rollout_log.columns.reader import ColumnReader
from rollout_log.columns.rendering import render
from rollout_log.columns.values import Values, steps

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rollout_log.columns.layout import Group, Node

__all__ = ["Columns", "Numbers"]


class Numbers(NamedTuple):
    """The scalars at one path, in order."""

    values: array[int] | array[float]
    """NaN, or 0 among integers, where the scalar is not a number of this column's kind."""
    others: dict[int, bytes]
    """JSON texts of those scalars, by position: `null`, `"Infinity"`, an integer beyond 64 bits."""


class Columns:
    """Packed frames by JSON path: `usage.total_tokens`, `choices[].token_ids[]`.

    `[]` are the items of a list, `[0]` one place of lists that are kept place by place, `{}` the values
    of an object whose keys vary. Keys that are not plain names are in quotes. Columns are decoded when
    they are asked for; damage found then is `LogDamaged`.
    """

    def __init__(self, groups: Sequence[tuple[Group, list[bytes]]]) -> None:
        self._roots = [
            Values(group.root, group.frames, ColumnReader(group.columns, streams, group.size))
            for group, streams in groups
        ]
        self._stretches = [Stretches(root) for root in self._roots]

    @property
    def frames(self) -> int:
        """How many frames there are."""
        return sum(root.n for root in self._roots)

    @cached_property
    def paths(self) -> list[str]:
        """Every path that some frame has."""
        found = chain.from_iterable(_paths(root.node, "") for root in self._roots)
        return [path.removeprefix(".") for path in dict.fromkeys(found)]

    def numbers(self, path: str) -> Numbers | None:
        """Return the numbers at a path; None when there are none, or most scalars there are not numbers."""
        found: list[Numbers] = []
        for root in self._roots:
            values = root.at(path)
            if values is None or not values.n:
                continue
            numbers = values.numbers()
            if numbers is None:
                return None
            found.append(_with_nan(*numbers))
        return _chain(found) if found else None

    def counts(self, path: str, within: str = "") -> list[int]:
        """Return how many values at `path` each frame has, or each value at the path `within` above it."""
        counts: list[int] = []
        for root in self._roots:
            top = root.at(within)
            if top is not None:
                found = top.counts(path.removeprefix(within))
                counts += [1] * top.n if found is None else found
        return counts

    def texts(self, path: str) -> list[bytes]:
        """Return the JSON text of each value at a path."""
        found = (root.at(path) for root in self._roots)
        return list(chain.from_iterable(render(values) for values in found if values is not None))

    def render(self, start: int, end: int) -> list[bytes]:
        """Return some frames in a row."""
        parts = (render(stretches.root.window(*cut)) for stretches, cut in self._cut(start, end))
        return list(chain.from_iterable(parts))

    def alike(self, start: int, end: int) -> Iterator[Alike]:
        """Yield some frames in a row, cut where they are not alike."""
        for stretches, cut in self._cut(start, end):
            yield from stretches.between(*cut)

    def _cut(self, start: int, end: int) -> Iterator[tuple[Stretches, tuple[int, int]]]:
        for stretches in self._stretches:
            n = stretches.root.n
            if start < n and end > 0:
                yield stretches, (max(start, 0), min(end, n))
            start -= n
            end -= n


def _paths(node: Node, above: str) -> Iterator[str]:
    for step, child in zip(steps(node), node.children, strict=True):
        yield above + step
        yield from _paths(child, above + step)


def _with_nan(values: array[int] | array[float], others: dict[int, bytes]) -> Numbers:
    if others and values.typecode in "fd":
        values = array(values.typecode, values)
        for place in others:
            values[place] = nan
    return Numbers(values, others)


def _chain(parts: Sequence[Numbers]) -> Numbers:
    if len(parts) == 1:
        return parts[0]
    codes = {part.values.typecode for part in parts}
    code = codes.pop() if len(codes) == 1 else "d" if codes & {"f", "d"} else "q"
    values: array[int] | array[float] = array(code)
    for part in parts:
        same = part.values.typecode == code
        values.extend(part.values if same else iter(part.values))  # type: ignore[arg-type]  # one code, one type
    starts = accumulate((len(part.values) for part in parts), initial=0)
    return Numbers(
        values,
        {
            start + place: text
            for start, part in zip(starts, parts, strict=False)
            for place, text in part.others.items()
        },
    )
