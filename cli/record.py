"""Record whatever clients ask an engine for: a proxy between them.

Point the clients at the address it prints. Requests that generate tokens are recorded under the header
X-Rollout-Log-Key, else x-session-id, else a new key, which the response's X-Rollout-Log-Key tells; all
others are passed on. Ctrl-C or SIGTERM ends it with everything written.

Example:

    rollout-log record runs/today --upstream http://127.0.0.1:8000
    rollout-log record runs/today --upstream http://gpu7:8000 --listen 0.0.0.0:8900
"""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from typing import Annotated

import typer

from rollout_log.cli._arguments import address
from rollout_log.cli._output import safe
from rollout_log.counting import several
from rollout_log.http_server import check_address
from rollout_log.log import Durability, Log
from rollout_log.record.proxy import serve_proxy, upstream_url


def run(
    log: Annotated[Path, typer.Argument(metavar="LOG", help="The log, made where there is none.")],
    upstream: Annotated[str, typer.Option(metavar="URL", help="The engine or router to pass requests to.")],
    *,
    listen: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Where clients connect; port 0 takes a free one.")
    ] = "127.0.0.1:8900",
    name: Annotated[
        str | None, typer.Option("--run", help="The run's name; by default the log's directory.")
    ] = None,
    window_ms: Annotated[int, typer.Option(min=1, help="Commit at least this often.")] = 250,
    durability: Annotated[
        Durability,
        typer.Option(
            help="What the last chunk waits for: nothing (window), its commit for at most 100 ms (finish), "
            "or its commit for as long as that takes (strict)."
        ),
    ] = "finish",
) -> None:
    host, port = address(listen)
    try:
        upstream_url(upstream)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--upstream") from error
    asyncio.run(check_address(host, port))  # before a log is made, as the above
    with Log.open(log, run=name, window_ms=window_ms, durability=durability) as writer:
        asyncio.run(_record(writer, upstream, host, port, window_ms))
    counters = writer.counters
    print(f"wrote {several(counters.events, 'event')}, {several(counters.bytes, 'byte')} of batches")
    if counters.dropped_requests or counters.dropped_events:
        print(
            f"not recorded: {several(counters.dropped_requests, 'request')}, "
            + several(counters.dropped_events, "other event")
        )


async def _record(log: Log, upstream: str, host: str, port: int, window_ms: int) -> None:
    stopped = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    async with serve_proxy(log, upstream, host, port) as server:
        print(
            f"{server.url} passes on to {safe(upstream)} and records into {safe(log.path)}; "
            f"a kill loses at most the last {window_ms} ms and the commit under way",
            flush=True,
        )
        await stopped.wait()
