"""Frames in a row that are alike: what is read in one of them and in columns is read in all of them."""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from functools import cached_property
from itertools import chain, pairwise
from typing import TYPE_CHECKING

import msgspec

from rollout_log.columns.layout import LIST, MAP, SCALAR
from rollout_log.columns.rendering import render

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rollout_log.columns.layout import Node
    from rollout_log.columns.values import Values

__all__ = ["Alike", "Stretches"]

_SELDOM = 8
"""Strings that differ more often than at one value in so many are given up on: they just differ."""
_decode_strings = msgspec.json.Decoder(list[str]).decode


class Alike:
    """Frames in a row that have the same forms and the same scalars, but for three things.

    Their numbers differ; their lists have different numbers of items, all of them some or all none; and
    the strings at the paths `strings` differ. Paths are those of `Columns`.
    """

    def __init__(self, stretches: Stretches, start: int, end: int) -> None:
        self.frames = end - start
        """How many they are."""
        self.strings = stretches.strings
        self._stretches = stretches
        self._start = start
        self._end = end

    @cached_property
    def first(self) -> bytes:
        """The first of them."""
        return render(self._stretches.root.window(self._start, self._start + 1))[0]

    def numbers(self, path: str) -> list[int] | list[float] | None:
        """Return the numbers at a path; None where there are none, or something else as well."""
        return self._stretches.numbers(path, self._start, self._end)

    def counts(self, path: str) -> Sequence[int] | None:
        """Return how many values at a path each frame has; None where it is one each."""
        counts = self._window.counts(path)
        return None if counts is None or counts.count(1) == len(counts) else counts

    @cached_property
    def _window(self) -> Values:
        return self._stretches.root.window(self._start, self._end)


class Stretches:
    """Finds which frames of a group are alike."""

    def __init__(self, root: Values) -> None:
        self.root = root
        self.strings: frozenset[str] = frozenset()
        self._numbers: dict[str, tuple[array[int] | array[float], dict[int, bytes]]] = {}

    def between(self, start: int, end: int) -> Iterator[Alike]:
        """Yield the frames `[start, end)`, cut where they are not alike."""
        breaks = self._breaks
        within = breaks[bisect_right(breaks, start) : bisect_left(breaks, end)]
        for first, last in pairwise((start, *within, end)):
            yield Alike(self, first, last)

    def numbers(self, path: str, start: int, end: int) -> list[int] | list[float] | None:
        """Return the numbers at a path in frames that are alike."""
        if path not in self._numbers:
            values = self.root.at(path)
            self._numbers[path] = (None if values is None else values.numbers()) or (array("B"), {})
        numbers, others = self._numbers[path]
        values = self.root
        for place in self.root.descend(path) or ():
            tally = values.tally(place)
            start, end = tally.below(start), tally.below(end)
            values = values.child(place)
        start, end = values.scalars_of(start, end)
        if not numbers or any(start <= place < end for place in others):
            return None
        return numbers[start:end].tolist()

    @cached_property
    def _breaks(self) -> Sequence[int]:
        if _has_escapes(self.root.node):  # two keys that look different may be the same one
            return range(1, self.root.n)
        return sorted(self._look(self.root, ""))

    def _look(self, values: Values, path: str) -> set[int]:
        """Return the values that are not like the one before."""
        found = set(self._changes(values, path))
        for place, step in enumerate(values.steps):
            below = self._look(values.child(place), path + step)
            tally = values.tally(place)
            for item in below:
                value, first = tally.above(item)
                found.add(value)
                if not first:  # it differs within a value, which is then like no other
                    found.add(value + 1)
        found.discard(0)
        found.discard(values.n)
        return found

    def _changes(self, values: Values, path: str) -> Iterator[int]:
        """Yield the values that are not like the one before, as far as their children are."""
        scalars = self._changed_scalars(values, path)
        at = done = 0
        for run in values.runs:
            yield at
            if run.form.kind == SCALAR:
                inside = scalars[bisect_right(scalars, done) : bisect_left(scalars, done + run.times)]
                yield from (at + place - done for place in inside)
                done += run.times
            elif run.form.kind == MAP:
                yield from range(at + 1, at + run.times)
            elif run.form.kind == LIST and run.same is None:
                empty = [count == 0 for count in run.counts]
                yield from (at + place for place, (a, b) in enumerate(pairwise(empty), 1) if a != b)
            at += run.times

    def _changed_scalars(self, values: Values, path: str) -> Sequence[int]:
        _, n = values.scalars_of(0, values.n)
        changes = values.columns.changes(values.node.scalars, n) if n else ()
        if len(changes) * _SELDOM > n and _are_strings(values.scalar_texts()[0]):
            self.strings |= {path.removeprefix(".")}
            return ()
        return changes


def _has_escapes(node: Node) -> bool:
    literals = chain.from_iterable(form.literals for form in node.forms)
    return any(b"\\" in literal for literal in literals) or any(map(_has_escapes, node.children))


def _are_strings(texts: Sequence[bytes] | bytes) -> bool:
    different = {texts} if isinstance(texts, bytes) else set(texts)
    try:
        return len(_decode_strings(b"[%b]" % b",".join(different))) == len(different)
    except msgspec.MsgspecError:
        return False
