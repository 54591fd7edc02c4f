"""The tree of columns back to JSON texts, or to the numbers at one path."""

from __future__ import annotations

import re
from functools import cached_property
from itertools import accumulate, chain, groupby, islice, repeat
from operator import sub
from typing import TYPE_CHECKING, NamedTuple

from rollout_log.columns.layout import LIST, MAP, RECORD, SCALAR, Form, Node
from rollout_log.errors import LogDamaged

if TYPE_CHECKING:
    from array import array
    from collections.abc import Iterator, Sequence

    from rollout_log.columns.reader import ColumnReader

__all__ = ["Branch", "gather", "steps"]

_DEPTH = 64
_UNROLLED = 16
"""Lists that all have one length up to this are rendered by a single format."""


class _Part(NamedTuple):
    """Texts not joined yet: a `%` format and the columns that fill it; without columns all are alike."""

    form: bytes
    columns: tuple[Sequence[bytes], ...]

    def texts(self, n: int) -> list[bytes]:
        if not self.columns:
            return [self.form % ()] * n
        if self.form == b"%b":
            return list(self.columns[0])
        return list(map(self.form.__mod__, zip(*self.columns, strict=True)))

    def cut(self, start: int, end: int) -> _Part:
        return _Part(self.form, tuple(column[start:end] for column in self.columns))


class _Run(NamedTuple):
    """Values in a row that take one form."""

    form: Form
    times: int
    counts: Sequence[int]
    """Of each list or map."""
    items: int
    """The sum of `counts`."""


class _Source:
    """A part that is used up from its beginning."""

    def __init__(self, part: _Part) -> None:
        self._part = part
        self._at = 0

    def take(self, n: int) -> _Part:
        self._at += n
        return self._part.cut(self._at - n, self._at)


class Branch:
    """A node with the columns that hold its `n` values. Children are looked at when they are asked for."""

    def __init__(self, node: Node, n: int, columns: ColumnReader, depth: int = 0) -> None:
        if depth > _DEPTH:
            raise LogDamaged("packed columns: nested too deeply")
        columns.pay(n, 0)
        _check(node)
        self.node = node
        self.n = n
        self._columns = columns
        self._depth = depth
        self._runs = list(self._find_runs())

    def _find_runs(self) -> Iterator[_Run]:
        chosen: list[tuple[Form, int]] = []
        if len(self.node.forms) == 1:
            chosen = [(self.node.forms[0], self.n)]
        elif self.n:
            choices = self._columns.ints(self.node.choice, self.n)
            if min(choices) < 0 or max(choices) >= len(self.node.forms):
                raise LogDamaged("packed columns: a value takes a form that is not there")
            chosen = [(self.node.forms[choice], times) for choice, times in _runs(choices)]
        lists = sum(times for form, times in chosen if form.kind in {LIST, MAP})
        counts = self._columns.ints(self.node.counts, lists) if lists else ()
        if lists and min(counts) < 0:
            raise LogDamaged("packed columns: a list of negative length")
        at = 0
        for form, times in chosen:
            start, at = at, at + (times if form.kind in {LIST, MAP} else 0)
            yield _Run(form, times, counts[start:at], sum(counts[start:at]))

    @cached_property
    def children(self) -> list[Branch]:
        """The branches below, in the order of the node's children."""
        several = [0] * len(self.node.children)
        for run in self._runs:
            for child in run.form.children:
                several[child] += run.items if run.form.kind in {LIST, MAP} else run.times
        return [
            Branch(node, n, self._columns, self._depth + 1)
            for node, n in zip(self.node.children, several, strict=True)
        ]

    # -- texts

    def render(self) -> list[bytes]:
        """Return the JSON text of each value."""
        return self._render().texts(self.n)

    def _render(self) -> _Part:
        children = [_Source(child._render()) for child in self.children]
        scalars = _Source(self._texts(self.node.scalars, self._scalars))
        keys = _Source(
            self._texts(self.node.keys, sum(run.items for run in self._runs if run.form.kind == MAP))
        )
        parts = [self._render_run(run, children, scalars, keys) for run in self._runs]
        if len(parts) == 1:
            return parts[0]
        pieces = [part.texts(run.times) for part, run in zip(parts, self._runs, strict=True)]
        return _Part(b"%b", (list(chain.from_iterable(pieces)),))

    def _render_run(self, run: _Run, children: Sequence[_Source], scalars: _Source, keys: _Source) -> _Part:
        form = run.form
        if form.kind == SCALAR:
            return scalars.take(run.times)
        if form.kind == RECORD:
            self._columns.pay(0, run.times * sum(map(len, form.literals)))
            parts = [children[child].take(run.times) for child in form.children]
            pieces = chain.from_iterable(
                (_escape(literal), part.form) for literal, part in zip(form.literals, parts, strict=False)
            )
            columns = tuple(chain.from_iterable(part.columns for part in parts))
            return _Part(b"".join(pieces) + _escape(form.literals[-1]), columns)
        item = children[form.children[0]].take(run.items)
        if form.kind == MAP:
            key = keys.take(run.items)
            item = _Part(key.form + _escape(form.literals[1]) + item.form, key.columns + item.columns)
            self._columns.pay(0, run.items * len(form.literals[1]))
        return self._join(run, item)

    def _join(self, run: _Run, item: _Part) -> _Part:
        opening, separator, closing = run.form.literals[0], run.form.literals[-2], run.form.literals[-1]
        separators = sum(count - 1 for count in run.counts if count)
        self._columns.pay(0, run.times * len(opening + closing) + separators * len(separator))
        if not run.counts:
            return _Part(b"", ())
        same = run.counts[0]
        if same <= _UNROLLED and run.items == same * run.times and max(run.counts) == same:
            form = _escape(opening) + _escape(separator).join([item.form] * same) + _escape(closing)
            columns = (column[place::same] for place in range(same) for column in item.columns)
            return _Part(form, tuple(columns))
        texts = iter(item.texts(run.items))
        lists = [opening + separator.join(islice(texts, count)) + closing for count in run.counts]
        return _Part(b"%b", (lists,))

    def _texts(self, number: int, n: int) -> _Part:
        if not n:
            return _Part(b"", ())
        texts = self._columns.texts(number, n)
        if isinstance(texts, bytes):
            self._columns.pay(0, n * len(texts))
            return _Part(_escape(texts), ())
        self._columns.pay(0, sum(map(len, texts)))
        return _Part(b"%b", (texts,))

    # -- numbers

    @property
    def _scalars(self) -> int:
        return sum(run.times for run in self._runs if run.form.kind == SCALAR)

    def numbers(self) -> tuple[array[int] | array[float], dict[int, bytes]] | None:
        """Return the scalars as numbers, and the texts of those that are none; None if most are none."""
        return self._columns.numbers(self.node.scalars, self._scalars) if self._scalars else None

    def descend(self, path: str) -> list[tuple[Branch, int]] | None:
        """Return the branches on a path below this one with their place among their siblings."""
        if not path:
            return []
        for place, name in enumerate(steps(self.node)):
            if path.startswith(name):
                child = self.children[place]
                rest = child.descend(path[len(name) :])
                if rest is not None:
                    return [(child, place), *rest]
        return None

    def counts(self, child: int) -> Sequence[int] | None:
        """Return how many values of a child belong to each of ours; None where it is one each."""
        counts: list[int] = []
        for run in self._runs:
            if child not in run.form.children:
                counts.extend(repeat(0, run.times))
            elif run.form.kind == RECORD:
                counts.extend(repeat(1, run.times))
            else:
                counts.extend(run.counts)
        return None if counts.count(1) == self.n else counts


_SAME = re.compile(rb"(.)\1*", re.DOTALL).finditer


def _runs(choices: array[int]) -> Iterator[tuple[int, int]]:
    """Yield equal numbers in a row, with how many they are."""
    if max(choices) < 256:
        return ((found[1][0], found.end() - found.start()) for found in _SAME(bytes(choices.tolist())))
    return ((choice, len(list(run))) for choice, run in groupby(choices))


def gather(upper: Sequence[int] | None, lower: Sequence[int] | None) -> Sequence[int] | None:
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


def _escape(literal: bytes) -> bytes:
    return literal.replace(b"%", b"%%")


_LITERALS = {SCALAR: 0, LIST: 3, MAP: 4}


def _check(node: Node) -> None:
    for form in node.forms:
        if form.kind == RECORD:
            fits = len(form.literals) == len(form.children) + 1 and len(set(form.children)) == len(
                form.children
            )
        else:
            fits = len(form.literals) == _LITERALS.get(form.kind)
            fits = fits and len(form.children) == (0 if form.kind == SCALAR else 1)
        if not fits or not all(0 <= child < len(node.children) for child in form.children):
            raise LogDamaged("packed columns: a form does not fit together")
