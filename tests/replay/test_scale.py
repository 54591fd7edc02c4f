"""Many at once: identical requests, more streams than connections, cancels; nothing is left over."""

from __future__ import annotations

import asyncio
import gc
import random
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import httpx
import pytest

from replay.memory import MemoryLog
from replay.streams import VLLM, body, sample, tokens_of, whole
from rollout_log.replay import ReplayMiss, ReplayTransport, serve_replay

aiohttp = pytest.importorskip("aiohttp")
PROMPT = [7, 8, 9]


def eight(log: MemoryLog) -> None:
    for number in range(8):
        sample(log, f"k{number}", PROMPT, [100 + number, 1, 2, 3])


async def ask(client: httpx.AsyncClient, order: random.Random) -> list[int]:
    for _ in range(order.randrange(5)):
        await asyncio.sleep(0)
    return tokens_of((await client.post(VLLM, json=body(PROMPT, 4))).content)


@pytest.mark.parametrize("seed", range(5))
async def test_eight_identical_requests_and_a_ninth_without_a_socket(seed):
    log = MemoryLog()
    eight(log)
    async with httpx.AsyncClient(transport=ReplayTransport(log), base_url="http://engine") as client:
        answers = await asyncio.gather(*(ask(client, random.Random(seed * 8 + i)) for i in range(8)))
        assert sorted(answers) == [[100 + number, 1, 2, 3] for number in range(8)]
        with pytest.raises(ReplayMiss, match="no recording is left"):
            await client.post(VLLM, json=body(PROMPT, 4))


async def test_eight_identical_requests_and_a_ninth_through_the_server():
    log = MemoryLog()
    eight(log)
    async with serve_replay(log) as server, httpx.AsyncClient(base_url=server.url) as client:
        answers = await asyncio.gather(*(ask(client, random.Random(i)) for i in range(8)))
        assert sorted(answers) == [[100 + number, 1, 2, 3] for number in range(8)]
        ninth = await client.post(VLLM, json=body(PROMPT, 4))
        assert ninth.status_code == 404
        assert "no recording is left" in ninth.json()["error"]["message"]
    assert server.report().unused == []
    assert len(server.report().misses) == 1


async def test_512_streams_on_100_connections():
    log = MemoryLog()
    for number in range(512):
        sample(log, f"k{number}", [number], [number + 1, number + 2])
    connector = aiohttp.TCPConnector(limit=100)
    async with serve_replay(log) as server, aiohttp.ClientSession(server.url, connector=connector) as client:

        async def ask(number: int) -> list[int]:
            async with client.post(VLLM, json=body([number], 2)) as response:
                return tokens_of(await response.read())

        answers = await asyncio.gather(*(ask(number) for number in range(512)))
        assert answers == [[number + 1, number + 2] for number in range(512)]
        assert not server.desk.playing
    assert server.report() == ([], [], [])


async def consume_httpx(client: httpx.AsyncClient, number: int, begun: set[int]) -> None:
    async with client.stream("POST", VLLM, json=request(number)) as response:
        async for _ in response.aiter_raw():
            begun.add(number)


async def consume_aiohttp(client: Any, number: int, begun: set[int]) -> None:
    async with client.post(VLLM, json=request(number)) as response:
        async for _ in response.content.iter_any():
            begun.add(number)


def request(number: int) -> dict[str, Any]:
    return body([number // 256, number % 256], 4)


async def until(holds: Callable[[], bool]) -> None:
    """Wait for something that other tasks do; half a minute is for ever."""
    deadline = asyncio.get_running_loop().time() + 30
    while not holds():
        assert asyncio.get_running_loop().time() < deadline
        await asyncio.sleep(0.001)


async def cancel_all(consume: Callable[..., Any], client: Any, numbers: Iterable[int]) -> None:
    """Begin a stream each, and cancel it in mid-stream; every other one twice."""
    begun: set[int] = set()
    tasks = {number: asyncio.create_task(consume(client, number, begun)) for number in numbers}
    await until(lambda: len(begun) == len(tasks))
    for number, task in tasks.items():
        task.cancel()
        if number % 2:
            await asyncio.sleep(0)
            task.cancel()
    ended = await asyncio.gather(*tasks.values(), return_exceptions=True)
    assert {type(each) for each in ended} == {asyncio.CancelledError}


def thousand() -> MemoryLog:
    """Samples that their client left after two tokens."""
    log = MemoryLog()
    for number in range(1000):
        prompt = [number // 256, number % 256]
        chunks = whole([1, 2, 3, 4], 2, name=f"generate-tokens-{number}")[:2]
        sample(log, f"k{number}", prompt, [], chunks=chunks, end="cancelled", max_tokens=4)
    return log


def sockets() -> int:
    """Sockets this process has open."""
    found = 0
    for path in Path("/proc/self/fd").iterdir():
        try:
            found += str(path.readlink()).startswith("socket:")
        except OSError:
            continue
    return found


async def test_a_thousand_cancels_without_a_socket():
    transport = ReplayTransport(thousand())
    before = sockets()
    async with httpx.AsyncClient(transport=transport, base_url="http://engine") as client:
        await cancel_all(consume_httpx, client, range(1000))
        assert sockets() == before, "no socket is ever opened"
        assert not transport.desk.playing
        gc.collect()
        assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_a_thousand_cancels_through_the_server():
    log = thousand()
    before = sockets()
    connector = aiohttp.TCPConnector(limit=0)
    async with serve_replay(log) as server:
        async with aiohttp.ClientSession(server.url, connector=connector) as client:
            for first in range(0, 1000, 250):
                await cancel_all(consume_aiohttp, client, range(first, first + 250))
            await until(lambda: not server.desk.playing)
        assert server.report() == ([], [], [])
    gc.collect()
    assert sockets() == before
    assert asyncio.all_tasks() == {asyncio.current_task()}
