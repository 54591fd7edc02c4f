"""The proxy: what goes in at one side comes out at the other, and the exchange hears of it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import struct
from dataclasses import dataclass, field

import h11
import httpx
import pytest

from captures import load, names
from raw_server import EVENT_STREAM, RawStream, captured, play
from rollout_log.http_server import Request, Responder, serve
from rollout_log.record.proxy import Proxy, serve_proxy

PATH = "/inference/v1/generate"
PASSED_BY = {"g15-get", "g15-get-router", "g16-no-such-path", "p6-chat-render", "p8-version"}
"""Captures of requests that generate nothing."""


@dataclass
class FakeExchange:
    """Writes down what it is told."""

    key: str
    request: dict
    settled: asyncio.Event
    calls: list = field(default_factory=list)
    reads: list[bytes] = field(default_factory=list)
    ends: list[tuple[str, str | None]] = field(default_factory=list)
    settling: asyncio.Event = field(default_factory=asyncio.Event)
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    def respond(self, status, headers, http_version="HTTP/1.1"):
        self.calls.append((status, list(headers), http_version))

    def put(self, chunk):
        self.reads.append(chunk)

    def end(self, how, detail=None):
        self.ends.append((how, detail))
        self.ended.set()

    async def settle(self):
        self.settling.set()
        await self.settled.wait()


class FakeSamples:
    """Makes exchanges; `settled` holds all of them back while it is clear."""

    def __init__(self):
        self.exchanges: list[FakeExchange] = []
        self.settled = asyncio.Event()
        self.settled.set()

    def request(self, key, **request):
        exchange = FakeExchange(key or f"new-{len(self.exchanges)}", request, self.settled)
        self.exchanges.append(exchange)
        return exchange


@contextlib.asynccontextmanager
async def proxied(upstream: str):
    """A proxy, what it records, and a client of it."""
    samples = FakeSamples()
    proxy = Proxy(samples, upstream)
    async with (
        serve(proxy) as server,
        httpx.AsyncClient(base_url=server.url, timeout=30, verify=False) as client,
    ):
        yield client, samples, server
    await proxy.aclose()


async def talk(url: str, sent: bytes) -> bytes:
    """Send bytes and return whatever comes until the other side closes."""
    to = httpx.URL(url)
    reader, writer = await asyncio.open_connection(to.host, to.port)
    writer.write(sent)
    with contextlib.closing(writer):
        return await reader.read()


def unframed(response: bytes) -> tuple[int | None, list[tuple[str, str]], bytes, str]:
    """Status, headers as spelt, body and how it ended."""
    parser = h11.Connection(h11.CLIENT)
    parser.send(h11.Request(method="GET", target="/", headers=[("host", "x")]))
    parser.send(h11.EndOfMessage())
    parser.receive_data(response)
    parser.receive_data(b"")
    status, headers, body = None, [], b""
    try:
        while not isinstance(event := parser.next_event(), h11.EndOfMessage):
            if isinstance(event, h11.Response):
                status = event.status_code
                headers = [(name.decode(), value.decode()) for name, value in event.headers.raw_items()]
            elif isinstance(event, h11.Data):
                body += event.data
            else:
                return status, headers, body, "cut"
    except h11.RemoteProtocolError:
        return status, headers, body, "cut"
    return status, headers, body, "eof"


async def read(client: httpx.AsyncClient, path: str = PATH) -> tuple[int, list[bytes], str]:
    """Status, reads and the name of what ended the response."""
    chunks: list[bytes] = []
    async with client.stream("POST", path, content=b"{}") as response:
        try:
            async for chunk in response.aiter_raw():
                chunks += [chunk]
        except httpx.TransportError as error:
            return response.status_code, chunks, type(error).__name__
    return response.status_code, chunks, "eof"


# Bytes in, bytes out


@pytest.mark.parametrize(
    ("end", "seen", "how"),
    [
        ("eof", "eof", "eof"),
        ("incomplete", "RemoteProtocolError", "reset"),
        ("reset", "ReadError", "reset"),
    ],
)
async def test_reads_and_ends_pass_unchanged(end, seen, how):
    body = b"data: {}\n\ndata: \xff\xe2\x80\xa8\r\rhalf a fra"
    stream = RawStream(200, EVENT_STREAM, body, reads=[3, 10, 1], end=end, delay=0.01)
    async with play(stream) as engine, proxied(engine.url) as (client, samples, _):
        status, chunks, ended = await read(client)
    [exchange] = samples.exchanges
    assert (status, b"".join(chunks), ended) == (200, body, seen)
    assert exchange.reads == [body[:3], body[3:13], body[13:14], body[14:]] == chunks
    assert exchange.calls == [(200, EVENT_STREAM, "HTTP/1.1")]
    assert exchange.ends[0][0] == how
    assert how == "eof" or exchange.ends[0][1]


@pytest.mark.parametrize("name", names())
async def test_captures_pass_unchanged(name):
    capture = load(name)
    method, path = capture.request["method"], capture.request["path"]
    body = (capture.request.get("raw_body") or json.dumps(capture.request["body"])).encode()
    head = f"{method} {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {len(body)}\r\n\r\n"
    async with play(*[captured(capture)] * 2) as engine, proxied(engine.url) as (_, samples, server):
        straight = unframed(await talk(engine.url, head.encode() + body))
        through = unframed(await talk(server.url, head.encode() + body))
    key_header = [("X-Rollout-Log-Key", exchange.key) for exchange in samples.exchanges]
    if capture.status:
        straight[1].extend(key_header)
    assert (through[0], sorted(through[1]), *through[2:]) == (straight[0], sorted(straight[1]), *straight[2:])
    assert through[2:] == (capture.body, capture.ended)
    assert len(samples.exchanges) == (name not in PASSED_BY)
    for exchange in samples.exchanges:
        assert b"".join(exchange.reads) == capture.body
        assert exchange.ends[0][0] == ("reset" if capture.ended == "cut" else "eof")


async def test_a_read_is_passed_on_before_the_next_one_comes():
    turn = asyncio.Semaphore(1)

    async def engine(request: Request, responder: Responder) -> None:
        await responder.start(200, EVENT_STREAM)
        for i in range(20):
            await turn.acquire()
            responder.send(b"%d" % i)
        await responder.finish()

    async with serve(engine) as upstream, proxied(upstream.url) as (client, samples, _):
        got = []
        async with client.stream("POST", PATH) as response:
            async for chunk in response.aiter_raw():  # the engine goes on only when this has come
                got.append(chunk)
                turn.release()
    assert got == [b"%d" % i for i in range(20)] == samples.exchanges[0].reads


@pytest.mark.parametrize(
    "headers", [EVENT_STREAM, [("content-type", "application/json"), ("content-length", "6")]]
)
async def test_only_the_last_chunk_waits_for_the_log(headers):
    stream = RawStream(200, headers, b"abcdef", reads=[3], delay=0.01)
    length = len(headers) == 2
    async with play(stream) as engine, proxied(engine.url) as (client, samples, _):
        samples.settled.clear()
        async with client.stream("POST", PATH) as response:
            chunks = response.aiter_raw()
            assert await anext(chunks) == b"abc"
            if not length:
                assert await anext(chunks) == b"def"
            rest = asyncio.ensure_future(anext(chunks, b"the end"))
            [exchange] = samples.exchanges
            await asyncio.wait_for(exchange.settling.wait(), 10)
            assert exchange.reads == [b"abc", b"def"]
            assert exchange.ends == [("eof", None)]
            await asyncio.sleep(0.02)  # time enough for a chunk that should not come
            assert not rest.done()
            samples.settled.set()
            assert await rest == (b"def" if length else b"the end")


async def test_a_length_that_is_not_reached():
    stream = RawStream(200, [("content-length", "6")], b"abc", end="incomplete")
    async with play(stream) as engine, proxied(engine.url) as (client, samples, _):
        assert await read(client) == (200, [b"abc"], "RemoteProtocolError")
    assert samples.exchanges[0].ends[0][0] == "reset"
    assert "received 3 bytes, expected 6" in samples.exchanges[0].ends[0][1]


async def test_a_body_that_lasts_until_the_connection_closes():
    wire = b"HTTP/1.0 200 OK\r\ncontent-type: text/event-stream\r\n\r\ndata: 1\n\n"
    async with play(RawStream(None, body=wire)) as engine, proxied(engine.url) as (client, samples, _):
        assert await read(client) == (200, [b"data: 1\n\n"], "eof")
    assert samples.exchanges[0].ends[0] == ("eof", None)
    assert samples.exchanges[0].calls[0][2] == "HTTP/1.0"


@pytest.mark.parametrize("status", [204, 304])
async def test_statuses_without_a_body(status):
    stream = RawStream(status, [("etag", "x")])
    async with play(stream, stream) as engine, proxied(engine.url) as (client, samples, _):
        for _ in range(2):
            response = await client.post(PATH)
            assert (response.status_code, response.content, response.headers["etag"]) == (status, b"", "x")
    assert [exchange.ends[0] for exchange in samples.exchanges] == [("eof", None)] * 2


async def test_interim_responses_are_left_out():
    wire = b"HTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\nHTTP/1.1 200 OK\r\ncontent-length: 1\r\n\r\na"
    async with play(RawStream(None, body=wire)) as engine, proxied(engine.url) as (client, _, _):
        assert await read(client) == (200, [b"a"], "eof")


@pytest.mark.parametrize("status", [307, 401, 429, 500, 599])
async def test_statuses_pass_as_they_are(status):
    headers = [("location", "/elsewhere"), ("retry-after", "3"), ("content-length", "2")]
    async with play(RawStream(status, headers, b"no")) as engine, proxied(engine.url) as (client, samples, _):
        response = await client.post(PATH)
        assert (response.status_code, response.content) == (status, b"no")
        assert response.headers.multi_items()[:3] == headers
        assert len(engine.requests) == 1
    assert samples.exchanges[0].calls[0][0] == status


# Headers and keys


async def test_headers_to_the_engine():
    sent = (
        b"POST %b?a=%%20b&c HTTP/1.1\r\nHost: proxy\r\nX-Twice: 1\r\nAccept-Encoding: gzip\r\nx-twice: 2\r\n"
        b"Authorization: Bearer s\r\nX-Rollout-Log-Key: k\r\nX-Rollout-Log-Base: 7\r\nX-Session-Id: s\r\n"
        b"Connection: close, X-Hop\r\nX-Hop: 1\r\nTE: trailers\r\nExpect: 100-continue\r\nUser-Agent: me\r\n"
        b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n"
    ) % PATH.encode()
    async with play(RawStream()) as engine, proxied(engine.url) as (_, samples, server):
        got = await talk(server.url, sent)
    [request], [exchange] = engine.requests, samples.exchanges
    assert request.target == PATH + "?a=%20b&c"
    assert sorted(request.headers) == [
        ("accept-encoding", "identity"),
        ("authorization", "Bearer s"),
        ("content-length", "2"),
        ("host", engine.url.removeprefix("http://")),
        ("user-agent", "me"),
        ("x-session-id", "s"),
        ("x-twice", "1"),
        ("x-twice", "2"),
    ]
    assert request.body == exchange.request["body"] == b"{}"
    assert exchange.request["path"] == PATH
    assert exchange.request["url"] == engine.url + PATH + "?a=%20b&c"
    assert exchange.request["base"] == 7
    assert "x-rollout-log-key" not in dict(exchange.request["headers"])
    assert b"\r\nX-Rollout-Log-Key: k\r\n" in got


async def test_headers_to_the_client():
    headers = [("Set-Cookie", "a=1"), ("set-cookie", "b=2"), ("X-Any", "\xe9"), ("content-length", "0")]
    wire = "HTTP/1.1 200 OK\r\nConnection: x-hop\r\nKeep-Alive: 5\r\nX-Hop: 1\r\n" + "".join(
        f"{name}: {value}\r\n" for name, value in headers
    )
    async with (
        play(RawStream(None, body=(wire + "\r\n").encode("latin-1"))) as engine,
        proxied(engine.url) as (_, _, server),
    ):
        got = await talk(server.url, f"POST {PATH} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n".encode())
    lines = got.decode("latin-1").split("\r\n")
    assert lines[1:5] == [f"{name}: {value}" for name, value in headers]
    assert lines[5:] == ["X-Rollout-Log-Key: new-0", "connection: close", "", ""]


@pytest.mark.parametrize(
    ("headers", "key"),
    [
        ({"X-Rollout-Log-Key": "a", "x-session-id": "b"}, "a"),
        ({"x-session-id": "b"}, "b"),
        ({}, "new-0"),
        ({"X-Rollout-Log-Key": ""}, "new-0"),
        ({"X-Rollout-Log-Key": "schlüssel".encode()}, "schlüssel"),
    ],
)
async def test_the_key(headers, key):
    async with play(RawStream()) as engine, proxied(engine.url) as (client, samples, _):
        response = await client.post(PATH, headers=headers)
    assert samples.exchanges[0].key == key
    assert dict(response.headers.raw)[b"X-Rollout-Log-Key"] == key.encode()
    assert engine.requests[0].header("x-rollout-log-key") is None
    assert engine.requests[0].header("x-session-id") == headers.get("x-session-id")


async def test_a_base_that_is_no_number_is_left_to_inference(caplog):
    async with play(RawStream()) as engine, proxied(engine.url) as (client, samples, _):
        assert (await client.post(PATH, headers={"X-Rollout-Log-Base": "-1"})).status_code == 200
    assert samples.exchanges[0].request["base"] is None
    assert "x-rollout-log-base is no number of tokens: '-1'" in caplog.text


@pytest.mark.parametrize(
    ("method", "path", "headers", "recorded"),
    [
        ("POST", "/inference/v1/generate", {}, True),
        ("POST", "/generate", {}, True),
        ("POST", "/v1/completions", {}, True),
        ("POST", "/v1/chat/completions", {}, True),
        ("POST", "/v1/chat/completions/render", {}, False),
        ("POST", "/v1/chat/completions/render", {"X-Rollout-Log-Key": "k"}, True),
        ("GET", "/inference/v1/generate", {"X-Rollout-Log-Key": "k"}, False),
        ("GET", "/health", {}, False),
        ("DELETE", "/a%2Fb//c?d=%20", {"x-session-id": "s"}, False),
        ("POST", "/abort_requests", {}, False),
    ],
)
async def test_what_is_recorded(method, path, headers, recorded):
    stream = RawStream(200, [("content-length", "2")], b"ok")
    async with play(stream) as engine, proxied(engine.url) as (client, samples, _):
        headers = {"accept-encoding": "br", **headers}
        response = await client.request(method, path, headers=headers, content=b"\x00body")
    [request] = engine.requests
    assert (request.method, request.target, request.body) == (method, path, b"\x00body")
    assert request.header("accept-encoding") == ("identity" if recorded else "br")
    assert request.header("x-rollout-log-key") is None
    assert len(samples.exchanges) == recorded
    assert ("x-rollout-log-key" in response.headers) == recorded
    assert response.content == b"ok"


async def test_head_keeps_the_length_it_tells():
    async with (
        play(RawStream(200, [("content-length", "5")])) as engine,
        proxied(engine.url) as (client, _, _),
    ):
        response = await client.head("/file")
    assert (response.status_code, response.headers["content-length"], response.content) == (200, "5", b"")


async def test_an_upstream_below_a_path():
    async with play(RawStream(body=b"x")) as engine, proxied(engine.url + "/pool/1/") as (client, samples, _):
        await client.post(PATH + "?q")
    assert engine.requests[0].target == "/pool/1" + PATH + "?q"
    assert samples.exchanges[0].request["path"] == PATH


@pytest.mark.parametrize(
    "url", ["", "engine:8000", "ftp://engine", "http://", "http://user:pw@engine", "http://e?q"]
)
async def test_a_url_that_is_no_upstream(url):
    with pytest.raises(ValueError, match="is no upstream: give a URL like http"):
        Proxy(FakeSamples(), url)


async def test_connections_are_reused_on_both_sides():
    peers = set()

    async def engine(request: Request, responder: Responder) -> None:
        peers.add(responder._wire._transport.get_extra_info("peername"))
        await responder.start(200, EVENT_STREAM)
        responder.send(b"data: 1\n\n")
        await responder.finish()

    async with serve(engine) as upstream, proxied(upstream.url) as (_, samples, server):
        reader, writer = await asyncio.open_connection(server.host, server.port)
        for _ in range(5):
            writer.write(f"POST {PATH} HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\n\r\n".encode())
            await reader.readuntil(b"\r\n0\r\n\r\n")
        writer.close()
    assert len(samples.exchanges) == 5
    assert len(peers) == 1


# Somebody leaves


@pytest.mark.parametrize("how", ["fin", "rst"])
@pytest.mark.parametrize("when", ["before the headers", "in the body"])
async def test_when_the_client_hangs_up_so_does_the_proxy(how, when):
    asked, left = asyncio.Event(), asyncio.Event()

    async def engine(request: Request, responder: Responder) -> None:
        if when == "in the body":
            await responder.start(200, EVENT_STREAM)
            responder.send(b"data: 1\n\n")
        asked.set()
        try:
            await asyncio.Event().wait()
        finally:
            left.set()

    async with serve(engine) as upstream, proxied(upstream.url) as (_, samples, server):
        reader, writer = await asyncio.open_connection(server.host, server.port)
        writer.write(f"POST {PATH} HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\n\r\n".encode())
        await asked.wait()
        if when == "in the body":
            await reader.readuntil(b"data: 1\n\n")
        if how == "rst":
            sock = writer.get_extra_info("socket")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()
        else:
            writer.close()
        await asyncio.wait_for(left.wait(), 10)
        [exchange] = samples.exchanges
        await asyncio.wait_for(exchange.ended.wait(), 10)
    assert exchange.ends[0] == ("cancelled", None)
    assert not exchange.settling.is_set()


async def test_a_request_that_follows_a_hang_up_finds_it_ended(monkeypatch):
    """However soon: both arrive in one turn of the event loop."""
    ends: asyncio.Queue[list] = asyncio.Queue()
    request = FakeSamples.request

    def seen(samples: FakeSamples, *args, **kwargs) -> FakeExchange:
        ends.put_nowait([end for exchange in samples.exchanges for end in exchange.ends])
        return request(samples, *args, **kwargs)

    monkeypatch.setattr(FakeSamples, "request", seen)
    async with (
        play(choose=lambda _: RawStream(body=b"x", end="hang")) as engine,
        proxied(engine.url) as (_, _, server),
    ):
        sent = f"POST {PATH} HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\n\r\n".encode()
        reader, first = await asyncio.open_connection(server.host, server.port)
        first.write(sent)
        await reader.readuntil(b"x\r\n")
        assert await ends.get() == []
        _, second = await asyncio.open_connection(server.host, server.port)
        first.get_extra_info("socket").shutdown(socket.SHUT_RDWR)
        second.write(sent)
        assert await ends.get() == [("cancelled", None)]
        second.close()
        first.close()


async def test_when_the_proxy_stops_streams_are_cut_and_say_why():
    async with play(RawStream(body=b"data: 1\n\n", end="hang")) as engine, httpx.AsyncClient() as client:
        async with proxied(engine.url) as (_, samples, server):
            response = await client.send(client.build_request("POST", server.url + PATH), stream=True)
            chunks = response.aiter_raw()
            assert await anext(chunks) == b"data: 1\n\n"
        with pytest.raises(httpx.RemoteProtocolError):
            await anext(chunks)
        await asyncio.wait_for(engine.left.wait(), 10)
    assert samples.exchanges[0].ends[0] == ("cancelled", "the proxy was stopped")


async def test_an_engine_that_cannot_be_reached_is_502():
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
        async with proxied(url) as (client, samples, _):
            response = await client.post(PATH, headers={"X-Rollout-Log-Key": "k"})
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["type"]) == (502, 502, "upstream_unreachable")
    assert f"cannot reach the upstream {url}: ConnectError" in error["message"]
    assert response.headers["x-rollout-log-key"] == "k"
    [exchange] = samples.exchanges
    assert exchange.ends[0][0] == "reset"
    assert exchange.ends[0][1].startswith("ConnectError")
    assert exchange.calls == []


async def test_a_name_that_does_not_resolve_is_502():
    async with proxied("http://engine.invalid:8000") as (client, samples, _):
        response = await client.get("/health")
    assert response.status_code == 502
    assert "http://engine.invalid:8000" in response.json()["error"]["message"]
    assert samples.exchanges == []


@pytest.mark.parametrize("end", ["incomplete", "reset"])
async def test_an_engine_that_dies_before_it_answers(end):
    async with play(RawStream(None, end=end)) as engine, proxied(engine.url) as (client, samples, _):
        with pytest.raises(httpx.RemoteProtocolError if end == "incomplete" else httpx.ReadError):
            await client.post(PATH)
    assert samples.exchanges[0].ends[0][0] == "reset"


async def test_a_failure_to_settle_is_no_clean_end(caplog):
    """A strict log raises; the client must not take the response for a recorded one."""
    async with play(RawStream(body=b"x")) as engine, proxied(engine.url) as (client, _, _):

        async def settle(self: FakeExchange) -> None:
            raise OSError("the disk is full")

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(FakeExchange, "settle", settle)
            assert await read(client) == (200, [b"x"], "RemoteProtocolError")
    assert "the disk is full" in caplog.text


# Many


async def test_two_hundred_streams_leave_no_task():
    before = asyncio.all_tasks()

    def choose(request: Request) -> RawStream:
        number = int(request.body)
        end = ("eof", "incomplete", "reset", "hang")[number % 4]
        return RawStream(body=b"data: %d\n\n" % number * 20, reads=[7] * 20, end=end)

    async def one(client: httpx.AsyncClient, number: int) -> tuple[bytes, str]:
        got = b""
        body = b"data: %d\n\n" % number * 20
        headers = {"X-Rollout-Log-Key": str(number)}
        try:
            async with client.stream("POST", PATH, content=b"%d" % number, headers=headers) as response:
                async for chunk in response.aiter_raw():
                    got += chunk
                    if number % 4 == 3 and got == body:
                        return got, "cancelled"
        except httpx.TransportError:
            return got, "reset"
        return got, "eof"

    async with play(choose=choose) as engine, proxied(engine.url) as (_, samples, server):
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=server.url, timeout=60, limits=limits) as client:
            results = await asyncio.gather(*(one(client, number) for number in range(200)))
        await asyncio.wait_for(asyncio.gather(*(exchange.ended.wait() for exchange in samples.exchanges)), 30)
    for exchange in samples.exchanges:
        number = int(exchange.key)
        assert results[number] == (b"data: %d\n\n" % number * 20, exchange.ends[0][0])
        assert b"".join(exchange.reads) == results[number][0]
    assert [how for _, how in results] == ["eof", "reset", "reset", "cancelled"] * 50
    assert asyncio.all_tasks() == before


# With the real thing


async def test_a_proxy_without_a_log_still_names_samples():
    body = b'data: {"choices":[{"index":0,"token_ids":[5,6],"finish_reason":"length"}]}\n\ndata: [DONE]\n\n'
    sent = json.dumps(
        {"model": "m", "token_ids": [1, 2], "sampling_params": {"max_tokens": 2}, "stream": True}
    )
    async with (
        play(RawStream(body=body)) as engine,
        serve_proxy(None, engine.url) as server,
        httpx.AsyncClient(base_url=server.url) as client,
    ):
        response = await client.post(PATH, content=sent)
    assert response.content == body
    assert len(response.headers["x-rollout-log-key"]) == 16
