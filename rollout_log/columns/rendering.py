"""Values back to the JSON texts that they were."""

from __future__ import annotations

from itertools import chain, islice
from typing import TYPE_CHECKING, NamedTuple

from rollout_log.columns.layout import MAP, RECORD, SCALAR

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rollout_log.columns.values import Run, Values

__all__ = ["render"]

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


class _Source:
    """A part that is used up from its beginning."""

    def __init__(self, part: _Part) -> None:
        self._part = part
        self._at = 0

    def take(self, n: int) -> _Part:
        self._at += n
        return self._part.cut(self._at - n, self._at)


def render(values: Values) -> list[bytes]:
    """Return the JSON text of each value."""
    values.columns.begin_rendering()
    return _Rendering(values).part.texts(values.n)


class _Rendering:
    """The texts of one node's values."""

    def __init__(self, values: Values) -> None:
        self._pay = values.columns.pay_bytes
        self._children = [
            _Source(_Rendering(values.child(place)).part) for place in range(len(values.node.children))
        ]
        self._scalars = _Source(self._texts(*values.scalar_texts()))
        self._keys = _Source(self._texts(*values.key_texts()))
        parts = [self._render(run) for run in values.runs]
        self.part: _Part
        if len(parts) == 1:
            self.part = parts[0]
        else:
            pieces = [part.texts(run.times) for part, run in zip(parts, values.runs, strict=True)]
            self.part = _Part(b"%b", (list(chain.from_iterable(pieces)),))

    def _render(self, run: Run) -> _Part:
        form = run.form
        if form.kind == SCALAR:
            return self._scalars.take(run.times)
        if form.kind == RECORD:
            self._pay(run.times * sum(map(len, form.literals)))
            parts = [self._children[child].take(run.times) for child in form.children]
            pieces = chain.from_iterable(
                (_escape(literal), part.form) for literal, part in zip(form.literals, parts, strict=False)
            )
            columns = tuple(chain.from_iterable(part.columns for part in parts))
            return _Part(b"".join(pieces) + _escape(form.literals[-1]), columns)
        item = self._children[form.children[0]].take(run.items)
        if form.kind == MAP:
            key = self._keys.take(run.items)
            item = _Part(key.form + _escape(form.literals[1]) + item.form, key.columns + item.columns)
            self._pay(run.items * len(form.literals[1]))
        return self._join(run, item)

    def _join(self, run: Run, item: _Part) -> _Part:
        opening, separator, closing = run.form.literals[0], run.form.literals[-2], run.form.literals[-1]
        separators = run.items - run.times + run.counts.count(0)
        self._pay(run.times * len(opening + closing) + separators * len(separator))
        if run.same is not None and run.same <= _UNROLLED:
            form = _escape(opening) + _escape(separator).join([item.form] * run.same) + _escape(closing)
            columns = (column[place :: run.same] for place in range(run.same) for column in item.columns)
            return _Part(form, tuple(columns))
        texts = iter(item.texts(run.items))
        lists = [opening + separator.join(islice(texts, count)) + closing for count in run.counts]
        return _Part(b"%b", (lists,))

    def _texts(self, texts: list[bytes] | bytes, n: int) -> _Part:
        if isinstance(texts, bytes):
            self._pay(n * len(texts))
            return _Part(_escape(texts), ())
        self._pay(sum(map(len, texts)))
        return _Part(b"%b", (texts,))


def _escape(literal: bytes) -> bytes:
    return literal.replace(b"%", b"%%")
