"""record(replay(x)) = x: every byte, every split, every end, through the transport and through the server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from itertools import islice

import httpx
import pytest

import cases
from replay.exchanges import CAPTURES, essence, record_capture, record_case
from replay.memory import MemoryLog
from rollout_log.events import Ended, Reads, Requested
from rollout_log.record import RecordingTransport
from rollout_log.replay import ReplayTransport, serve_replay
from rollout_log.replay.recording import read_exchanges

Way = Callable[[MemoryLog, MemoryLog], AbstractAsyncContextManager[httpx.AsyncClient]]


@asynccontextmanager
async def through_transport(source: MemoryLog, into: MemoryLog) -> AsyncIterator[httpx.AsyncClient]:
    transport = RecordingTransport(into, ReplayTransport(source))  # type: ignore[arg-type]
    async with httpx.AsyncClient(transport=transport, base_url="http://engine") as client:
        yield client


@asynccontextmanager
async def through_server(source: MemoryLog, into: MemoryLog) -> AsyncIterator[httpx.AsyncClient]:
    async with serve_replay(source, cut="exact") as server:
        transport = RecordingTransport(into, httpx.AsyncHTTPTransport())  # type: ignore[arg-type]
        async with httpx.AsyncClient(transport=transport, base_url=server.url) as client:
            yield client


async def replay(source: MemoryLog, client: httpx.AsyncClient) -> None:
    """Send every recorded request again, and leave where the recorded client left."""
    for entry in source.samples():
        for exchange in read_exchanges(source, entry.ref, entry.name):
            headers = {"x-session-id": entry.name}
            extensions = {"rollout_log": {"key": entry.name}}
            got, error = b"", None
            try:
                async with client.stream(
                    "POST",
                    exchange.requested.path,
                    content=exchange.body,
                    headers=headers,
                    extensions=extensions,
                ) as response:
                    async for chunk in response.aiter_raw():
                        got += chunk
                        if exchange.ending == "left" and got == exchange.response:
                            break
            except httpx.TransportError as raised:
                error = type(raised).__name__
            assert error == exchange.error
            assert got == exchange.response


def compare(source: MemoryLog, into: MemoryLog) -> None:
    assert len(into.written) == len(source.written)
    for recorded, again in zip(source.written, into.written, strict=True):
        # A client that leaves does so with an exception of its own, or with none.
        assert essence(again) == essence(recorded)


@pytest.mark.parametrize("way", [through_transport, through_server])
async def test_every_capture(way):
    source, into = MemoryLog(), MemoryLog()
    for seed, name in enumerate(CAPTURES):
        record_capture(source, name, seed=seed)
    async with way(source, into) as client:
        await asyncio.wait_for(replay(source, client), 120)
    compare(source, into)
    assert len(source.written) == len(CAPTURES) == 144


@pytest.mark.parametrize("way", [through_transport, through_server])
@pytest.mark.parametrize("name", cases.names())
async def test_every_case(way, name):
    case = cases.load(name)
    # Every eighth way to cut a stream in two goes without a socket; through one, every 32nd does.
    step = 8 if way is through_transport else 32
    await replay_case(case, way, step)


@pytest.mark.campaign
@pytest.mark.parametrize("way", [through_transport, through_server])
@pytest.mark.parametrize("name", cases.names())
async def test_every_variant_of_every_case(way, name):
    await replay_case(cases.load(name), way, step=1)


async def replay_case(case: cases.Case, way: Way, step: int) -> None:
    source, into = MemoryLog(), MemoryLog()
    for number, streams in enumerate(islice(case.variants(), 0, None, step)):
        record_case(source, f"k{number}", case, streams)
    async with way(source, into) as client:
        await asyncio.wait_for(replay(source, client), 600)
    compare(source, into)


def test_a_killed_recorder_leaves_splits_for_what_it_wrote_down():
    source = MemoryLog()
    record_capture(source, "a1-plain-length")
    (events,) = source.written
    whole = read_exchanges(source, 0, "k")[0]
    source.written[0] = [event for event in events if not isinstance(event, Reads | Ended)]
    cut = read_exchanges(source, 0, "k")[0]
    assert cut.ending == "left"
    assert b"".join(read.data for read in cut.reads) == cut.response == whole.response
    assert [read.data for read in cut.reads] == [frame.wire for frame in cut.frames]
    assert [read.time for read in cut.reads] == [frame.time for frame in cut.frames]


def test_the_body_of_a_resumed_request_is_whole_again():
    source = MemoryLog()
    case = cases.load("resume-after-abort")
    record_case(source, "k", case, next(case.variants()))
    exchanges = read_exchanges(source, 0, "k")
    requested = [event for event in source.written[0] if isinstance(event, Requested)]
    assert [event.ids_at > 0 for event in requested] == [True] * len(exchanges)
    assert [exchange.info.token_ids for exchange in exchanges] == [
        request["body"]["token_ids"] for request in case.requests
    ]
