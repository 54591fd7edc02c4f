"""JSON texts cut into scalars and the bytes around them, their skeleton, which few streams have many of.

A skeleton is parsed once. Whatever is not JSON, or not of the usual kind, has none.
"""

from __future__ import annotations

import re
from contextlib import suppress
from itertools import chain
from typing import TYPE_CHECKING, Union

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

__all__ = ["PLACES", "Array", "Object", "Skeleton", "Value", "cut"]

_STRING = rb'"[^"\\]*(?:\\.[^"\\]*)*"'
_SCALAR = rb'[^\s{}\[\],:"]+|' + _STRING
_RUN = rb"[0-9,]+(?=\])|"
_CUT = re.compile(
    rb"((?:[\s{}\[\],:]*" + _STRING + rb"\s*:)*[\s{}\[\],:]*)"  # braces, commas and keys, then
    rb"((?<=\[)" + _RUN + _SCALAR + rb"|.+)",  # a run of integers, a scalar, or whatever cannot be read
    re.DOTALL,
).findall
_END = b"\n0"
"""Put behind a frame, so that its end is a literal too."""
_TOKENS = re.compile(rb"\s*[{\[,\]}]\s*|" + _STRING + rb"\s*:\s*|\s+", re.DOTALL).findall
_KEY = re.compile(rb"(" + _STRING + rb")(\s*:\s*)\Z", re.DOTALL).match

_DEPTH = 32
_SPECIAL_FROM, _SPECIAL_SLOTS, _RECENT = 64, 500, 4
"""A skeleton of no more slots, seen so often, gets its own pattern; the last few are tried first."""
PLACES = 16
"""A list whose separators differ may have no more items than this."""


class _NotAlikeError(Exception):
    """A frame is not built like JSON that this module can take apart."""


class Array:
    """A list; `run` when it has one slot for any number of scalars: a single one, or integers."""

    def __init__(self, marks: list[bytes], items: list[Value], run: bool) -> None:
        self.marks = marks
        self.items = items
        self.run = run


class Object:
    def __init__(
        self, marks: list[bytes], keys: list[bytes], colons: list[bytes], values: list[Value]
    ) -> None:
        self.marks = marks
        self.keys = keys
        self.colons = colons
        self.values = values


Value = Union[int, Array, Object]  # noqa: UP007 - used in annotations only, named once
"""A slot's number, or a container."""


class _Parser:
    """Recursive descent over the tokens of one skeleton; slots are integers among them."""

    def __init__(self, literals: Sequence[bytes]) -> None:
        self.tokens: list[bytes | int] = []
        for slot, literal in enumerate(literals):
            tokens = _TOKENS(literal)
            if b"".join(tokens) != literal:
                raise _NotAlikeError
            self.tokens += tokens
            self.tokens.append(slot)
        self.tokens.pop()
        self.at = 0

    def parse(self) -> Value:
        value = self._value(0)
        if self.at != len(self.tokens):
            raise _NotAlikeError
        return value

    def _next(self) -> bytes | int:
        if self.at == len(self.tokens):
            raise _NotAlikeError
        self.at += 1
        return self.tokens[self.at - 1]

    def _peek(self) -> bytes | int:
        return self.tokens[self.at] if self.at < len(self.tokens) else b""

    def _mark(self, separator: bytes, closing: bytes) -> bytes:
        token = self._next()
        if isinstance(token, int) or (token.strip() != separator and token.strip() != closing):
            raise _NotAlikeError
        return token

    def _closes(self, mark: bytes) -> bool:
        token = self._peek()
        return isinstance(token, bytes) and token.strip() == mark

    def _value(self, depth: int) -> Value:
        token = self._next()
        if isinstance(token, int):
            return token
        if depth < _DEPTH:
            if token.strip() == b"[":
                return self._array(token, depth)
            if token.strip() == b"{":
                return self._object(token, depth)
        raise _NotAlikeError

    def _array(self, opening: bytes, depth: int) -> Array:
        marks, items = [opening], list[Value]()
        if self._closes(b"]"):
            return Array([opening, self._mark(b"]", b"]")], items, run=False)
        while marks[-1].strip() != b"]":
            items.append(self._value(depth + 1))
            marks.append(self._mark(b",", b"]"))
        if len(set(marks[1:-1])) > 1 and len(items) > PLACES:
            raise _NotAlikeError
        run = isinstance(items[0], int) and len(items) == 1
        return Array(marks, items, run and opening.endswith(b"[") and marks[-1].startswith(b"]"))

    def _object(self, opening: bytes, depth: int) -> Object:
        result = Object([opening], [], [], [])
        if self._closes(b"}"):
            result.marks.append(self._mark(b"}", b"}"))
            return result
        while result.marks[-1].strip() != b"}":
            key = self._next()
            parts = None if isinstance(key, int) else _KEY(key)
            if parts is None:
                raise _NotAlikeError
            result.keys.append(parts[1])
            result.colons.append(parts[2])
            result.values.append(self._value(depth + 1))
            result.marks.append(self._mark(b",", b"}"))
        if len(set(result.keys)) != len(result.keys):
            raise _NotAlikeError
        return result


class Skeleton:
    """The literals of a frame, understood or not. One that is seen often gets a pattern of its own."""

    def __init__(self, literals: Sequence[bytes]) -> None:
        self.value: Value | None = None
        self.match: Callable[[bytes], re.Match[bytes] | None] | None = None
        self._literals = literals
        self._seen = 0
        with suppress(_NotAlikeError):
            if literals[-1].endswith(_END[:1]):
                self.value = _Parser([*literals[:-1], literals[-1][:-1]]).parse()

    def see(self) -> bool:
        """Count a frame that was cut by the general pattern; say whether there is a special one now."""
        self._seen += 1
        if self._seen == _SPECIAL_FROM and len(self._literals) <= _SPECIAL_SLOTS and self.value is not None:
            slots = (
                b"(" + (_RUN if literal.endswith(b"[") else b"") + _SCALAR + b")"
                for literal in self._literals
            )
            pieces = chain.from_iterable(zip(map(re.escape, self._literals), slots, strict=True))
            pattern = b"".join([*pieces][:-2]) + re.escape(self._literals[-1][:-1])
            self.match = re.compile(pattern, re.DOTALL).fullmatch
        return self.match is not None


def cut(frames: Iterable[bytes]) -> Iterator[tuple[Skeleton | None, Sequence[bytes]]]:
    """Yield skeleton and scalars of each frame; without a skeleton, the whole frame is the only scalar."""
    skeletons: dict[tuple[bytes, ...], Skeleton] = {}
    recent: list[Skeleton] = []
    for frame in frames:
        for skeleton in recent:
            found = skeleton.match(frame) if skeleton.match else None
            if found:
                yield skeleton, found.groups()
                break
        else:
            literals, scalars = zip(*_CUT(frame + _END), strict=True)
            skeleton = skeletons.get(literals) or skeletons.setdefault(literals, Skeleton(literals))
            if skeleton.value is None or scalars[-1] != _END[1:]:
                yield None, (frame,)
                continue
            yield skeleton, scalars[:-1]
            if not skeleton.see():
                continue
        if recent[:1] != [skeleton]:
            recent = [skeleton, *(other for other in recent if other is not skeleton)][:_RECENT]
