"""What is alike in many JSON texts once, what differs as columns, one or more for each path.

Each skeleton becomes a program that says which path every scalar belongs to; runs of frames with the
same skeleton then move column by column.
"""

from __future__ import annotations

from functools import cached_property
from itertools import chain, groupby, repeat
from operator import itemgetter
from typing import TYPE_CHECKING, TypeVar

from rollout_log.columns.layout import LIST, MAP, RECORD, SCALAR, Form, Node
from rollout_log.columns.skeletons import PLACES, Array, Object, Skeleton, Value, cut

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rollout_log.columns.writer import ColumnWriter

__all__ = ["Tree", "grow"]

_MAP_FROM = 12
"""An object whose keys come in more sets than this is a map: its keys are values."""
_T = TypeVar("_T")


class _Habits:
    def __init__(self) -> None:
        self.children: dict[bytes, _Habits] = {}
        self.keys: set[tuple[bytes, ...]] = set()
        self.arities: set[int] = set()
        self.kinds: list[set[str]] = []

    def child(self, name: bytes) -> _Habits:
        found = self.children.get(name)
        if found is None:
            found = self.children[name] = _Habits()
        return found

    def note(self, value: Value, scalars: Sequence[bytes]) -> None:
        if isinstance(value, Array):
            self.arities.add(1 if value.run else len(value.items))
            if len(value.items) <= PLACES:
                self.kinds += [set() for _ in range(len(value.items) - len(self.kinds))]
                for kinds, item in zip(self.kinds, value.items, strict=False):
                    kinds.add(_kind(item, scalars))
            items = self.child(b"[]")
            for item in value.items:
                if not isinstance(item, int):
                    items.note(item, scalars)
        elif isinstance(value, Object):
            self.keys.add(tuple(value.keys))
            if not self.is_map:
                for key, item in zip(value.keys, value.values, strict=True):
                    if not isinstance(item, int):
                        self.child(key).note(item, scalars)

    @property
    def is_map(self) -> bool:
        return len(self.keys) > _MAP_FROM

    @cached_property
    def by_place(self) -> bool:
        """Whether these are lists of one length whose places hold different kinds: `[-0.5,17,null]`.

        To be asked when all is noted.
        """
        if len(self.arities) != 1 or not 2 <= min(self.arities) <= PLACES:
            return False
        kinds = [kinds - {"null"} - ({"int"} if "float" in kinds else set()) for kinds in self.kinds]
        return all(len(kind) <= 1 for kind in kinds) and len(set().union(*kinds)) > 1


def _kind(value: Value, scalars: Sequence[bytes]) -> str:
    if not isinstance(value, int):
        return type(value).__name__
    text = scalars[value]
    if text[:1] == b'"':
        return "string"
    if text in {b"null", b"true", b"false"}:
        return text.decode()
    return "int" if text.lstrip(b"-").isdigit() else "float"


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
        found = self.children.get(name)
        if found is None:
            found = self.children[name] = Tree()
        return found

    def choose(self, form: int, times: int) -> None:
        """Note that the next values take this form."""
        if self.choices and self.choices[-1][0] == form:
            times += self.choices.pop()[1]
        self.choices.append((form, times))

    def add_scalars(self, texts: Sequence[bytes]) -> None:
        """Add values that are one text each."""
        self.choose(self.form(SCALAR), len(texts))
        self.texts += texts

    def columns(self) -> Iterator[Sequence[bytes]]:
        """Yield every column of texts in and below this tree."""
        yield from filter(None, (self.texts, self.keys))
        for child in self.children.values():
            yield from child.columns()

    def write(self, writer: ColumnWriter) -> Node:
        """Encode all columns below and return the node that finds them."""
        choice, scalars, counts, keys = self._columns(writer)
        children = [child.write(writer) for child in self.children.values()]
        places = {label: place for place, label in enumerate(self.children)}
        forms = [
            Form(kind, list(literals), [places[label] for label in names])
            for kind, literals, names in self.forms
        ]
        return Node(forms, choice, scalars, counts, keys, children)

    def _columns(self, writer: ColumnWriter) -> tuple[int, int, int, int]:
        chosen = list(chain.from_iterable(repeat(form, times) for form, times in self.choices))
        return (
            writer.add_ints(chosen) if len(self.forms) > 1 else -1,
            writer.add_texts(self.texts) if self.texts else -1,
            writer.add_ints(self.counts) if self.counts else -1,
            writer.add_texts(self.keys) if self.keys else -1,
        )


class _Steps:
    """What one skeleton adds to one path, in order."""

    def __init__(self) -> None:
        self.forms: list[tuple[int, int, bool]] = []
        """(form, slot or -1, whether the slot is a run)"""
        self.counts: list[int] = []
        """Items of a list; for a run, its slot as -1 - slot."""
        self.keys: list[bytes] = []

    @cached_property
    def slots(self) -> list[int]:
        """Slots of all scalars."""
        return [slot for _, slot, _ in self.forms if slot >= 0]

    @cached_property
    def has_runs(self) -> bool:
        return any(run for _, _, run in self.forms)

    @cached_property
    def form(self) -> int | None:
        """The form of all values, if it is one."""
        forms = {form for form, _, _ in self.forms}
        return forms.pop() if len(forms) == 1 else None

    def apply(self, tree: Tree, columns: Sequence[Sequence[bytes]], frames: int) -> None:
        """Add `frames` frames, whose scalars are `columns`, slot by slot."""
        values = len(self.forms) * frames
        if self.slots:
            texts = _interleave([columns[slot] for slot in self.slots])
            if self.has_runs:
                texts = _split(texts)
                values = len(texts)
            tree.texts += texts
        if self.form is not None:
            tree.choose(self.form, values)
        else:
            for frame in range(frames):
                for form, slot, run in self.forms:
                    tree.choose(form, _count(columns[slot][frame]) if run else 1)
        if self.counts and min(self.counts) < 0:
            tree.counts += _interleave(
                [
                    [count] * frames if count >= 0 else list(map(_count, columns[-1 - count]))
                    for count in self.counts
                ]
            )
        elif self.counts:
            tree.counts += self.counts * frames
        if self.keys:
            tree.keys += self.keys * frames


def _interleave(columns: Sequence[Sequence[_T]]) -> Sequence[_T]:
    if len(columns) == 1:
        return columns[0]
    return list(chain.from_iterable(zip(*columns, strict=True)))


def _count(run: bytes) -> int:
    return 1 if run[:1] == b'"' else run.count(b",") + 1


def _split(runs: Sequence[bytes]) -> Sequence[bytes]:
    joined = b",".join(runs)
    if b'"' not in joined:
        return joined.split(b",")
    return list(chain.from_iterable([run] if run[:1] == b'"' else run.split(b",") for run in runs))


class _Program:
    """Where each scalar of one skeleton goes; found when all habits are known."""

    def __init__(self, value: Value) -> None:
        self.value = value
        self.steps: dict[Tree, _Steps] = {}

    def apply(self, tree: Tree, habits: _Habits, columns: Sequence[Sequence[bytes]], frames: int) -> None:
        if not self.steps:
            self._place(self.value, tree, habits)
        for branch, steps in self.steps.items():
            steps.apply(branch, columns, frames)

    def _steps(self, tree: Tree) -> _Steps:
        found = self.steps.get(tree)
        if found is None:
            found = self.steps[tree] = _Steps()
        return found

    def _place(self, value: Value, tree: Tree, habits: _Habits) -> None:
        steps = self._steps(tree)
        if isinstance(value, int):
            steps.forms.append((tree.form(SCALAR), value, False))
        elif isinstance(value, Object):
            self._place_object(value, tree, habits, steps)
        elif not habits.by_place and len(set(value.marks[1:-1])) <= 1:
            self._place_list(value, tree, habits, steps)
        else:
            names = [b"[%d]" % place for place in range(len(value.items))]
            steps.forms.append((tree.form(RECORD, value.marks, names), -1, False))
            for name, item in zip(names, value.items, strict=True):
                self._place(item, tree.child(name), habits.child(b"[]"))

    def _place_list(self, value: Array, tree: Tree, habits: _Habits, steps: _Steps) -> None:
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
            self._steps(items).forms.append((items.form(SCALAR), slot, True))
        else:
            steps.counts.append(len(value.items))
            for item in value.items:
                self._place(item, items, habits.child(b"[]"))

    def _place_object(self, value: Object, tree: Tree, habits: _Habits, steps: _Steps) -> None:
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
        parts = [
            mark + key + colon
            for mark, key, colon in zip(value.marks, value.keys, value.colons, strict=False)
        ]
        names = value.keys
        steps.forms.append(
            (tree.form(RECORD, [*parts, closing] if parts else [opening + closing], names), -1, False)
        )
        for key, item in zip(value.keys, value.values, strict=True):
            self._place(item, tree.child(key), habits.child(key))


def grow(frames: Sequence[bytes]) -> Tree:
    """Take frames apart; the tree's root has one value for each frame."""
    cuts = list(cut(frames))
    habits = _Habits()
    programs: dict[Skeleton | None, _Program] = {}
    for skeleton, scalars in cuts:
        if skeleton not in programs:
            value = 0 if skeleton is None or skeleton.value is None else skeleton.value
            programs[skeleton] = _Program(value)
            habits.note(value, scalars)
    tree = Tree()
    for skeleton, same in groupby(cuts, itemgetter(0)):
        run = [scalars for _, scalars in same]
        programs[skeleton].apply(tree, habits, list(zip(*run, strict=True)), len(run))
    return tree
