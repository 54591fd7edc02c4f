"""Clients that take for ever: to send a request, to send the next one, to read. Others do not notice."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import httpx
import pytest

from raw_server import EVENT_STREAM
from recorded import PATH, frame
from replay.memory import MemoryLog
from replay.streams import VLLM, body, sample
from rollout_log.http_server import Request, Responder, Server, serve
from rollout_log.log import Log, LogReader
from rollout_log.record import proxy as proxying
from rollout_log.replay import server as replaying

HEAD = b"POST /generate HTTP/1.1\r\nhost: x\r\n"
SOON = {"arrival_s": 0.2, "stall_s": 0.3}
LATER = {"arrival_s": 0.6, "stall_s": 0.8}
"""Where other clients are not to be hit by it on a machine that is busy."""
WAIT = 30
"""Seconds after which nothing comes any more."""


async def echo(request: Request, responder: Responder) -> None:
    await responder.answer(200, request.body)


async def endless(request: Request, responder: Responder) -> None:
    await responder.start(200)
    while True:
        responder.send(b"x" * 65536)
        await responder.drain()


async def trickle(server: Server, sent: bytes) -> bytes:
    """Send byte by byte until the server has had enough; return what it says."""
    reader, writer = await asyncio.open_connection(server.host, server.port)
    with contextlib.suppress(ConnectionError):
        for at in range(len(sent)):
            if reader.at_eof() or reader._buffer:
                break
            writer.write(sent[at : at + 1])
            await asyncio.sleep(0.005)
    said = await asyncio.wait_for(reader.read(), WAIT)
    writer.close()
    return said


async def read_nothing(server: Server, request: bytes) -> None:
    """Ask, and read nothing of the answer until the server has closed its side."""
    with socket.create_connection((server.host, server.port)) as client:
        client.sendall(request)
        ours, theirs = client.getsockname()[1], server.port
        while is_open(theirs, ours):  # noqa: ASYNC110 - the kernel has no event for it
            await asyncio.sleep(0.02)


def is_open(port: int, peer: int) -> bool:
    """Whether this machine has a socket on `port` that is connected to `peer` and not closed by its owner."""
    lines = (line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:])
    ends = ((int(line[1][-4:], 16), int(line[2][-4:], 16), line[3]) for line in lines)
    return (port, peer, "01") in ends


@contextlib.asynccontextmanager
async def nothing_left() -> AsyncIterator[None]:
    """As many tasks and files at the end as at the beginning."""

    def left() -> tuple[int, int]:
        gc.collect()
        return len(asyncio.all_tasks()), sum(1 for _ in Path("/proc/self/fd").iterdir())

    before = left()
    yield
    while not all(now <= then for now, then in zip(left(), before, strict=True)):  # noqa: ASYNC110 - no event
        await asyncio.sleep(0.02)


async def beside(slow: list[Awaitable[object]], ask: Callable[[], Awaitable[httpx.Response]]) -> list:
    """Ask again and again while slow clients are served, and see each answer come."""
    waiting = asyncio.gather(*slow)
    while not waiting.done():
        for _ in range(100):
            with contextlib.suppress(httpx.TransportError):  # so busy a machine that we are slow ourselves
                if (await ask()).status_code == 200:
                    break
        else:
            raise AssertionError("there is no answer beside slow clients")
        await asyncio.sleep(0.05)
    return await waiting


@pytest.mark.parametrize(
    "sent",
    [HEAD + b"x-slow: " + b"a" * 5000, HEAD + b"content-length: 5000\r\n\r\n" + b"a" * 5000],
    ids=["headers", "body"],
)
async def test_a_request_that_comes_byte_by_byte_is_refused_in_time(sent):
    async with nothing_left(), serve(echo, **LATER) as server, httpx.AsyncClient() as client:

        def ask() -> Awaitable[httpx.Response]:
            return client.post(server.url, content=b"x")

        await ask()
        answers = await beside([trickle(server, sent) for _ in range(20)], ask)
    assert {answer.partition(b"\r\n")[0] for answer in answers} == {b"HTTP/1.1 408 Request Timeout"}
    assert b"did not arrive within 1 s" in answers[0]


async def ask_at_once(server: Server, sent: bytes) -> bytes:
    """Send all there is before the server can look; return what it says until it closes."""
    with socket.create_connection((server.host, server.port)) as client:
        client.sendall(sent)
        reader, writer = await asyncio.open_connection(sock=client)
        said = await asyncio.wait_for(reader.read(), WAIT)
        writer.close()
        return said


async def test_a_request_that_is_large_may_take_longer():
    """A second for each 100 kB that have come."""
    async with serve(echo, arrival_s=0.0) as server:
        reader, writer = await asyncio.open_connection(server.host, server.port)
        writer.write(HEAD + b"connection: close\r\ncontent-length: 20000000\r\n\r\n" + b"x" * 20_000_000)
        assert (await reader.read()).endswith(b"\r\n\r\n" + b"x" * 20_000_000)
        writer.close()


async def test_a_connection_that_is_not_used_is_closed():
    async with serve(echo, **SOON) as server, nothing_left():
        assert (await ask_at_once(server, HEAD + b"content-length: 1\r\n\r\nx")).endswith(b"\r\n\r\nx")
        assert await ask_at_once(server, b"") == b""


async def test_a_handler_takes_as_long_as_it_takes():
    async def slow(request: Request, responder: Responder) -> None:
        await asyncio.sleep(1.0)
        await responder.answer(200, b"late")

    async with serve(slow, **SOON) as server:
        assert (await ask_at_once(server, HEAD + b"content-length: 0\r\n\r\n")).endswith(b"late")


@pytest.mark.parametrize("kind", ["endless", "cut", "finished"])
async def test_a_client_that_reads_nothing_counts_as_gone(kind):
    async def handler(request: Request, responder: Responder) -> None:
        if kind == "endless":
            await endless(request, responder)
        await responder.start(200, [("content-length", "100000000"), ("connection", "close")])
        responder.send(b"x" * 100_000_000)
        if kind == "cut":
            responder.cut()
        else:
            await responder.finish()

    async with serve(handler, **SOON) as server, nothing_left():
        await asyncio.wait_for(read_nothing(server, HEAD + b"content-length: 0\r\n\r\n"), WAIT)


class Flood:
    """An engine whose streams under the key `flood` never end; it counts those that run."""

    def __init__(self) -> None:
        self.open = 0

    async def __call__(self, request: Request, responder: Responder) -> None:
        self.open += 1
        try:
            await responder.start(200, EVENT_STREAM)
            if json.loads(request.body)["token_ids"] == [1, 2]:
                responder.send(frame(11, finish="stop"))
                await responder.finish()
            while not responder.over:
                responder.send(frame(*range(1000)))
                await responder.drain()
        finally:
            self.open -= 1


async def test_slow_clients_of_the_proxy_leave_the_others_and_the_engine_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(proxying, "serve", functools.partial(serve, **LATER))
    engine, log = Flood(), Log.open(tmp_path / "log", window_ms=10)
    flood = json.dumps({"token_ids": [7], "sampling_params": {}}).encode()
    head = f"POST {PATH} HTTP/1.1\r\nhost: x\r\nx-rollout-log-key: flood\r\n".encode()
    asked = head + b"content-length: %d\r\n\r\n" % len(flood) + flood
    async with (
        serve(engine) as upstream,
        proxying.serve_proxy(log, upstream.url) as proxy,
        httpx.AsyncClient() as client,
    ):

        def ask() -> Awaitable[httpx.Response]:
            return client.post(proxy.url + PATH, json={"token_ids": [1, 2]})

        slow = [trickle(proxy, asked[:-1] + b" " * 5000) for _ in range(5)]
        slow += [trickle(proxy, head + b"x: " + b"a" * 5000) for _ in range(5)]
        await beside([*slow, *(read_nothing(proxy, asked) for _ in range(3))], ask)
        while engine.open:  # noqa: ASYNC110 - counted by the engine
            await asyncio.sleep(0.01)
    log.close()
    with LogReader.open(tmp_path / "log") as reader:
        ends = {entry.summary.status for entry in reader.samples(key_prefix="flood")}
    assert ends == {"aborted"}


async def test_slow_clients_of_the_stand_in_engine_leave_the_others_alone(monkeypatch):
    monkeypatch.setattr(replaying, "serve", functools.partial(serve, **LATER))
    log = MemoryLog()
    for number in range(2000):
        sample(log, f"k{number}", [number // 256, number % 256], [1, 2])
    asked = iter(range(2000))
    async with replaying.serve_replay(log) as server, httpx.AsyncClient(base_url=server.url) as client:
        address = Server("127.0.0.1", int(server.url.rpartition(":")[2]))

        def ask() -> Awaitable[httpx.Response]:
            number = next(asked)
            return client.post(VLLM, json=body([number // 256, number % 256], 2))

        await beside([trickle(address, HEAD + b"x: " + b"a" * 5000) for _ in range(10)], ask)
        assert not server.desk.playing
