"""Many short requests (target 1): what recording adds where requests end all the time.

Requests of a few tokens, some at a time, as fast as they go: drained, by a `Recorder` without a log, and by
one with a log, whose commits they wait for. Measured is CPU time.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.frames import BODY, PATH
from benchmarks.measure import Row, in_turn, median_ratio
from benchmarks.server import engine
from benchmarks.streaming import httpx_client
from rollout_log.log import Log
from rollout_log.record import Recorder

__all__ = ["rows"]

TOKENS = 3
AT_ONCE = 8
REQUESTS = 1024


async def drain(url: str, requests: int) -> None:
    """Read so many responses, and throw them away."""
    async with httpx_client() as client:

        async def some(_: int) -> None:
            for _ in range(requests // AT_ONCE):
                async with client.stream("POST", url, json=BODY) as response:
                    async for _ in response.aiter_raw():
                        pass

        await client.get(f"{url.partition(PATH)[0]}/turn?turn=short")
        await asyncio.gather(*map(some, range(AT_ONCE)))


async def record(log: Log | None, url: str, requests: int) -> None:
    """Generate for so many samples."""
    async with httpx_client() as client, Recorder(log, client) as recorder:

        async def some(place: int) -> None:
            for number in range(requests // AT_ONCE):
                await recorder.generate(f"{place}-{number}-{time.monotonic_ns()}", url, BODY)

        await client.get(f"{url.partition(PATH)[0]}/turn?turn=short")
        await asyncio.gather(*map(some, range(AT_ONCE)))


def rows(*, quick: bool = False) -> Iterator[Row]:
    """Measure what a short request costs."""
    requests = AT_ONCE if quick else REQUESTS
    with (
        engine() as address,
        tempfile.TemporaryDirectory() as folder,
        Log.open(Path(folder) / "log") as log,
    ):
        url = f"{address}{PATH}?tokens={TOKENS}&chunk=1&rate=100000&turn=short"
        drained, off, on = in_turn(
            1 if quick else 5,
            lambda: asyncio.run(drain(url, requests)),
            lambda: asyncio.run(record(None, url, requests)),
            lambda: asyncio.run(record(log, url, requests)),
        )
    what = f"requests of {TOKENS} tokens, {AT_ONCE} at a time"
    yield Row("1", f"log off, {what}", "draining", median_ratio(off, drained))
    yield Row("1", f"recording, {what}", "draining", median_ratio(on, drained))
