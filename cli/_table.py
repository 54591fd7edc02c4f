"""Tables for people, which keep to the width of the terminal."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Literal

from rollout_log.cli._output import console, safe

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["print_table"]

_MOST_FOLDED = 1000
"""Folding takes a millisecond a row; what is longer than this is for `less -S`."""
_NARROW = 14
"""A column that is no wider is not folded."""
_WORD = 26
"""A word that is no longer is not cut, if there is any other way."""


def print_table(
    header: Sequence[str],
    rows: Iterable[Sequence[object]],
    *,
    right: Iterable[str] = (),
    spare: Sequence[str] = (),
) -> None:
    """Print rows under a header; the columns named in `right` are numbers and stand to the right.

    Cells are made safe, and columns in which no row has anything are left out. On a terminal that is too
    narrow, long cells are folded; where that is not enough, the columns `spare` are left out, the first of
    them first, and stderr says so. Elsewhere lines are whole.
    """
    from rich.cells import cell_len

    sides = set(right)
    cells = [["" if cell is None else safe(cell) for cell in row] for row in rows]
    filled = [i for i in range(len(header)) if not cells or any(row[i] for row in cells)]
    header, cells = [header[i] for i in filled], [[row[i] for i in filled] for row in cells]
    widths = [max(map(cell_len, column)) for column in zip(header, *cells, strict=True)]
    out = console()
    if out.is_terminal and _total(widths) > out.width and _print_narrow(out, header, cells, sides, spare):
        return
    for number, row in enumerate([header, *cells]):
        line = "  ".join(
            " " * (width - cell_len(cell)) + cell if name in sides else cell + " " * (width - cell_len(cell))
            for name, cell, width in zip(header, row, widths, strict=True)
        ).rstrip()
        if number == 0 and out.is_terminal:
            out.print(line, style="bold", soft_wrap=True)
        else:
            sys.stdout.write(line + "\n")


def _print_narrow(
    out: Console, header: Sequence[str], cells: list[list[str]], right: set[str], spare: Sequence[str]
) -> bool:
    """Print a table that is too wide, without as few of the spare columns as will do; False if none will.

    Words are cut only where leaving out columns is not enough.
    """
    spare = [name for name in spare if name in header]
    for word, count in itertools.product((_WORD, _NARROW), range(len(spare) + 1)):
        left_out = spare[:count]
        shown = [i for i, name in enumerate(header) if name not in left_out]
        part = [[row[i] for i in shown] for row in cells]
        if _print_folded(out, [header[i] for i in shown], part, right, word):
            if left_out:
                names = ", ".join(left_out)
                sys.stderr.write(
                    f"rollout-log: left out, for a terminal this narrow: {names} (--json has all)\n"
                )
            return True
    return False


def _print_folded(
    out: Console, header: Sequence[str], cells: list[list[str]], right: set[str], uncut: int
) -> bool:
    """Print a table, its long columns folded, no word up to `uncut` cut; False where it does not fit so."""
    from rich.cells import cell_len
    from rich.table import Table
    from rich.text import Text

    if len(cells) > _MOST_FOLDED:
        return False
    names = [name.replace(" ", "\n") for name in header]
    columns = [[*name.split("\n"), *(row[i] for row in cells)] for i, name in enumerate(names)]
    widths = [max(map(cell_len, column)) for column in columns]
    words = [max(cell_len(word) for text in column for word in text.split() or [""]) for column in columns]
    whole = [word if word <= uncut else 0 for word in words]
    least = [min(width, max(_NARROW, word)) for width, word in zip(widths, whole, strict=True)]
    gap = 2 if _total(least) <= out.width else 1
    room = out.width - _total(least, gap)
    if room < 0:
        return False
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, gap, 0, 0))
    for name, broken, width in zip(header, names, _allot(widths, least, room), strict=True):
        side: Literal["left", "right"] = "right" if name in right else "left"
        table.add_column(broken, justify=side, overflow="fold", width=width)
    for row in cells:
        table.add_row(*map(Text, row))
    out.print(table)
    return True


def _allot(wanted: Sequence[int], least: Sequence[int], room: int) -> list[int]:
    """Give the columns that want more than the least what there is, most to those that are folded most."""
    given = list(least)
    for _ in range(min(room, sum(wanted) - sum(least))):
        most = max(range(len(given)), key=lambda i: wanted[i] / max(given[i], 1))
        given[most] += 1
    return given


def _total(widths: Sequence[int], gap: int = 2) -> int:
    return sum(widths) + gap * (len(widths) - 1)
