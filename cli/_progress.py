"""Progress of long work: a bar on a terminal, nothing in a pipe."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import TypeVar

from rollout_log.cli._output import console

__all__ = ["progress"]

T = TypeVar("T")


def progress(what: str, items: Iterable[T], total: int | None) -> Iterator[T]:
    """Yield the items; stderr shows how many have come, if it is a terminal."""
    if not sys.stderr.isatty():
        yield from items
        return
    from rich.progress import track

    yield from track(items, what, total, transient=True, console=console(stderr=True))
