"""What the verbs print with: JSON for programs, safe text and tables for people.

Keys, model output and headers are hostile: they may move the cursor, retitle the terminal, reverse the
reading order or imitate markup. `safe` shows such characters as escapes; `console` reads no markup.
JSON is ASCII, so it needs no `safe`.
"""

from __future__ import annotations

import sys
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from rollout_log.ascii_json import to_json

if TYPE_CHECKING:
    from rich.console import Console

# Controls, format characters (bidi among them), surrogates, line and paragraph separators.
_HOSTILE = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})
# Format characters that scripts and emoji need; they change how their neighbours look, and no more.
_JOINERS = frozenset("\u200c\u200d")
# Folding takes a millisecond a row; what is longer than this is for `less -S`.
_MOST_FOLDED = 1000
# A column that is no wider is not folded, and no word that is no longer.
_NARROW, _WORD = 14, 26
_NAMED = {"\n": r"\n", "\r": r"\r", "\t": r"\t"}


def safe(text: object, *, keep: str = "") -> str:
    """Show what a terminal would obey as an escape (`\\x1b`), but for the characters in `keep`.

    The result is one line unless `keep` has a newline. It is for reading: a backslash is not doubled,
    so the text cannot always be told back from it; `--json` is exact.
    """
    text = str(text)
    if text.isprintable():  # the common case; printable excludes all of _HOSTILE
        return text
    return "".join(c if c in keep else _show(c) for c in text)


def _show(char: str) -> str:
    if char in _JOINERS or unicodedata.category(char) not in _HOSTILE:
        return char
    return _NAMED.get(char) or char.encode("unicode_escape", "surrogatepass").decode("ascii")


def print_json(*values: Any) -> None:
    """Print each value as one line of JSON: one object, or JSON Lines."""
    for value in values:
        sys.stdout.write(to_json(value) + "\n")


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
    """Print a table that is too wide, without as few of the spare columns as will do; False if none will."""
    spare = [name for name in spare if name in header]
    for count in range(len(spare) + 1):
        left_out = spare[:count]
        shown = [i for i, name in enumerate(header) if name not in left_out]
        part = [[row[i] for i in shown] for row in cells]
        if _print_folded(out, [header[i] for i in shown], part, right):
            if left_out:
                names = ", ".join(left_out)
                sys.stderr.write(
                    f"rollout-log: left out, for a terminal this narrow: {names} (--json has all)\n"
                )
            return True
    return False


def _print_folded(out: Console, header: Sequence[str], cells: list[list[str]], right: set[str]) -> bool:
    """Print a table that is too wide, its long columns folded; False where that would not help."""
    from rich.cells import cell_len
    from rich.table import Table
    from rich.text import Text

    if len(cells) > _MOST_FOLDED:
        return False
    names = [name.replace(" ", "\n") for name in header]
    columns = [[*name.split("\n"), *(row[i] for row in cells)] for i, name in enumerate(names)]
    widths = [max(map(cell_len, column)) for column in columns]
    words = [max(cell_len(word) for text in column for word in text.split() or [""]) for column in columns]
    least = [min(width, max(_NARROW, min(word, _WORD))) for width, word in zip(widths, words, strict=True)]
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


def print_hanging(head: str, text: str, *, flush: bool = False) -> None:
    """Print a line; on a terminal what is too long goes on below, under where `text` begins."""
    from rich.cells import cell_len
    from rich.table import Table
    from rich.text import Text

    head, text = safe(head), safe(text)
    out = console()
    if not out.is_terminal or cell_len(head) + cell_len(text) <= out.width:
        print(head + text, flush=flush)
        return
    grid = Table.grid()
    grid.add_column(width=cell_len(head))
    grid.add_row(Text(head), Text(text))
    out.print(grid)


def print_facts(facts: Mapping[str, object]) -> None:
    """Print names and values, a line each."""
    from rich.table import Table
    from rich.text import Text

    out = console()
    width = max(map(len, facts), default=0)
    grid = Table.grid(padding=(0, 2, 0, 0))
    for name, value in facts.items():
        grid.add_row(Text(name, "dim"), Text(safe(value)))
        if not out.is_terminal:
            sys.stdout.write(f"{name:{width}}  {safe(value)}\n")
    if out.is_terminal:
        out.print(grid)


def console(*, stderr: bool = False) -> Console:
    """Give a console that reads no markup and no emoji names, and colours on a terminal alone."""
    from rich.console import Console

    terminal = (sys.stderr if stderr else sys.stdout).isatty()
    return Console(
        stderr=stderr, markup=False, emoji=False, highlight=False, width=None if terminal else 100_000
    )
