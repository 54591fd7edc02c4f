"""The server: framing, endings, hang-ups and limits, seen from a bare socket."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import struct

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout_log.http_server import CannotListen, Request, Responder, Server, serve

GET = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"


async def echo(request: Request, responder: Responder) -> None:
    await responder.answer(200, request.body, [("x-target", request.target)])


async def connect(server: Server):
    return await asyncio.open_connection(server.host, server.port)


async def exchange(server: Server, sent: bytes) -> bytes:
    """Send bytes and return whatever comes until the server closes."""
    reader, writer = await connect(server)
    writer.write(sent)
    with contextlib.closing(writer):
        return await reader.read()


def others() -> set[asyncio.Task]:
    return asyncio.all_tasks() - {asyncio.current_task()}


# Framing


async def test_a_chunked_response_on_the_wire():
    async def handler(request, responder):
        await responder.start(200, [("content-type", "text/event-stream"), ("Transfer-Encoding", "gzip")])
        responder.send(b"data: 1\n\n")
        responder.send(b"")
        responder.send(b"0123456789abcdef")
        await responder.finish()

    async with serve(handler) as server:
        got = await exchange(server, b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
    assert got == (
        b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n"
        b"connection: close\r\n\r\n9\r\ndata: 1\n\n\r\n10\r\n0123456789abcdef\r\n0\r\n\r\n"
    )


async def test_a_length_frames_the_body_and_a_short_one_is_cut():
    async def handler(request, responder):
        await responder.start(200, [("content-length", "4")])
        responder.send(b"ab")
        await responder.finish()

    async with serve(handler) as server:
        assert await exchange(server, GET) == b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\nab"


async def test_more_than_the_length_is_an_error_of_the_handler():
    seen = []

    async def handler(request, responder):
        await responder.start(200, [("content-length", "1")])
        with pytest.raises(ValueError, match="2 bytes where 1 of the content-length are left") as error:
            responder.send(b"ab")
        seen.append(error)
        responder.send(b"a")
        await responder.finish()

    async with serve(handler) as server, httpx.AsyncClient() as client:
        assert (await client.get(server.url)).content == b"a"
    assert len(seen) == 1


async def test_an_old_client_gets_no_chunks():
    async def handler(request, responder):
        assert request.http_version == "HTTP/1.0"
        await responder.start(200)
        responder.send(b"ab")
        await responder.finish()

    async with serve(handler) as server:
        got = await exchange(server, b"GET / HTTP/1.0\r\n\r\n")
    assert got == b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\nab"


@pytest.mark.parametrize(("method", "status"), [("HEAD", 200), ("GET", 204), ("GET", 304)])
async def test_some_responses_have_no_body(method, status):
    async def handler(request, responder):
        await responder.start(status, [("content-length", "7")] if method == "HEAD" else [])
        responder.send(b"ignored")
        await responder.finish()

    async with serve(handler) as server, httpx.AsyncClient() as client:
        for _ in range(2):  # the second request shows that nothing was left on the connection
            response = await client.request(method, server.url)
            assert (response.status_code, response.content) == (status, b"")
            assert "transfer-encoding" not in response.headers


async def test_raw_bytes_go_out_as_they_are():
    async def handler(request, responder):
        responder.raw(b"HTTP/1.1 299 Odd\r\nx: \xff\r\n\r\n")
        responder.raw(b"zz")
        await responder.finish()

    async with serve(handler) as server:
        assert await exchange(server, GET) == b"HTTP/1.1 299 Odd\r\nx: \xff\r\n\r\nzz"


async def test_a_header_cannot_smuggle_lines(caplog):
    async def handler(request, responder):
        await responder.start(200, [("x", "a\r\nset-cookie: b")])

    async with serve(handler) as server, httpx.AsyncClient() as client:
        response = await client.get(server.url)
    assert response.status_code == 500
    assert "set-cookie" not in response.headers
    assert "has a line break" in caplog.text


async def test_each_chunk_is_sent_before_the_next_one_is_made():
    turn = asyncio.Semaphore(0)

    async def handler(request, responder):
        await responder.start(200)
        for i in range(5):
            await turn.acquire()
            responder.send(b"%d" % i)
        await responder.finish()

    async with (
        serve(handler) as server,
        httpx.AsyncClient() as client,
        client.stream("GET", server.url) as response,
    ):
        got = []
        turn.release()
        async for chunk in response.aiter_raw():  # the handler goes on only when a chunk has arrived
            got.append(chunk)
            turn.release()
    assert got == [b"0", b"1", b"2", b"3", b"4"]


# Requests


@settings(max_examples=30, deadline=None)
@given(body=st.binary(max_size=300), cuts=st.lists(st.integers(0, 400), max_size=6), chunked=st.booleans())
def test_a_request_may_arrive_in_any_pieces(body, cuts, chunked):
    async def run():
        seen = []

        async def handler(request, responder):
            seen.append(request)
            await responder.answer(200, b"")

        framed = b"transfer-encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
        if not chunked or not body:
            framed = b"content-length: %d\r\n\r\n%b" % (len(body), body)
        sent = b"POST /a?b=%20c HTTP/1.1\r\nHost: x\r\nX-Two: 1\r\nx-two: 2\r\nconnection: close\r\n" + framed
        async with serve(handler) as server:
            reader, writer = await connect(server)
            at = 0
            for cut in [*sorted(cuts), len(sent)]:
                writer.write(sent[at:cut])
                await asyncio.sleep(0)
                at = max(at, cut)
            await reader.read()
            writer.close()
        [request] = seen
        assert (request.method, request.target, request.body) == ("POST", "/a?b=%20c", body)
        assert (request.path, request.query) == ("/a", "b=%20c")
        assert [pair for pair in request.headers if pair[0] == "x-two"] == [("x-two", "1"), ("x-two", "2")]
        assert request.header("X-Two") == "1"
        assert request.header("absent") is None

    asyncio.run(run())


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        ("http://host:1/p?q", "/p?q"),
        ("http://host", "/"),
        ("http://host?q", "/?q"),
        ("*", "*"),
        ("/a//b", "/a//b"),
    ],
)
async def test_targets(target, expected):
    async with serve(echo) as server:
        got = await exchange(server, b"GET %b HTTP/1.0\r\n\r\n" % target.encode())
    assert b"\r\nx-target: " + expected.encode() + b"\r\n" in got


async def test_keep_alive_and_pipelining():
    async with serve(echo) as server:
        one = b"POST /1 HTTP/1.1\r\nhost: x\r\ncontent-length: 1\r\n\r\na"
        two = b"POST /2 HTTP/1.1\r\nhost: x\r\ncontent-length: 1\r\nconnection: close\r\n\r\nb"
        got = await exchange(server, one + two)
    assert got == (
        b"HTTP/1.1 200 OK\r\nx-target: /1\r\ncontent-length: 1\r\n\r\na"
        b"HTTP/1.1 200 OK\r\nx-target: /2\r\ncontent-length: 1\r\nconnection: close\r\n\r\nb"
    )


async def test_a_client_that_pipelines_without_end_is_made_to_wait():
    go = asyncio.Event()

    async def handler(request, responder):
        await go.wait()
        await echo(request, responder)

    body = b"x" * 1000
    sent = b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 1000\r\n\r\n" + body
    async with serve(handler, max_head=2000) as server:
        reader, writer = await connect(server)
        writer.write(sent * 500)
        go.set()
        for _ in range(500):
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 OK\r\n")
            assert await reader.readexactly(1000) == body
        writer.close()


async def test_expect_100_continue():
    async with serve(echo) as server:
        reader, writer = await connect(server)
        writer.write(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\nexpect: 100-continue\r\n\r\n")
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(b"ab")
        assert (await reader.readuntil(b"ab")).startswith(b"HTTP/1.1 200 OK\r\n")
        writer.close()


@pytest.mark.parametrize(
    ("sent", "status", "message"),
    [
        (b"\x16\x03\x01\x02\x00\r\n\r\n", 400, b"This is no request of HTTP/1.1"),
        (b"GET / HTTP/1.1\r\n\r\n", 400, b"Host"),
        (b"GET / HTTP/1.1\r\nhost: x\r\nbad header\r\n\r\n", 400, b"illegal header line"),
        (b"GET / HTTP/1.1\r\nhost: x\r\nlong: " + b"a" * 3000, 431, b"longer than 2000 bytes"),
        (b"GET / HTTP/1.1\r\nhost: x\r\nlong: " + b"a" * 3000 + b"\r\n\r\n", 431, b"longer than 2000 bytes"),
        (
            b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 101\r\n\r\n" + b"a" * 101,
            413,
            b"longer than 100 bytes",
        ),
        (
            b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n65\r\n" + b"a" * 101,
            413,
            b"longer than 100 bytes",
        ),
    ],
)
async def test_bad_requests_are_told_why(sent, status, message):
    async with serve(echo, max_head=2000, max_body=100) as server:
        got = await exchange(server, sent)
    assert got.startswith(b"HTTP/1.1 %d " % status)
    assert message in got
    assert b"\r\nconnection: close\r\n" in got


async def test_a_refused_upload_reads_its_answer():
    async with serve(echo, max_body=100) as server:
        reader, writer = await connect(server)
        writer.write(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 20000000\r\n\r\n")
        writer.write(b"a" * 20_000_000)
        await writer.drain()
        assert (await reader.read()).startswith(b"HTTP/1.1 413 ")
        writer.close()


# Endings


@pytest.mark.parametrize("end", ["cut", "reset"])
@pytest.mark.parametrize("size", [1, 5_000_000])
async def test_a_bad_ending_comes_after_all_bytes(end, size):
    async def handler(request, responder):
        await responder.start(200)
        responder.send(b"x" * size)
        getattr(responder, end)()
        responder.send(b"never")

    async with serve(handler) as server, httpx.AsyncClient() as client:
        got, seen = 0, None
        try:
            async with client.stream("GET", server.url) as response:
                async for chunk in response.aiter_raw():
                    got += len(chunk)
        except httpx.TransportError as error:
            seen = type(error)
    assert (got, seen) == (size, httpx.RemoteProtocolError if end == "cut" else httpx.ReadError)


async def test_nothing_at_all():
    async def handler(request, responder):
        responder.cut()

    async with serve(handler) as server:
        assert await exchange(server, GET) == b""


async def test_a_failing_handler_is_500_or_a_cut(caplog):
    async def handler(request, responder):
        if request.path == "/late":
            await responder.start(200)
            responder.send(b"x")
        if request.path != "/silent":
            raise KeyError("the reason")

    async with serve(handler) as server:
        for path in (b"/early", b"/silent"):
            got = await exchange(server, b"GET %b HTTP/1.0\r\n\r\n" % path)
            assert got.startswith(b"HTTP/1.1 500 ")
            assert b"the reason" not in got
        got = await exchange(server, GET.replace(b"/ ", b"/late "))
        assert got.endswith(b"\r\n\r\n1\r\nx\r\n")
    assert [record.levelno for record in caplog.records] == [logging.ERROR] * 3
    assert "the reason" in caplog.text
    assert "without a response" in caplog.text


# Hang-ups


@pytest.mark.parametrize("how", ["fin", "rst"])
async def test_a_hang_up_cancels_a_handler_that_waits_for_something_else(how):
    cancelled = asyncio.Event()

    async def handler(request, responder):
        await responder.start(200)
        responder.send(b"x")
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            assert responder.disconnected.is_set()
            cancelled.set()
            raise

    async with serve(handler) as server:
        reader, writer = await connect(server)
        writer.write(GET)
        await reader.readuntil(b"x\r\n")
        if how == "rst":
            sock = writer.get_extra_info("socket")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()
        else:
            writer.close()
        await asyncio.wait_for(cancelled.wait(), 10)


async def test_a_handler_is_cancelled_once_and_may_clean_up():
    """A FIN is seen twice: as the end of the input and as the end of the connection."""
    cleaned_up = asyncio.Event()

    async def handler(request, responder):
        await responder.start(200)
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0.05)
            cleaned_up.set()

    async with serve(handler) as server:
        reader, writer = await connect(server)
        writer.write(GET)
        await reader.readuntil(b"\r\n\r\n")
        writer.close()
        await asyncio.wait_for(cleaned_up.wait(), 10)


async def test_without_cancel_the_handler_is_told():
    done = asyncio.Event()

    async def handler(request, responder):
        await responder.start(200)
        await responder.disconnected.wait()
        responder.send(b"nobody reads this")
        await responder.finish()
        done.set()

    async with serve(handler, cancel=False) as server:
        reader, writer = await connect(server)
        writer.write(GET)
        await reader.readuntil(b"\r\n\r\n")
        writer.close()
        await asyncio.wait_for(done.wait(), 10)


async def test_a_client_that_does_not_read_holds_the_handler_back():
    sent = 0
    held_back = asyncio.Event()
    cancelled = asyncio.Event()

    async def handler(request, responder):
        nonlocal sent
        await responder.start(200)
        try:
            while True:
                responder.send(b"x" * 65536)
                sent += 65536
                drain = asyncio.ensure_future(responder.drain())
                await asyncio.sleep(0)
                if not drain.done():
                    held_back.set()
                await drain
        except asyncio.CancelledError:
            cancelled.set()
            raise

    async with serve(handler) as server:
        _, writer = await asyncio.open_connection(server.host, server.port, limit=1024)
        writer.write(GET)
        await asyncio.wait_for(held_back.wait(), 10)
        writer.transport.abort()
        await asyncio.wait_for(cancelled.wait(), 10)
    assert sent < 100 << 20


async def test_the_end_of_the_block_ends_everything():
    before = others()
    started = asyncio.Semaphore(0)
    ended = []

    async def handler(request, responder):
        await responder.start(200)
        started.release()
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(responder.disconnected.is_set())

    async with serve(handler) as server:
        clients = [await connect(server) for _ in range(5)]
        idle = await connect(server)
        for _, writer in clients:
            writer.write(GET)
        for _ in clients:
            await started.acquire()
    assert ended == [False] * 5  # the server left, not the clients
    for reader, writer in [*clients, idle]:
        await reader.read()
        writer.close()
        await writer.wait_closed()
    assert others() <= before
    with pytest.raises(ConnectionRefusedError):
        await connect(server)


async def test_an_address_that_cannot_be_had_is_named():
    async with serve(echo) as server:
        with pytest.raises(
            CannotListen, match=rf"cannot listen on 127.0.0.1:{server.port}: .*; name another"
        ):
            async with serve(echo, port=server.port):
                pass


async def test_ipv6():
    try:
        async with serve(echo, "::1") as server, httpx.AsyncClient() as client:
            assert server.url == f"http://[::1]:{server.port}"
            assert (await client.post(server.url, content=b"six")).content == b"six"
    except OSError:
        pytest.skip("this machine has no IPv6")
