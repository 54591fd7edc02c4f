"""What the verbs print with: JSON for programs, safe text for people (tables: `_table`).

Keys, model output and headers are hostile: they may move the cursor, retitle the terminal, reverse the
reading order or imitate markup. `safe` shows such characters as escapes; `console` reads no markup.
JSON is ASCII, so it needs no `safe`.
"""

from __future__ import annotations

import sys
import unicodedata
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollout_log.ascii_json import to_json
from rollout_log.counting import several

if TYPE_CHECKING:
    from rich.console import Console

STDOUT = Path("/dev/stdout")
# Controls, format characters (bidi among them), surrogates, line and paragraph separators.
_HOSTILE = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})
# Format characters that scripts and emoji need; they change how their neighbours look, and no more.
_JOINERS = frozenset("\u200c\u200d")
_UNITS = ("bytes", "kB", "MB", "GB", "TB")
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


def say_written(path: Path, samples: int) -> None:
    """Say on stderr what has been written; a pipe or a device has no size."""
    if path == STDOUT:
        written = "standard output"
    else:
        written = f"{safe(path)}, {size(path.stat().st_size)}" if path.is_file() else safe(path)
    print(f"rollout-log: {written}, with {several(samples, 'sample')}", file=sys.stderr)


def size(count: float) -> str:
    """Show bytes in three digits: `1.23 MB`."""
    for unit in _UNITS:
        if count < 999.5 or unit == _UNITS[-1]:
            break
        count /= 1000
    return f"{count:.0f} {unit}" if unit == "bytes" or count >= 100 else f"{count:.3g} {unit}"


def console(*, stderr: bool = False) -> Console:
    """Give a console that reads no markup and no emoji names, and colours on a terminal alone."""
    from rich.console import Console

    terminal = (sys.stderr if stderr else sys.stdout).isatty()
    return Console(
        stderr=stderr, markup=False, emoji=False, highlight=False, width=None if terminal else 100_000
    )
