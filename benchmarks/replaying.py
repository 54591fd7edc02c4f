"""Replay (target 7): reading a recording inside the client, and from the server in another process.

How fast a server can be at all for a Python client is shown by a bare one: it has the bytes of its answer,
HTTP chunks and all, ready before it is asked, and writes them in one go.
"""

from __future__ import annotations

import asyncio
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager, suppress
from pathlib import Path

import httpx
import msgspec

from benchmarks.frames import BODY, PATH, chunks
from benchmarks.measure import Row, median_ratio
from benchmarks.server import engine
from rollout_log.log import Log
from rollout_log.record.samples import Samples
from rollout_log.replay import ReplayTransport, serve_replay

__all__ = ["rows"]

TOKENS = 4096
PACE = 2000
"""Events a second of the live stream: each is a read of its own, as from an engine."""


def record(path: Path, samples: int) -> None:
    """Write samples of one event a read, each with a prompt of its own."""
    with Log.open(path, durability="window") as log:
        live = Samples(log)
        for place in range(samples):
            body = {**BODY, "token_ids": [place, *BODY["token_ids"]]}  # type: ignore[misc]
            exchange = live.request(f"sample-{place}", path=PATH, body=msgspec.json.encode(body))
            exchange.respond(200, [("content-type", "text/event-stream")])
            for chunk in chunks(1, TOKENS):
                exchange.feed(chunk)
            exchange.end("eof")


async def read(client: httpx.AsyncClient, url: str, place: int) -> int:
    """Read one stream; return its bytes."""
    body = {**BODY, "token_ids": [place, *BODY["token_ids"]]}  # type: ignore[misc]
    size = 0
    async with client.stream("POST", url, json=body) as response:
        response.raise_for_status()
        async for chunk in response.aiter_raw():
            size += len(chunk)
    return size


async def transport(path: Path, live_url: str, runs: int) -> float:
    """Return CPU of reading live over loopback ÷ that of reading the recording."""
    async with httpx.AsyncClient(timeout=None, trust_env=False) as live:
        replayed, streamed = [], []
        for _ in range(runs + 1):
            async with httpx.AsyncClient(transport=ReplayTransport(path)) as client:
                await read(client, f"http://engine{PATH}", 1)  # the first request reads the log
                start = time.process_time()
                await read(client, f"http://engine{PATH}", 0)
                replayed.append(time.process_time() - start)
            start = time.process_time()
            await read(live, f"{live_url}{PATH}?tokens={TOKENS}&chunk=1&rate={PACE}", 0)
            streamed.append(time.process_time() - start)
    return median_ratio(streamed[1:], replayed[1:])


@contextmanager
def server(*arguments: str) -> Iterator[str]:
    """Run this module as a server in another process; yields its URL."""
    command = [sys.executable, "-m", "benchmarks.replaying", *arguments]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield process.stdout.readline().strip()
    finally:
        process.communicate()


async def answer_at_once(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answer every request of a connection with the same stream."""
    frames = [b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks(1, TOKENS)]
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
    answer = b"".join([head, *frames, b"0\r\n\r\n"])
    with suppress(asyncio.IncompleteReadError):
        while True:
            asked = await reader.readuntil(b"\r\n\r\n")
            await reader.readexactly(int(asked.lower().partition(b"content-length: ")[2].split(b"\r\n")[0]))
            writer.write(answer)
            await writer.drain()
    writer.close()


async def rate(url: str, samples: int) -> float:
    """Return events a second that a client gets that drains many streams at once."""
    async with httpx.AsyncClient(timeout=None, trust_env=False) as client:
        await read(client, url, samples)
        start = time.monotonic()
        await asyncio.gather(*(read(client, url, place) for place in range(samples)))
        return samples * TOKENS / (time.monotonic() - start)


async def main(log: str | None) -> None:
    """Serve until standard input is closed: a log, or the bare server's answer."""
    async with AsyncExitStack() as stack:
        if log is None:
            bare = await stack.enter_async_context(await asyncio.start_server(answer_at_once, "127.0.0.1", 0))
            url = f"http://127.0.0.1:{bare.sockets[0].getsockname()[1]}"
        else:
            url = (await stack.enter_async_context(serve_replay(log))).url
        print(url, flush=True)
        await asyncio.to_thread(sys.stdin.read)


def rows(*, quick: bool = False) -> Iterator[Row]:
    """Measure target 7."""
    samples = 2 if quick else 16
    with engine() as url, tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        record(log, samples + 1)
        faster = asyncio.run(transport(log, url, 1 if quick else 7))
        yield Row(
            "7",
            "reading from the replay transport, times faster",
            "live over loopback",
            faster,
            5.0,
            at_least=True,
        )

        replayed, bare = [], []
        for _ in range(1 if quick else 5):
            with server(str(log)) as replay_url:
                replayed.append(asyncio.run(rate(f"{replay_url}{PATH}", samples)))
            with server() as bare_url:
                bare.append(asyncio.run(rate(f"{bare_url}{PATH}", samples)))
        what = "replay server to one draining httpx client"
        replay, most = statistics.median(replayed), statistics.median(bare)
        yield Row("7", what, "wall clock", replay, 50_000, "events/s", at_least=True)
        yield Row(
            "7",
            "bare asyncio server, the same bytes at once, same client",
            "wall clock",
            most,
            unit="events/s",
        )
        yield Row("7", what, "bare asyncio server", replay / most)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:] or [None]))
