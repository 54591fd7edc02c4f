"""Watch a log being written: what runs, how fast, and what becomes of it.

On a terminal it is a view that is renewed until Ctrl-C; elsewhere, or with --json, a line for each thing
that happens: a sample's end, a retry, a resumption. A sample that failed or was aborted "so far" may be
retried or resumed.

Example:

    rollout-log tail runs/today
    rollout-log tail runs/today --json | jq 'select(.what == "aborted")'
"""

from __future__ import annotations

import signal
import sys
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated

import typer

from rollout_log.cli._arguments import JsonLines, LogPath
from rollout_log.cli._output import console, print_json, safe
from rollout_log.cli._times import duration, time_of_day
from rollout_log.counting import several
from rollout_log.errors import NotALog
from rollout_log.sources import open_source
from rollout_log.watching import Glance, Happening, Watcher

if TYPE_CHECKING:
    from rich.console import RenderableType

_SHARE = 0.2
"""Of the time that looking may take: a long listing is renewed less often."""
_BAD = {"aborted", "failed", "retry"}


def run(
    log: LogPath,
    *,
    every: Annotated[float, typer.Option(metavar="SECONDS", min=0.05, help="How often to look.")] = 1.0,
    json: JsonLines = False,
) -> None:
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends as Ctrl-C does
    with open_source(log) as reader:
        if log.is_file():
            raise NotALog(f"{log} is a fixture, which does not grow; `rollout-log ls` lists it")
        watcher = Watcher(reader)
        try:
            if json or not sys.stdout.isatty():
                _look(watcher, every, _write_json if json else _LineWriter())
            else:
                _show(watcher, every, str(log))
        except KeyboardInterrupt:
            return


def _look(watcher: Watcher, every: float, take: Callable[[Glance], None]) -> None:
    """Look until interrupted."""
    while True:
        began = time.monotonic()
        take(watcher.look())
        took = time.monotonic() - began
        time.sleep(max(every - took, took / _SHARE - took, 0.0))


def _write_json(glance: Glance) -> None:
    print_json(*glance.happened)
    sys.stdout.flush()


class _LineWriter:
    """Writes how things stand, and from then on what happens."""

    def __init__(self) -> None:
        self._began = False

    def __call__(self, glance: Glance) -> None:
        if not self._began:
            print(_headline(glance))
            self._began = True
        for happening in glance.happened:
            print(_line(happening))
        sys.stdout.flush()


def _line(happening: Happening) -> str:
    detail = f" ({safe(happening.detail)})" if happening.detail else ""
    when = time_of_day(happening.unix_ns)
    return (
        f"{when} {safe(happening.name)} {safe(happening.what)}{detail}, {several(happening.tokens, 'token')}"
    )


def _show(watcher: Watcher, every: float, title: str) -> None:
    from rich.live import Live

    out = console()
    latest: deque[Happening] = deque(maxlen=200)
    last: Glance | None = None
    with Live(console=out, screen=True, auto_refresh=False) as live:

        def take(glance: Glance) -> None:
            nonlocal last
            last = glance
            latest.extend(glance.happened)
            live.update(_view(glance, latest, title, out.width, out.height), refresh=True)

        with suppress(KeyboardInterrupt):
            _look(watcher, every, take)
    if last is not None:  # the view's screen is gone; leave its first line
        print(_headline(last))


def _view(glance: Glance, latest: deque[Happening], title: str, width: int, height: int) -> RenderableType:
    """Lay out the view: the headline, as many streams as fit, and the last things that happened."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    room = max(height - 6, 2)
    below = min(len(latest), max(room // 3, 1))
    streams = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    streams.add_column("running", overflow="ellipsis", no_wrap=True, max_width=max(width - 56, 10))
    for name in ("step", "tokens", "a second", "for", "requests"):
        streams.add_column(name, justify="right", no_wrap=True)
    streams.add_column("cause", no_wrap=True)
    for one in glance.running[: room - below]:
        streams.add_row(
            Text(safe(one.name)),
            "" if one.step is None else str(one.step),
            f"{one.tokens:,}",
            f"{one.tokens_per_second:,.0f}",
            duration(one.seconds),
            str(one.requests),
            Text(safe(one.cause)),
        )
    more = len(glance.running) - (room - below)
    lines = [
        Text(_line(happening), "red" if happening.what in _BAD else "dim", no_wrap=True, overflow="ellipsis")
        for happening in list(latest)[len(latest) - below :]
    ]
    return Group(
        Text(safe(title), "bold", no_wrap=True, overflow="ellipsis"),
        Text(_headline(glance), no_wrap=True, overflow="ellipsis"),
        Text(""),
        streams,
        Text(f"and {more:,} more" if more > 0 else "", "dim"),
        *lines,
    )


def _headline(glance: Glance) -> str:
    statuses = ", ".join(f"{count:,} {status}" for status, count in glance.statuses.items())
    counts = several(glance.samples, "sample") + (f": {statuses}" if statuses else "")
    rate = f"{glance.tokens_per_second:,.0f} tokens a second" if glance.running else "nothing is running"
    return f"{counts}; {rate}"
