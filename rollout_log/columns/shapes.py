"""JSON texts to a tree of columns: what is alike between them once, what differs by path.

A frame is cut into its scalars and the bytes around them, its skeleton. Streams have few skeletons, so
each is parsed once, into a program that says which path every scalar belongs to; runs of frames with the
same skeleton then move column by column. A frame that is not JSON of the usual kind is one text.
"""

from __future__ import annotations

import re
from contextlib import suppress
from itertools import chain, groupby, repeat
from operator import itemgetter
from typing import TYPE_CHECKING, TypeVar, Union

from rollout_log.columns.layout import LIST, MAP, RECORD, SCALAR, Form, Node

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rollout_log.columns.coding import ColumnWriter

__all__ = ["Tree", "grow"]

_STRING = rb'"[^"\\]*(?:\\.[^"\\]*)*"'
_CUT = re.compile(
    rb"((?:[\s{}\[\],:]*" + _STRING + rb"\s*:)*[\s{}\[\],:]*)"  # braces, commas and keys, then
    rb"((?<=\[)[0-9,]+(?=\])|" + _STRING + rb'|[^\s{}\[\],:"]+)',  # a run of integers, a string, a word
    re.DOTALL,
).findall
_TOKENS = re.compile(rb"\s*[{\[,\]}]\s*|" + _STRING + rb"\s*:\s*", re.DOTALL).findall
_KEY = re.compile(rb"(" + _STRING + rb")(\s*:\s*)\Z", re.DOTALL).match
_NAME = re.compile(rb'"([A-Za-z_][A-Za-z0-9_-]*)"\Z').match

_T = TypeVar("_T")

_DEPTH = 32
_MAP_FROM = 12
"""An object whose keys come in more sets than this is a map: its keys are values."""
_PLACES = 16
"""A list is kept place by place only up to this length."""


class _NotAlikeError(Exception):
    """A frame is not built like JSON that this module can take apart."""


# ---- skeletons --------------------------------------------------------------------------------------


class _Array:
    """A list; `run` when it has one slot for any number of scalars: a single one, or integers."""

    def __init__(self, marks: list[bytes], items: list[_Value], run: bool) -> None:
        self.marks = marks
        self.items = items
        self.run = run


class _Object:
    def __init__(self, marks: list[bytes], keys: list[bytes], colons: list[bytes], values: list[_Value]) -> None:
        self.marks = marks
        self.keys = keys
        self.colons = colons
        self.values = values


_Value = Union[int, _Array, _Object]  # noqa: UP007 - used in annotations only, named once
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

    def parse(self) -> _Value:
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

    def _mark(self, allowed: bytes) -> bytes:
        token = self._next()
        if isinstance(token, int) or token.strip() not in {allowed[:1], allowed[1:]}:
            raise _NotAlikeError
        return token

    def _closes(self, mark: bytes) -> bool:
        token = self._peek()
        return isinstance(token, bytes) and token.strip() == mark

    def _value(self, depth: int) -> _Value:
        token = self._next()
        if isinstance(token, int):
            return token
        if depth < _DEPTH:
            if token.strip() == b"[":
                return self._array(token, depth)
            if token.strip() == b"{":
                return self._object(token, depth)
        raise _NotAlikeError

    def _array(self, opening: bytes, depth: int) -> _Array:
        marks, items = [opening], list[_Value]()
        if self._closes(b"]"):
            return _Array([opening, self._mark(b"]]")], items, run=False)
        while marks[-1].strip() != b"]":
            items.append(self._value(depth + 1))
            marks.append(self._mark(b",]"))
        if len(set(marks[1:-1])) > 1 and len(items) > _PLACES:
            raise _NotAlikeError
        run = isinstance(items[0], int) and len(items) == 1
        return _Array(marks, items, run and opening.endswith(b"[") and marks[-1].startswith(b"]"))

    def _object(self, opening: bytes, depth: int) -> _Object:
        result = _Object([opening], [], [], [])
        if self._closes(b"}"):
            result.marks.append(self._mark(b"}}"))
            return result
        while result.marks[-1].strip() != b"}":
            key = self._next()
            parts = None if isinstance(key, int) else _KEY(key)
            if parts is None:
                raise _NotAlikeError
            result.keys.append(parts[1])
            result.colons.append(parts[2])
            result.values.append(self._value(depth + 1))
            result.marks.append(self._mark(b",}"))
        if len(set(result.keys)) != len(result.keys):
            raise _NotAlikeError
        return result


# ---- habits: what a path's values are like in all skeletons -----------------------------------------


class _Habits:
    __slots__ = ("arities", "children", "keys", "kinds")

    def __init__(self) -> None:
        self.children: dict[bytes, _Habits] = {}
        self.keys: set[tuple[bytes, ...]] = set()
        self.arities: set[int] = set()
        self.kinds: list[set[str]] = []

    def child(self, name: bytes) -> _Habits:
        return self.children.setdefault(name, _Habits())

    def note(self, value: _Value, scalars: Sequence[bytes]) -> None:
        if isinstance(value, _Array):
            self.arities.add(1 if value.run else len(value.items))
            if len(value.items) <= _PLACES:
                self.kinds += [set() for _ in range(len(value.items) - len(self.kinds))]
                for kinds, item in zip(self.kinds, value.items):
                    kinds.add(_kind(item, scalars))
            for item in value.items:
                self.child(b"[]").note(item, scalars)
        elif isinstance(value, _Object):
            self.keys.add(tuple(value.keys))
            if not self.is_map:
                for key, item in zip(value.keys, value.values):
                    self.child(key).note(item, scalars)

    @property
    def is_map(self) -> bool:
        return len(self.keys) > _MAP_FROM

    @property
    def by_place(self) -> bool:
        """Lists of one length whose places hold different kinds: `[-0.5,17,null]`."""
        if len(self.arities) != 1 or not 2 <= min(self.arities) <= _PLACES:
            return False
        kinds = [kinds - {"null"} - ({"int"} if "float" in kinds else set()) for kinds in self.kinds]
        return all(len(kind) <= 1 for kind in kinds) and len(set().union(*kinds)) > 1


def _kind(value: _Value, scalars: Sequence[bytes]) -> str:
    if not isinstance(value, int):
        return type(value).__name__
    text = scalars[value]
    if text[:1] == b'"':
        return "string"
    if text in {b"null", b"true", b"false"}:
        return text.decode()
    return "int" if text.lstrip(b"-").isdigit() else "float"


# ---- the tree ---------------------------------------------------------------------------------------


class Tree:
    """One path: the forms its values take, and what varies, in order."""

    def __init__(self) -> None:
        self.children: dict[bytes, Tree] = {}
        self.forms: dict[tuple[int, tuple[bytes, ...], tuple[bytes, ...]], int] = {}
        self.choices: list[tuple[int, int]] = []
        """(form, how many in a row)"""
        self.texts: list[bytes] = []
        self.counts: list[int] = []
        self.keys: list[bytes] = []

    def form(self, kind: int, literals: Sequence[bytes] = (), names: Sequence[bytes] = ()) -> int:
        """Return the number of a form; new ones are added."""
        return self.forms.setdefault((kind, tuple(literals), tuple(names)), len(self.forms))

    def child(self, name: bytes) -> Tree:
        """Return the tree at one more step."""
        return self.children.setdefault(name, Tree())

    def choose(self, form: int, times: int) -> None:
        """Note that the next values take this form."""
        if self.choices and self.choices[-1][0] == form:
            times += self.choices.pop()[1]
        self.choices.append((form, times))

    def add_scalars(self, texts: Sequence[bytes]) -> None:
        """Add values that are one text each."""
        self.choose(self.form(SCALAR), len(texts))
        self.texts += texts

    def write(self, writer: ColumnWriter, name: bytes = b"") -> Node:
        """Encode all columns below and return the node that finds them."""
        numbers = list(self._columns(writer))
        children = [child.write(writer, label) for label, child in self.children.items()]
        places = {label: place for place, label in enumerate(self.children)}
        forms = [
            Form(kind, list(literals), [places[label] for label in names]) for kind, literals, names in self.forms
        ]
        return Node(name, forms, *numbers, children)

    def _columns(self, writer: ColumnWriter) -> Iterator[int]:
        chosen = list(chain.from_iterable(repeat(form, times) for form, times in self.choices))
        yield writer.add_ints(chosen) if len(self.forms) > 1 else -1
        yield writer.add_texts(self.texts) if self.texts else -1
        yield writer.add_ints(self.counts) if self.counts else -1
        yield writer.add_texts(self.keys) if self.keys else -1


class _Steps:
    """What one skeleton adds to one path, in order."""

    def __init__(self) -> None:
        self.forms: list[tuple[int, int, bool]] = []
        """(form, slot or -1, whether the slot is a run)"""
        self.counts: list[int] = []
        """Items of a list; for a run, its slot as -1 - slot."""
        self.keys: list[bytes] = []

    def apply(self, tree: Tree, columns: Sequence[Sequence[bytes]], frames: int) -> None:
        """Add `frames` frames, whose scalars are `columns`, slot by slot."""
        slots = [slot for _, slot, _ in self.forms if slot >= 0]
        runs = any(run for _, _, run in self.forms)
        texts = _interleave([columns[slot] for slot in slots])
        if runs:
            texts = _split(texts)
        tree.texts += texts
        if len({form for form, _, _ in self.forms}) == 1:
            tree.choose(self.forms[0][0], len(texts) if slots else len(self.forms) * frames)
        else:
            for frame in range(frames):
                for form, slot, run in self.forms:
                    tree.choose(form, _count(columns[slot][frame]) if run else 1)
        if any(count < 0 for count in self.counts):
            counts = [
                [count] * frames if count >= 0 else list(map(_count, columns[-1 - count])) for count in self.counts
            ]
            tree.counts += _interleave(counts)
        else:
            tree.counts += self.counts * frames
        tree.keys += self.keys * frames


def _interleave(columns: list[Sequence[_T]]) -> Sequence[_T]:
    if len(columns) == 1:
        return columns[0]
    return list(chain.from_iterable(zip(*columns)))


def _count(run: bytes) -> int:
    return 1 if run[:1] == b'"' else run.count(b",") + 1


def _split(runs: Sequence[bytes]) -> Sequence[bytes]:
    joined = b",".join(runs)
    if b'"' not in joined:
        return joined.split(b",")
    return list(chain.from_iterable([run] if run[:1] == b'"' else run.split(b",") for run in runs))


class _Program:
    """Where each scalar of one skeleton goes."""

    def __init__(self, value: _Value, tree: Tree, habits: _Habits) -> None:
        self.steps: dict[Tree, _Steps] = {}
        self._place(value, tree, habits)

    def apply(self, columns: Sequence[Sequence[bytes]], frames: int) -> None:
        for tree, steps in self.steps.items():
            steps.apply(tree, columns, frames)

    def _place(self, value: _Value, tree: Tree, habits: _Habits) -> None:
        steps = self.steps.setdefault(tree, _Steps())
        if isinstance(value, int):
            steps.forms.append((tree.form(SCALAR), value, False))
        elif isinstance(value, _Object):
            self._place_object(value, tree, habits, steps)
        elif not habits.by_place and len(set(value.marks[1:-1])) <= 1:
            self._place_list(value, tree, habits, steps)
        else:
            names = [b"[%d]" % place for place in range(len(value.items))]
            steps.forms.append((tree.form(RECORD, value.marks, names), -1, False))
            for name, item in zip(names, value.items):
                self._place(item, tree.child(name), habits.child(b"[]"))

    def _place_list(self, value: _Array, tree: Tree, habits: _Habits, steps: _Steps) -> None:
        opening, *between, closing = value.marks
        if between:
            separator = between[0]
        else:
            known = (
                literals[1]
                for kind, literals, _ in tree.forms
                if kind == LIST and literals[0] == opening and literals[2] == closing
            )
            separator = b"," if value.run else next(known, b",")
        steps.forms.append((tree.form(LIST, (opening, separator, closing), (b"[]",)), -1, False))
        items = tree.child(b"[]")
        if value.run and isinstance(value.items[0], int):
            slot = value.items[0]
            steps.counts.append(-1 - slot)
            self.steps.setdefault(items, _Steps()).forms.append((items.form(SCALAR), slot, True))
        else:
            steps.counts.append(len(value.items))
            for item in value.items:
                self._place(item, items, habits.child(b"[]"))

    def _place_object(self, value: _Object, tree: Tree, habits: _Habits, steps: _Steps) -> None:
        opening, *between, closing = value.marks
        if habits.is_map and value.keys and len({*between}) <= 1 and len({*value.colons}) == 1:
            separator = between[0] if between else b","
            form = tree.form(MAP, (opening, value.colons[0], separator, closing), (b"{}",))
            steps.forms.append((form, -1, False))
            steps.counts.append(len(value.keys))
            steps.keys += value.keys
            for item in value.values:
                self._place(item, tree.child(b"{}"), habits.child(b"{}"))
            return
        parts = [mark + key + colon for mark, key, colon in zip(value.marks, value.keys, value.colons)]
        names = [_name(key) for key in value.keys]
        steps.forms.append((tree.form(RECORD, [*parts, closing] if parts else [opening + closing], names), -1, False))
        for key, name, item in zip(value.keys, names, value.values):
            self._place(item, tree.child(name), habits.child(key))


def _name(key: bytes) -> bytes:
    plain = _NAME(key)
    return b"." + (plain[1] if plain else key)


# ---- growing ----------------------------------------------------------------------------------------


class _Skeleton:
    """The literals of a frame, understood or not."""

    def __init__(self, literals: Sequence[bytes]) -> None:
        self.value: _Value | None = None
        self.program: _Program | None = None
        with suppress(_NotAlikeError):
            if literals:
                self.value = _Parser([*literals[:-1], literals[-1][:-1]]).parse()


def grow(frames: Sequence[bytes]) -> Tree:
    """Take frames apart; the tree's root has one value for each frame."""
    raw = _Skeleton([])
    skeletons: dict[tuple[bytes, ...], _Skeleton] = {(): raw}
    habits = _Habits()
    cuts: list[tuple[_Skeleton, Sequence[bytes]]] = []
    for frame in frames:
        pieces = _CUT(frame + b"\n0")  # the last scalar is ours, so that the end of the frame is a literal
        literals, scalars = zip(*pieces) if pieces else ((), ())
        skeleton = skeletons.get(literals)
        if skeleton is None:
            skeletons[literals] = skeleton = _Skeleton(literals)
            if skeleton.value is not None:
                habits.note(skeleton.value, scalars)
        whole = skeleton.value is not None and b"".join(chain.from_iterable(pieces))[:-2] == frame
        cuts.append((skeleton, scalars) if whole else (raw, (frame,)))
    tree = Tree()
    raw.value = 0
    for skeleton, cut in groupby(cuts, itemgetter(0)):
        run = [scalars for _, scalars in cut]
        if skeleton.program is None:
            skeleton.program = _Program(skeleton.value or 0, tree, habits)
        skeleton.program.apply(list(zip(*run)), len(run))
    return tree
