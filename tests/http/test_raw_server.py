"""The stand-in plays what it is given, piece by piece, to its end."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from raw_server import EVENT_STREAM, RawStream, play
from rollout_log.http_server import Request


async def read(client: httpx.AsyncClient, url: str) -> tuple[int, list[bytes], str]:
    """Status, reads and the name of what ended the stream."""
    chunks: list[bytes] = []
    async with client.stream("POST", url, content=b"{}") as response:
        try:
            async for chunk in response.aiter_raw():
                chunks += [chunk]
        except httpx.TransportError as error:
            return response.status_code, chunks, type(error).__name__
    return response.status_code, chunks, "eof"


@pytest.mark.parametrize(
    ("end", "seen"), [("eof", "eof"), ("incomplete", "RemoteProtocolError"), ("reset", "ReadError")]
)
async def test_pieces_and_ends(end, seen):
    stream = RawStream(201, EVENT_STREAM, b"abcdef", reads=[1, 0, 2], end=end)
    async with play(stream) as engine, httpx.AsyncClient() as client:
        assert await read(client, engine.url) == (201, [b"a", b"bc", b"def"], seen)
    assert [request.body for request in engine.requests] == [b"{}"]
    assert engine.hung_up == []


async def test_a_hanging_stream_notices_that_the_client_leaves():
    async with play(RawStream(body=b"abc", end="hang")) as engine, httpx.AsyncClient() as client:
        async with client.stream("GET", engine.url) as response:
            assert await anext(response.aiter_raw()) == b"abc"
        await asyncio.wait_for(engine.left.wait(), 10)
    assert engine.hung_up == engine.requests


async def test_recorded_headers_are_played_without_the_old_framing():
    headers = [
        ("date", "Mon"),
        ("connection", "close"),
        ("Transfer-Encoding", "chunked"),
        ("content-length", "2"),
    ]
    async with play(RawStream(headers=headers, body=b"ok")) as engine, httpx.AsyncClient() as client:
        response = await client.get(engine.url)
    assert response.headers.multi_items() == [("date", "Mon"), ("content-length", "2")]


async def test_a_wire_is_played_to_the_byte():
    wire = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n5\r\nde"
    async with play(RawStream(None, body=wire), RawStream(None)) as engine, httpx.AsyncClient() as client:
        assert await read(client, engine.url) == (200, [b"abc", b"de"], "RemoteProtocolError")
        with pytest.raises(httpx.RemoteProtocolError, match="without sending a response"):
            await client.get(engine.url)


async def test_streams_in_order_then_500():
    async with play(RawStream(body=b"1"), RawStream(body=b"2")) as engine, httpx.AsyncClient() as client:
        bodies = [(await client.get(engine.url)).text for _ in range(3)]
    assert bodies == ["1", "2", "no stream is left to play"]


async def test_streams_by_choice():
    def choose(request: Request) -> RawStream:
        return RawStream(body=request.path.encode())

    async with play(choose=choose) as engine, httpx.AsyncClient() as client:
        assert (await client.get(engine.url + "/a")).text == "/a"
        assert (await client.get(engine.url + "/b")).text == "/b"
