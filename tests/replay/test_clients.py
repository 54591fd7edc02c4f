"""The same recording gives the same frames to every client."""

from __future__ import annotations

import asyncio
import gc
import json
import shutil
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import pytest

import captures
from replay.exchanges import CAPTURES, body_of, record_capture
from replay.memory import MemoryLog
from replay.streams import VLLM, body, frame, sample, whole
from rollout_log.events import Reads
from rollout_log.replay import ReplayMiss, ReplayTransport, serve_replay
from rollout_log.sse import FrameSplitter

NAMES = [
    "a1-plain-length",
    "c1-include-usage",
    "h1-n2",
    "l1-utf8-text",
    "p9-completions-keep-alive",
    "n1-long-4096",
]

Client = Callable[[str, str, bytes], Awaitable[bytes]]
HEADERS = {"content-type": "application/json"}


async def with_httpx(url: str, path: str, content: bytes) -> bytes:
    async with (
        httpx.AsyncClient(base_url=url) as client,
        client.stream("POST", path, content=content) as response,
    ):
        return b"".join([chunk async for chunk in response.aiter_bytes()])


async def with_sync_httpx(url: str, path: str, content: bytes) -> bytes:
    def read() -> bytes:
        with httpx.Client(base_url=url) as client, client.stream("POST", path, content=content) as response:
            return b"".join(response.iter_bytes())

    return await asyncio.to_thread(read)


async def with_httpx2(url: str, path: str, content: bytes) -> bytes:
    httpx2 = pytest.importorskip("httpx2")
    async with (
        httpx2.AsyncClient(base_url=url) as client,
        client.stream("POST", path, content=content) as response,
    ):
        return b"".join([chunk async for chunk in response.aiter_bytes()])


async def with_aiohttp(url: str, path: str, content: bytes) -> bytes:
    aiohttp = pytest.importorskip("aiohttp")
    async with (
        aiohttp.ClientSession() as session,
        session.post(url + path, data=content, headers=HEADERS) as response,
    ):
        return b"".join([chunk async for chunk in response.content.iter_any()])


async def with_curl(url: str, path: str, content: bytes) -> bytes:
    if shutil.which("curl") is None:
        pytest.skip("curl is not installed")
    curl = await asyncio.create_subprocess_exec(
        "curl", "-sN", "--noproxy", "*", "--data-binary", "@-", url + path,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    return (await curl.communicate(content))[0]


@pytest.mark.parametrize("client", [with_httpx, with_sync_httpx, with_httpx2, with_aiohttp, with_curl])
async def test_frames_are_the_same_for(client: Client):
    log = MemoryLog()
    for name in NAMES:
        record_capture(log, name)
    async with serve_replay(log) as server:
        for name in NAMES:
            capture = captures.load(name)
            got = await asyncio.wait_for(client(server.url, capture.request["path"], body_of(name)), 60)
            assert FrameSplitter().feed(got) == FrameSplitter().feed(capture.body)
            assert got == capture.body


@pytest.mark.parametrize(
    "name", ["p3-chat-stream", "p3-chat-nonstream", "p1-completions-stream", "p1-completions-nonstream"]
)
async def test_the_openai_client(name):
    openai = pytest.importorskip("openai")
    log = MemoryLog()
    record_capture(log, name)
    capture = captures.load(name)
    request = dict(capture.request["body"])
    chat = "messages" in request
    extra = {"return_token_ids": request.pop("return_token_ids")}
    async with (
        serve_replay(log) as server,
        openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client,
    ):
        endpoint = client.chat.completions if chat else client.completions
        answer = await endpoint.create(**request, extra_body=extra)
        said = [each.to_dict() async for each in answer] if request.get("stream") else [answer.to_dict()]
    data = [frame.data for frame in FrameSplitter().feed(capture.body)] or [capture.body]
    assert len(said) == len([each for each in data if each != b"[DONE]"])
    assert _token_ids(said) == _token_ids([json.loads(each) for each in data if each != b"[DONE]"])
    assert _token_ids(said)


def _token_ids(frames: list[dict[str, Any]]) -> list[int]:
    choices = [choice for frame in frames for choice in frame["choices"]]
    return [token for choice in choices for token in choice.get("token_ids") or []]


# Without a socket


def libraries() -> list[Any]:
    return [httpx, pytest.importorskip("httpx2")]


@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("name", [name for name in CAPTURES if captures.load(name).ended == "cut"])
async def test_the_end_is_an_exception_of_the_clients_own_library(name, place):
    library = libraries()[place]
    capture = captures.load(name)
    log = MemoryLog()
    record_capture(log, name)
    path, got = capture.request["path"], list[bytes]()
    async with library.AsyncClient(transport=ReplayTransport(log), base_url="http://engine") as client:
        with pytest.raises(library.RemoteProtocolError):
            await drain(client, path, body_of(name), got)
    assert b"".join(got) == capture.body
    got.clear()
    client = library.Client(transport=ReplayTransport(log), base_url="http://engine")
    with client, pytest.raises(library.RemoteProtocolError):
        drain_sync(client, path, body_of(name), got)
    assert b"".join(got) == capture.body


async def drain(client: Any, path: str, content: bytes, got: list[bytes]) -> None:
    async with client.stream("POST", path, content=content) as response:
        async for chunk in response.aiter_raw():
            got += [chunk]


def drain_sync(client: Any, path: str, content: bytes, got: list[bytes]) -> None:
    with client.stream("POST", path, content=content) as response:
        got += response.iter_raw()


@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize(
    ("end", "detail", "error"),
    [
        ("reset", "ReadError: connection reset by peer", "ReadError"),
        ("reset", "RemoteProtocolError: peer closed connection", "RemoteProtocolError"),
        ("reset", None, "RemoteProtocolError"),
        ("timeout", "ReadTimeout: 600 s", "ReadTimeout"),
        ("timeout", "no bytes for 600 s", "ReadTimeout"),
    ],
)
def test_how_it_ended(place, end, detail, error):
    library = libraries()[place]
    log = MemoryLog()
    chunks = [frame([1]), frame([2])[:40]]
    sample(log, "k", [7], [], chunks=chunks, end=end, detail=detail, max_tokens=4)
    got: list[bytes] = []
    client = library.Client(transport=ReplayTransport(log), base_url="http://engine")
    with client, pytest.raises(getattr(library, error)) as raised:
        drain_sync(client, VLLM, json.dumps(body([7], 4)).encode(), got)
    assert got == chunks
    if detail and ": " in detail:
        assert str(raised.value) == detail.partition(": ")[2]


@pytest.mark.parametrize("place", [0, 1])
def test_a_miss_is_a_transport_error_of_the_clients_own_library(place):
    library = libraries()[place]
    log = MemoryLog()
    sample(log, "k", [7], [1])
    transport = ReplayTransport(log)
    with library.Client(transport=transport, base_url="http://engine") as client:
        with pytest.raises(library.TransportError, match="token 0 is 8, recorded 7") as raised:
            client.post(VLLM, json=body([8], 1))
        assert isinstance(raised.value, ReplayMiss)
        assert raised.value.nearest == "k"
        assert client.get("/health").status_code == 200
    assert transport.report().unused == ["k"]


async def test_the_first_chunk_arrives_before_the_second_is_made():
    log = MemoryLog()
    sample(log, "k", [7], [1, 2, 3])
    transport = ReplayTransport(log)
    async with (
        httpx.AsyncClient(transport=transport, base_url="http://engine") as client,
        client.stream("POST", VLLM, json=body([7], 3)) as response,
    ):
        (playback,) = transport.desk.playing
        chunks = response.aiter_raw()
        first = await anext(chunks)
        assert first == whole([1, 2, 3], name="generate-tokens-k")[0]
        assert playback.sent == len(first)
        await chunks.aclose()


async def test_a_cancel_inside_a_wait_leaves_no_task():
    log = MemoryLog()
    chunks = whole([1, 2, 3], 1, name="generate-tokens-k")
    sample(log, "k", [7], [], chunks=chunks, max_tokens=3)
    log.written[0] = [slow(event) for event in log.written[0]]
    transport = ReplayTransport(log, pace="recorded")
    first = asyncio.Event()

    async def consume(client: httpx.AsyncClient) -> None:
        async with client.stream("POST", VLLM, json=body([7], 3)) as response:
            async for _ in response.aiter_raw():
                first.set()

    async with httpx.AsyncClient(transport=transport, base_url="http://engine") as client:
        task = asyncio.create_task(consume(client))
        await first.wait()
        await asyncio.sleep(0)
        assert transport.desk.playing
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not transport.desk.playing
        gc.collect()
        assert asyncio.all_tasks() == {asyncio.current_task()}


def slow(event: Any) -> Any:
    """Have every read but the first come after an hour."""
    if not isinstance(event, Reads):
        return event
    return Reads(event.number, event.sizes, [0, *[3_600_000_000] * (len(event.sizes) - 1)])
