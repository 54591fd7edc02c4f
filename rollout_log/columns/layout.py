"""What a packed group says about itself: the schema of its header (`docs/format-columns.md`).

A group is a tree of nodes, one per JSON path, over a table of columns. A node knows the forms its value
takes (a scalar, a list, an object with these keys, …) and the columns that tell them apart.
"""

from __future__ import annotations

from typing import Union

import msgspec

__all__ = [
    "LIST",
    "MAP",
    "RECORD",
    "SCALAR",
    "Column",
    "Constant",
    "Floats",
    "Form",
    "Group",
    "Ints",
    "Mapped",
    "Node",
    "Patched",
    "Plane",
    "Strings",
    "Texts",
    "fits_together",
]

Plane = Union[bytes, int]  # noqa: UP007 - a runtime value for msgspec, which 3.10 cannot build from strings
"""Bytes of the same significance of each value: here as they are, or the number of a stream."""


class _Array(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    pass


class Constant(_Array, frozen=True, tag=0):
    """One text, as often as there are values."""

    text: bytes


class Ints(_Array, frozen=True, tag=1):
    """Integers: `base` plus the unsigned number in the planes, least significant first.

    With `deltas` these are differences to the value before; the first value is `start`.
    """

    base: int
    planes: list[Plane]
    deltas: bool = False
    start: int = 0


class Floats(_Array, frozen=True, tag=2):
    """IEEE 754 numbers, of 4 or 8 planes; `style` says how they are printed."""

    planes: list[Plane]
    style: int = 0


class Strings(_Array, frozen=True):
    """Byte strings one after another."""

    count: int
    lengths: Ints
    blob: Plane


class Texts(_Array, frozen=True, tag=3):
    """The place of each value in a list of distinct texts."""

    texts: Strings
    index: Ints


class Mapped(_Array, frozen=True, tag=4):
    """Texts that follow from another column: its distinct values, in order, stand for `texts`."""

    column: int
    texts: Strings


class Patched(_Array, frozen=True, tag=5):
    """A column with other texts at some positions."""

    column: Column
    positions: Ints
    texts: Strings


Column = Union[Constant, Ints, Floats, Texts, Mapped, Patched]  # noqa: UP007 - as above

SCALAR, LIST, RECORD, MAP = range(4)


class Form(_Array, frozen=True):
    """One form that a node's value takes.

    `literals` are the bytes around what varies: none for a scalar; open, separator, close for a list;
    open, colon, separator, close for a map; one more than members for a record. `children` are numbers
    of the node's children: a record's members, the items of a list or map.
    """

    kind: int
    literals: list[bytes] = []
    children: list[int] = []


class Node(_Array, frozen=True):
    """What is at one path. Columns are numbers in the group's table, -1 where there is none."""

    forms: list[Form] = []
    choice: int = -1
    """Which form each value has, when there are several."""
    scalars: int = -1
    counts: int = -1
    """Items of each list or map."""
    keys: int = -1
    """Keys of all maps, quotes included."""
    children: list[Node] = []


class Group(_Array, frozen=True):
    """The header of consecutive frames that were packed together."""

    frames: int
    size: int
    """Bytes of all frames, plus one for each frame."""
    columns: list[Column]
    streams: list[int]
    """Stored length of each stream, in order."""
    root: Node


_DEPTH = 64
_LITERALS = {SCALAR: 0, LIST: 3, MAP: 4}


def fits_together(node: Node, depth: int = 0) -> bool:
    """Whether a tree's forms have the literals and the children that they need, and it is not too deep."""
    return (
        depth <= _DEPTH
        and all(_fits(form, len(node.children)) for form in node.forms)
        and all(fits_together(child, depth + 1) for child in node.children)
    )


def _fits(form: Form, children: int) -> bool:
    if not all(0 <= child < children for child in form.children):
        return False
    if form.kind == RECORD:
        return len(form.literals) == len(form.children) + 1 and len(set(form.children)) == len(form.children)
    return len(form.literals) == _LITERALS.get(form.kind) and len(form.children) == (form.kind != SCALAR)
