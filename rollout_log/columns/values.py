"""The tree of columns as values: which forms those of a node take, and which of its children's are theirs."""

from __future__ import annotations

import re
from array import array
from bisect import bisect_right
from functools import cached_property
from itertools import accumulate, chain, islice, repeat
from operator import sub
from typing import TYPE_CHECKING

from rollout_log.columns.layout import LIST, MAP, RECORD, SCALAR, Form, Node
from rollout_log.columns.planes import in_a_row
from rollout_log.errors import LogDamaged

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rollout_log.columns.reader import ColumnReader

__all__ = ["Run", "Values", "steps"]

_LENGTHS = 32
"""Lists in a row whose lengths change more often than this stay together."""


class Run:
    """Values in a row that take one form."""

    def __init__(self, form: Form, times: int, counts: Sequence[int] = (), same: int | None = None) -> None:
        self.form = form
        self.times = times
        self.counts = counts
        """Of each list or map."""
        self.same = same
        """How many items every list or map has, where that is known to be one number."""

    @property
    def items(self) -> int:
        """Items of all lists or maps; where there are none, the number of values."""
        return self.below(self.times)

    @cached_property
    def _ends(self) -> Sequence[int]:
        return list(accumulate(self.counts, initial=0))

    def below(self, times: int) -> int:
        """How many values of each child belong to the first so many of these."""
        if not self.counts:
            return times
        return self._ends[times] if self.same is None else self.same * times

    def above(self, item: int) -> tuple[int, bool]:
        """Return to which of these a value of a child belongs, and whether it is its first."""
        if not self.counts:
            return item, True
        place = bisect_right(self._ends, item) - 1 if self.same is None else item // self.same
        return place, item == self.below(place)

    def cut(self, start: int, end: int) -> Run:
        """Return some of the values."""
        return Run(self.form, end - start, self.counts[start:end], self.same)


class _Tally:
    """How many of something belong to the first values of a node, where only some forms have it."""

    def __init__(self, runs: Sequence[Run], starts: Sequence[int], having: Sequence[bool]) -> None:
        self._runs = runs
        self._starts = starts
        self._having = having
        self._before = list(
            accumulate((run.items if has else 0 for run, has in zip(runs, having, strict=True)), initial=0)
        )

    @property
    def total(self) -> int:
        return self._before[-1]

    def below(self, value: int) -> int:
        """How many belong to the values before this one."""
        place = bisect_right(self._starts, value) - 1
        if place == len(self._runs) or not self._having[place]:
            return self._before[place]
        return self._before[place] + self._runs[place].below(value - self._starts[place])

    def above(self, item: int) -> tuple[int, bool]:
        """Return to which value one of them belongs, and whether it is its first."""
        place = bisect_right(self._before, item) - 1
        value, first = self._runs[place].above(item - self._before[place])
        return self._starts[place] + value, first


class Values:
    """The values of a node, all or some in a row. Children are looked at when they are asked for."""

    def __init__(self, node: Node, n: int, columns: ColumnReader) -> None:
        columns.pay_values(n)
        self.node = node
        self.n = n
        self.columns = columns
        self.runs = list(self._find_runs())
        self._all = self
        self._start = 0
        self._children: dict[int, Values] = {}

    def window(self, start: int, end: int) -> Values:
        """Return some of all values. They are paid for already."""
        some = object.__new__(Values)
        some.__dict__.update(self.__dict__)
        some.runs = list(self._cut(start, end))
        some.n = end - start
        some._start = start
        some._children = {}
        return some

    def child(self, place: int) -> Values:
        """Return the values of a child that belong to these."""
        found = self._children.get(place)
        if found is None:
            tally = self._all.tally(place)
            if self._all is self:
                found = Values(self.node.children[place], tally.total, self.columns)
            else:
                ours = tally.below(self._start), tally.below(self._start + self.n)
                found = self._all.child(place).window(*ours)
            self._children[place] = found
        return found

    def tally(self, child: int) -> _Tally:
        """Return which values of a child belong to which of all values."""
        found = self._tallies.get(child)
        if found is None:
            having = [child in run.form.children for run in self.runs]
            found = self._tallies[child] = _Tally(self.runs, self._starts, having)
        return found

    # -- what the columns hold

    def numbers(self) -> tuple[array[int] | array[float], dict[int, bytes]] | None:
        """Return the scalars of all values as numbers, with the texts of those that are none.

        None where most are none.
        """
        number, n = self.node.scalars, self._all._scalars.total
        return self.columns.numbers(number, n) if n else None

    def scalars_of(self, start: int, end: int) -> tuple[int, int]:
        """Return which scalars, from and to, some of all values are."""
        return self._all._scalars.below(start), self._all._scalars.below(end)

    def scalar_texts(self) -> tuple[list[bytes] | bytes, int]:
        """Return the texts of the scalars, or the one that all have; and how many they are."""
        return self._texts(self.node.scalars, self._all._scalars)

    def key_texts(self) -> tuple[list[bytes] | bytes, int]:
        """Return the keys of all maps, or the one that all are; and how many they are."""
        return self._texts(self.node.keys, self._all._keys)

    def _texts(self, number: int, tally: _Tally) -> tuple[list[bytes] | bytes, int]:
        if not tally.total:
            return [], 0
        start, end = tally.below(self._start), tally.below(self._start + self.n)
        return self.columns.texts(number, tally.total, start, end) if end > start else [], end - start

    # -- along a path

    def descend(self, path: str) -> list[int] | None:
        """Return the places among their siblings of the nodes on a path; None where it leads nowhere."""
        if not path:
            return []
        if path[0] not in ".[{":
            path = "." + path
        for place, name in enumerate(self.steps):
            if path.startswith(name):
                below = self.child(place).descend(path[len(name) :])
                if below is not None:
                    return [place, *below]
        return None

    @cached_property
    def steps(self) -> list[str]:
        """The step of a path that leads to each child."""
        return steps(self.node)

    def at(self, path: str) -> Values | None:
        """Return the values at a path; None where it leads nowhere."""
        places = self.descend(path)
        if places is None:
            return None
        found = self
        for place in places:
            found = found.child(place)
        return found

    def counts(self, path: str) -> Sequence[int] | None:
        """Return how many values at a path belong to each of these; None where it is one each."""
        places = self.descend(path)
        if places is None:
            return [0] * self.n
        counts, values = None, self
        for place in places:
            counts = _gather(counts, values._counts(place))
            values = values.child(place)
        return counts

    def _counts(self, child: int) -> Sequence[int] | None:
        if all(child in run.form.children and (not run.counts or run.same == 1) for run in self.runs):
            return None
        counts: list[int] = []
        for run in self.runs:
            if child not in run.form.children:
                counts.extend(repeat(0, run.times))
            else:
                counts.extend(run.counts or repeat(1, run.times))
        return counts

    # -- parts

    @cached_property
    def _starts(self) -> list[int]:
        return list(accumulate((run.times for run in self.runs), initial=0))

    @cached_property
    def _tallies(self) -> dict[int, _Tally]:
        return {}

    @cached_property
    def _scalars(self) -> _Tally:
        return _Tally(self.runs, self._starts, [run.form.kind == SCALAR for run in self.runs])

    @cached_property
    def _keys(self) -> _Tally:
        return _Tally(self.runs, self._starts, [run.form.kind == MAP for run in self.runs])

    def _find_runs(self) -> Iterator[Run]:
        chosen: list[tuple[int, int]] = [(0, self.n)] if self.n else []
        if self.n and len(self.node.forms) != 1:
            chosen = list(in_a_row(self.columns.ints(self.node.choice, self.n)))
        if not all(0 <= choice < len(self.node.forms) for choice, _ in chosen):
            raise LogDamaged("packed columns: a value takes a form that is not there")
        forms = [(self.node.forms[choice], times) for choice, times in chosen]
        lists = sum(times for form, times in forms if form.kind in {LIST, MAP})
        counts = self.columns.ints(self.node.counts, lists) if lists else array("B")
        if counts.typecode == "q" and lists and min(counts) < 0:
            raise LogDamaged("packed columns: a list of negative length")
        at = 0
        for form, times in forms:
            if form.kind in {LIST, MAP}:
                yield from _runs_of_lists(form, times, counts[at : at + times])
                at += times
            else:
                yield Run(form, times)

    def _cut(self, start: int, end: int) -> Iterator[Run]:
        place = bisect_right(self._starts, start) - 1
        for run, at in zip(self.runs[place:], self._starts[place:], strict=False):
            if at >= end:
                return
            yield run.cut(max(start - at, 0), min(end - at, run.times))


def _runs_of_lists(form: Form, times: int, counts: array[int]) -> Iterator[Run]:
    """Yield lists or maps that have equally many items together, if most have as many as the one before."""
    lengths = list(islice(in_a_row(counts), _LENGTHS + 1))
    if len(lengths) > _LENGTHS:
        yield Run(form, times, counts)
        return
    at = 0
    for length, several in lengths:
        yield Run(form, several, counts[at : at + several], length)
        at += several


def _gather(upper: Sequence[int] | None, lower: Sequence[int] | None) -> Sequence[int] | None:
    """Compose two levels of counts: of the lower one's values, how many belong to each upper one."""
    if upper is None or lower is None:
        return lower if upper is None else upper
    ends = list(accumulate(lower, initial=0))
    reached = [ends[end] for end in accumulate(upper)]
    return list(map(sub, reached, chain((0,), reached)))


_KEY = re.compile(rb'"((?:[^"\\]|\\.)*)"\s*:\s*\Z', re.DOTALL).search
_PLAIN = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*\Z").match


def steps(node: Node) -> list[str]:
    """Return the step of a path that leads to each child: `.key`, `[]`, `[0]` or `{}`."""
    names = [""] * len(node.children)
    for form in node.forms:
        if form.kind in {LIST, MAP}:
            names[form.children[0]] = "[]" if form.kind == LIST else "{}"
        elif form.kind == RECORD:
            for place, child in enumerate(form.children):
                key = _KEY(form.literals[place])
                names[child] = (
                    f"[{place}]" if key is None else _step(key[1].decode(errors="backslashreplace"))
                )
    return names


def _step(key: str) -> str:
    return f".{key}" if _PLAIN(key) else f'."{key}"'
