"""What recording adds to a process that reads many streams at once (targets 1 and 3).

Clients of several kinds hold the same number of streams each, from a paced server in another process that
serves one kind at a time: `drain` throws the bytes away, `typed` first splits them at blank lines and decodes
every frame with typed msgspec, `off` is a `Recorder` without a log, `on` one with a log. They take short
turns, many times, so that the machine's moods hit all alike. Measured is CPU time ÷ tokens that came.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx

from benchmarks.frames import BODY, PATH, chunks, decode
from benchmarks.measure import Row
from benchmarks.server import engine
from rollout_log.log import Log
from rollout_log.record import Recorder

STREAMS = 512
RATES = {1: 10.0, 4: 5.0, 16: 2.5, 40: 2.5}
"""Chunks a second and stream, by events a chunk: as fast as they still come as reads of their own."""
ENDS = (0, 20)
"""Request ends a second. With some hundred httpx's pool of connections takes a core for itself: for each
request it looks at all connections for each idle one."""
TURN_S = 4.0
"""Long enough for what is folded late to be folded many at a time; at a turn's end all of it is."""
SETTLE_S = 0.6
"""Before a turn counts: the window of a log that the turn before filled, and its commit."""
TURNS = 5
KINDS = ("drain", "off", "on")
PLAIN = ("drain", "typed")
"""Those that record nothing."""


class Clients:
    """Streams of one kind, each followed by another when it ends."""

    def __init__(self, kind: str, client: httpx.AsyncClient, url: str, log: Log) -> None:
        self.kind = kind
        self.costs: list[float] = []
        """CPU seconds per token, of each turn."""
        self.stopped = False
        self._client = client
        self._url = url
        self._bytes = 0
        self._recorder = Recorder(log if kind.startswith("on") else None, client)

    async def stream(self, name: str, each: int, usual: int, rate: float) -> None:
        """Read one stream of `usual` tokens after the other; the first is shorter, which spreads the ends."""
        tokens = random.randint(1, usual)
        while not self.stopped:  # a cancellation after the finish returns the finished sample
            url = f"{self._url}{PATH}?tokens={tokens}&chunk={each}&rate={rate}&turn={self.kind}"
            tokens = usual
            if self.kind not in PLAIN:
                await self._recorder.generate(f"{name}-{time.monotonic_ns()}", url, BODY)
                continue
            async with self._client.stream("POST", url, json=BODY) as response:
                async for chunk in response.aiter_raw():
                    self._bytes += len(chunk)
                    if self.kind == "typed":
                        for frame in chunk.split(b"\n\n"):
                            if frame.startswith(b"data: {"):
                                decode(frame[6:])

    async def turn(self, each: int, seconds: float, settle: float) -> None:
        """Take a turn, and note what it cost."""
        await self._client.get(f"{self._url}/turn?turn={self.kind}")
        await asyncio.sleep(settle)
        self.take()
        before, start = self.tokens(each), time.process_time()
        await asyncio.sleep(seconds)
        self.take()
        used, came = time.process_time() - start, self.tokens(each) - before
        self.costs.append(used / max(came, 1))

    def tokens(self, each: int) -> float:
        """How many came so far."""
        if self.kind in PLAIN:
            return self._bytes / len(chunks(each)[0]) * each
        live = self._recorder.samples._live.values()
        return sum(request.deltas for sample in live for request in sample.rollout.requests)

    def take(self) -> None:
        """Fold what waits for it, so that it counts where it came."""
        for sample in self._recorder.samples._live.values():
            if sample.exchange is not None:
                sample.exchange.take()


@contextlib.asynccontextmanager
async def httpx_client() -> AsyncIterator[httpx.AsyncClient]:
    """The client that trainers use."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(limits=limits, timeout=None, trust_env=False) as client:
        yield client


@contextlib.asynccontextmanager
async def aiohttp_client() -> AsyncIterator[httpx.AsyncClient]:
    """The same client over another transport (extra `speed`)."""
    from httpx_aiohttp import HttpxAiohttpClient

    # None would be 100 here, aiohttp's own limit.
    limits = httpx.Limits(max_connections=1 << 16, max_keepalive_connections=None)
    async with HttpxAiohttpClient(limits=limits, timeout=None, trust_env=False) as client:
        yield client


Kinds = dict[str, Callable[[], Any]]
"""Kind -> what makes its client."""


class Bench:
    """One server and one log, for all measurements."""

    def __init__(self, url: str, log: Log, *, quick: bool) -> None:
        self.url = url
        self.log = log
        self.turns = 1 if quick else TURNS
        self.streams = 8 if quick else STREAMS
        self.seconds, self.settle = (0.1, 0.05) if quick else (TURN_S, SETTLE_S)
        self.rates = dict.fromkeys(RATES, 50.0) if quick else RATES

    async def take_turns(self, kinds: Kinds, each: int, ends: float = 0) -> dict[str, float]:
        """Return the median CPU seconds per token of each kind."""
        rate = self.rates[each]
        usual = max(int(self.streams * rate * each / ends), 1) if ends else 10**9
        async with contextlib.AsyncExitStack() as stack:
            clients = [
                Clients(kind, await stack.enter_async_context(client()), self.url, self.log)
                for kind, client in kinds.items()
            ]
            tasks = [
                asyncio.create_task(client.stream(f"{client.kind}-{place}", each, usual, rate))
                for client in clients
                for place in range(self.streams)
            ]
            for _ in range(self.turns + 1):
                for client in clients:
                    await client.turn(each, self.seconds, self.settle)
            for client in clients:
                client.stopped = True
            failed = [task for task in tasks if task.done()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            if failed:
                failed[0].result()
        return {client.kind: statistics.median(client.costs[1:]) for client in clients}

    def measure(self, kinds: Kinds, each: int, ends: float = 0) -> dict[str, float]:
        """As `take_turns`, in an event loop of its own."""
        return asyncio.run(self.take_turns(kinds, each, ends))


def rows(*, quick: bool = False) -> Iterator[Row]:
    """Measure targets 1 and 3."""
    with (
        engine() as url,
        tempfile.TemporaryDirectory() as folder,
        Log.open(Path(folder) / "log") as log,
    ):
        bench = Bench(url, log, quick=quick)
        yield from tax(bench)
        yield from transports(bench)


def tax(bench: Bench) -> Iterator[Row]:
    """Yield what recording adds to httpx."""
    kinds = dict.fromkeys(KINDS, httpx_client)
    for ends in ENDS:
        found = bench.measure(kinds, 1, ends)
        what = f"one event a read, {ends} request ends/s"
        yield Row("1", f"recording, {what}", "draining", found["on"] / found["drain"], 1.10)
        yield Row("1", f"log on, {what}", "log off", found["on"] / found["off"], 1.05)
    kinds["typed"] = httpx_client
    for each in (4, 16, 40):
        found = bench.measure(kinds, each)
        added = (found["on"] - found["drain"]) / (found["typed"] - found["drain"])
        yield Row("1", f"what recording adds, {each} events a chunk", "what typed decoding adds", added, 1.5)
        yield Row("1", f"recording, {each} events a chunk", "draining", found["on"] / found["drain"])
        yield Row("1", f"log on, {each} events a chunk", "log off", found["on"] / found["off"], 1.15)


def transports(bench: Bench) -> Iterator[Row]:
    """Yield recording over faster transports, against draining over httpx's own."""
    try:
        import httpx_aiohttp  # noqa: F401 - asked for only here
        import uvloop
    except ImportError:
        print("target 3 is left out: pip install 'rollout-log[speed]'")
        return

    for each in (1, 16):
        events = "one event a read" if each == 1 else f"{each} events a chunk"
        kinds = {"drain": httpx_client, "on": httpx_client, "on aiohttp": aiohttp_client}
        plain = bench.measure(kinds, each)
        yield Row("3", f"httpx-aiohttp, {events}", "draining", plain["on aiohttp"] / plain["drain"], 0.85)
        fast = uvloop.run(bench.take_turns(kinds, each))
        # Two loops cannot take turns, so the one goes before and after the other.
        again = bench.measure(kinds, each)
        drain = (plain["drain"] + again["drain"]) / 2
        yield Row("3", f"uvloop, {events}", "draining", fast["on"] / drain)
        yield Row("3", f"httpx-aiohttp and uvloop, {events}", "draining", fast["on aiohttp"] / drain, 0.6)
