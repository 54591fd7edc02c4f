"""Serve recordings to clients, in the place of the engine.

Speaks vLLM's, SGLang's and OpenAI's endpoints, aborts and pauses included, on a loopback address unless
told otherwise. A request is matched by the header X-Rollout-Log-Key, else by what it means: token ids and
parameters. A stream that was aborted in the recording waits until its client aborts it (--at-cut). A
request that was not recorded is answered with 404 and the nearest recording. Ctrl-C or SIGTERM ends it,
says what was not asked for, and exits 1 if anything was asked for that was not recorded.

Example:

    rollout-log serve runs/today
    rollout-log serve fixtures/math.jsonl --listen 127.0.0.1:0 --pace recorded
    rollout-log serve runs/today --fault drop_after=20,rate=0.1,seed=3
    curl -X POST localhost:8901/_rollout_log/faults -d '{"status_500": 0.2}'
"""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Iterable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Annotated, Literal

import typer

from rollout_log.cli._arguments import address
from rollout_log.cli._output import safe
from rollout_log.counting import several
from rollout_log.replay.desk import pace_of
from rollout_log.replay.faults import Faults
from rollout_log.replay.matching import Report
from rollout_log.replay.server import ReplayServer, serve_replay

_SHOWN = 10
"""Names and messages that are printed of each kind."""


def run(
    sources: Annotated[
        list[Path], typer.Argument(metavar="SOURCE", help="Logs, directories of logs, or fixtures.")
    ],
    *,
    listen: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Where clients connect; port 0 takes a free one.")
    ] = "127.0.0.1:8901",
    pace: Annotated[
        str, typer.Option(help="Factor on the recorded waits: 0 for none; `recorded` is 1.")
    ] = "0",
    cut: Annotated[
        Literal["any", "exact"],
        typer.Option(help="Answer from any token a request goes on from, or only where a recorded one did."),
    ] = "any",
    at_cut: Annotated[
        Literal["hold", "go", "end"],
        typer.Option(
            help="Where a stream was aborted in the recording: wait for this client to do it, go on with "
            "what the next request got, or end as it did."
        ),
    ] = "hold",
    fault: Annotated[
        str | None,
        typer.Option(metavar="NAME=VALUE,…", help=f"What goes wrong: {', '.join(Faults.__struct_fields__)}."),
    ] = None,
    faults: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The same as a JSON object in a file.")
    ] = None,
) -> None:
    host, port = address(listen)
    try:
        factor = pace_of(pace)
    except ValueError:
        raise typer.BadParameter(
            f"{pace!r} is no number from 0 up, or recorded", param_hint="--pace"
        ) from None
    if fault is not None and faults is not None:
        raise typer.BadParameter("there is --fault as well", param_hint="--faults")
    wanted = Faults.load(faults) if faults is not None else None if fault is None else Faults.parse(fault)
    serving = serve_replay(sources, host=host, port=port, pace=factor, cut=cut, at_cut=at_cut, faults=wanted)
    report = asyncio.run(_serve(serving, sources))
    _print(report)
    if report.misses:
        raise typer.Exit(1)


async def _serve(serving: AbstractAsyncContextManager[ReplayServer], sources: list[Path]) -> Report:
    logging.basicConfig(format="%(message)s")
    logging.getLogger("rollout_log").setLevel(logging.INFO)  # also that a stream is held
    stopped = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    async with serving as server:
        recordings = server.desk.matcher.recordings
        endpoints = sorted({each.endpoint for each in recordings})
        print(
            f"{server.url} serves {several(len(recordings), 'sample')} of {', '.join(map(safe, sources))}"
            f" on {', '.join(map(safe, endpoints)) or 'no endpoint'}",
            flush=True,
        )
        await stopped.wait()
        return server.report()


def _print(report: Report) -> None:
    _print_some(f"never asked for: {several(len(report.unused), 'sample')}", map(repr, report.unused))
    partly = [f"{name!r} request {', '.join(map(str, numbers))}" for name, numbers in report.partly]
    _print_some(f"asked for in part: {several(len(partly), 'sample')}, without", partly)
    _print_some(f"asked for in vain: {several(len(report.misses), 'time')}", report.misses)


def _print_some(title: str, lines: Iterable[str]) -> None:
    shown = list(lines)
    if not shown:
        return
    print(title)
    for line in shown[:_SHOWN]:
        print("  " + safe(line))
    if len(shown) > _SHOWN:
        print(f"  … and {len(shown) - _SHOWN:,} more")
