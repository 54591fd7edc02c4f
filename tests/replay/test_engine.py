"""The server as an engine: aborts, resumes from anywhere, pauses, and what it answers beside streams."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

import captures
from replay.exchanges import body_of, record_capture
from replay.memory import MemoryLog, record
from replay.streams import (
    DONE,
    SGLANG,
    VLLM,
    aborted,
    body,
    frame,
    frames_of,
    sample,
    sse,
    tokens_of,
    usage,
    whole,
)
from rollout_log.replay import ReplayServer, serve_replay

PROMPT = [7, 8, 9]


@asynccontextmanager
async def serving(log: MemoryLog, **options: Any) -> AsyncIterator[tuple[ReplayServer, httpx.AsyncClient]]:
    async with (
        serve_replay(log, **options) as server,
        httpx.AsyncClient(base_url=server.url, timeout=30) as client,
    ):
        yield server, client


async def stream_until(
    client: httpx.AsyncClient, request: Any, size: int | None = None, path: str = VLLM
) -> bytes:
    """Read a response, or `size` bytes of it and then leave."""
    got = b""
    async with client.stream("POST", path, json=request) as response:
        assert response.status_code == 200, await response.aread()
        async for chunk in response.aiter_raw():
            got += chunk
            if size is not None and len(got) >= size:
                break
    return got


class Reader:
    """Reads a response in a task of its own, so that a test can act while it is on its way."""

    def __init__(self, client: httpx.AsyncClient, request: Any, path: str = VLLM) -> None:
        self.got = b""
        self.changed = asyncio.Event()
        self.task = asyncio.create_task(self._read(client, request, path))

    async def _read(self, client: httpx.AsyncClient, request: Any, path: str) -> bytes:
        async with client.stream("POST", path, json=request) as response:
            async for chunk in response.aiter_raw():
                self.got += chunk
                self.changed.set()
        return self.got

    async def until(self, size: int) -> None:
        while len(self.got) < size:
            self.changed.clear()
            await asyncio.wait_for(self.changed.wait(), 30)


def resumed(log: MemoryLog, *, cancelled: bool = False) -> None:
    """A sample that was aborted after three tokens and went on for three more."""
    name = "generate-tokens-k"
    chunks = (
        [frame([token], name=name) for token in (1, 2, 3)] if cancelled else aborted([1, 2, 3], name=name)
    )
    end = "cancelled" if cancelled else "eof"
    samples = sample(log, "k", PROMPT, [], chunks=chunks, max_tokens=6, end=end)
    sample(log, "k", [*PROMPT, 1, 2, 3], [4, 5, 6], samples=samples)


# Where streams are cut


async def test_an_aborted_stream_waits_for_the_abort_and_is_then_the_recorded_one():
    log = MemoryLog()
    resumed(log)
    recorded = aborted([1, 2, 3], name="generate-tokens-k")
    async with serving(log) as (server, client):
        reader = Reader(client, body(PROMPT, 6))
        await reader.until(sum(map(len, recorded[:3])))
        assert (await client.get("/load?include_inflight=true")).json() == {"server_load": 1}
        assert (await client.post("/abort_requests", json={})).json() == {"status": "aborted", "aborted": 1}
        assert await reader.task == b"".join(recorded)
        went_on = await stream_until(client, body([*PROMPT, 1, 2, 3], 3))
        assert went_on == b"".join(whole([4, 5, 6], 6, name="generate-tokens-k"))
        assert (await client.get("/load")).json() == {"server_load": 0}
    assert server.report().partly == server.report().unused == server.report().misses == []


async def test_a_client_that_left_leaves_again():
    log = MemoryLog()
    resumed(log, cancelled=True)
    size = sum(len(frame([token], name="generate-tokens-k")) for token in (1, 2, 3))
    async with serving(log) as (_, client):
        got = await stream_until(client, body(PROMPT, 6), size)
        assert tokens_of(got) == [1, 2, 3]
        assert tokens_of(await stream_until(client, body([*PROMPT, 1, 2, 3], 3))) == [4, 5, 6]


@pytest.mark.parametrize("cancelled", [False, True])
@pytest.mark.parametrize("kept", [1, 2])
async def test_a_client_that_aborts_early_goes_on_from_there(kept, cancelled):
    log = MemoryLog()
    resumed(log, cancelled=cancelled)
    size = sum(len(frame([token], name="generate-tokens-k")) for token in range(1, kept + 1))
    async with serving(log) as (_, client):
        await stream_until(client, body(PROMPT, 6), size)
        ids = [*PROMPT, *range(1, kept + 1)]
        got = await stream_until(client, body(ids, 6 - kept))
    assert tokens_of(got) == list(range(kept + 1, 7)), "on past the recorded cut, which has happened"
    *_, last, figures = frames_of(got)
    assert last["choices"][0]["finish_reason"] == "length"
    assert last["choices"][0]["weight_versions"] == [{"version": "v1", "start": 0, "end": 6 - kept}]
    assert figures["usage"]["prompt_tokens"] == 3 + kept
    assert figures["usage"]["completion_tokens"] == 6 - kept
    assert figures["usage"]["total_tokens"] == 9
    assert len({each["request_id"] for each in frames_of(got)}) == 1
    assert got.endswith(DONE)


@pytest.mark.parametrize(("at_cut", "tokens"), [("go", [1, 2, 3, 4, 5, 6]), ("end", [1, 2, 3])])
async def test_a_cut_need_not_be_waited_for(at_cut, tokens):
    log = MemoryLog()
    resumed(log)
    async with serving(log, at_cut=at_cut) as (_, client):
        assert tokens_of(await stream_until(client, body(PROMPT, 6))) == tokens


async def test_a_position_inside_a_frame():
    log = MemoryLog()
    name = "generate-tokens-k"
    chunks = [frame([1, 2, 3], name=name), frame([4, 5], "stop", spans=[("v1", 0, 5)], name=name)]
    sample(log, "k", PROMPT, [], chunks=[*chunks, usage(3, 5, name), DONE], max_tokens=5)
    async with serving(log) as (_, client):
        await stream_until(client, body(PROMPT, 5), len(chunks[0]))
        got = await stream_until(client, body([*PROMPT, 1], 4))
    first, last, figures = frames_of(got)
    assert first["choices"][0]["token_ids"] == [2, 3]
    assert first["choices"][0]["logprobs"]["content"] == [
        {"token_id": 2, "logprob": -0.02},
        {"token_id": 3, "logprob": -0.03},
    ]
    assert last["choices"][0]["weight_versions"] == [{"version": "v1", "start": 0, "end": 4}]
    assert figures["usage"]["completion_tokens"] == 4


async def test_an_abort_in_mid_frame_ends_after_the_frame():
    log = MemoryLog()
    sample(log, "k", PROMPT, [1, 2, 3, 4])
    first = frame([1], name="generate-tokens-k")
    stream = b"".join(whole([1, 2, 3, 4], name="generate-tokens-k"))
    chunks = [stream[: len(first) + 20], stream[len(first) + 20 :]]
    log.written.clear()
    sample(log, "k", PROMPT, [], chunks=chunks, max_tokens=4)
    async with serving(log, pace=1) as (server, client):
        for playing in log.written:
            playing[:] = [slow(event) for event in playing]
        server.desk.matcher.recordings[0].forget()
        reader = Reader(client, body(PROMPT, 4))
        await reader.until(len(chunks[0]))
        await client.post("/inference/v1/abort_requests", json={"request_ids": ["generate-tokens-other"]})
        await client.post("/inference/v1/abort_requests", json={"request_ids": ["generate-tokens-k"]})
        got = await reader.task
    name = "generate-tokens-k"
    assert got == b"".join([frame([1], name=name), frame([2], name=name), *aborted([1, 2], name=name)[2:]])


def slow(event: Any) -> Any:
    """Have the second read come after an hour."""
    from rollout_log.events import Reads

    return Reads(event.number, event.sizes, [0, 3_600_000_000]) if isinstance(event, Reads) else event


async def test_the_first_that_is_held_is_named_at_once(caplog):
    caplog.set_level(logging.INFO, "rollout_log")
    log = MemoryLog()
    resumed(log)
    other = [5, 6]
    sample(log, "other", other, [], chunks=aborted([4]), max_tokens=6)
    async with serving(log) as (server, client):
        for prompt in (PROMPT, other):
            reader = Reader(client, body(prompt, 6))
            while not any(each.held for each in server.desk.playing):  # noqa: ASYNC110 - it has no event
                await asyncio.sleep(0.01)
            await client.post("/abort_requests", json={})
            await reader.task
    [said] = [message for message in caplog.messages if "held" in message]
    assert said.startswith("replay: k is held at token 3, where the recording was aborted, until the client")


async def test_what_is_held_for_long_is_named(monkeypatch, caplog):
    monkeypatch.setattr("rollout_log.replay.desk.HELD_S", 0.05)
    log = MemoryLog()
    resumed(log)
    said = asyncio.Event()

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.set()

    listener = Listener(logging.WARNING)
    logging.getLogger("rollout_log").addHandler(listener)
    try:
        async with serving(log) as (_, client):
            reader = Reader(client, body(PROMPT, 6))
            await asyncio.wait_for(said.wait(), 30)
            await client.post("/abort_requests", json={})
            await reader.task
    finally:
        logging.getLogger("rollout_log").removeHandler(listener)
    assert "1 response held where the recording was aborted ('k' request 0)" in caplog.text


# How real engines abort


ABORTED = ["f1-abort-inference-v1", "f2-abort-all-dev", "f2c-abort-text"]


@pytest.mark.parametrize("name", ABORTED)
async def test_an_abort_looks_like_a_real_engines(name):
    """A capture that was aborted by the engine is cut before its abort frame; the server renders that."""
    capture = captures.load(name)
    frames = [block + b"\n\n" for block in capture.body.split(b"\n\n") if block]
    at = next(i for i, each in enumerate(frames) if b'"finish_reason":"abort"' in each)
    log = MemoryLog()
    record(log, "k", VLLM, body_of(name), frames[:at], headers=capture.headers, end="cancelled")
    async with serving(log) as (_, client):
        reader = Reader(client, capture.request["body"])
        await reader.until(sum(map(len, frames[:at])))
        await client.post("/abort_requests", json={})
        assert await reader.task == capture.body


async def test_an_abort_may_carry_a_token():
    log = MemoryLog()
    record_capture(log, "f3-pause-abort")
    capture = captures.load("f3-pause-abort")
    async with serving(log) as (_, client):
        reader = Reader(client, capture.request["body"])
        await reader.until(capture.body.rfind(b"data: ", 0, capture.body.index(b'"finish_reason":"abort"')))
        assert (await client.post("/pause?mode=abort")).json() == {"status": "paused"}
        assert await reader.task == capture.body
        assert (await client.post("/resume")).json() == {"status": "resumed"}


def sglang(tokens: list[int], finish: Any = None, *, incremental: bool = False, last: int = 1) -> bytes:
    shown = tokens[-last:] if incremental else tokens
    return sse(
        {
            "text": "".join(chr(96 + token) for token in shown),
            "output_ids": shown,
            "meta_info": {
                "id": "r1",
                "finish_reason": finish,
                "prompt_tokens": 3,
                "completion_tokens": len(tokens),
                "output_token_logprobs": [[-token / 100, token, None] for token in shown],
            },
        }
    )


def sglang_body(ids: list[int], max_new_tokens: int) -> dict[str, Any]:
    params = {"max_new_tokens": max_new_tokens}
    return {"input_ids": ids, "sampling_params": params, "return_logprob": True, "stream": True}


@pytest.mark.parametrize("incremental", [False, True])
async def test_sglang_goes_on_in_its_own_shape(incremental):
    log = MemoryLog()
    frames = [sglang(list(range(1, end + 1)), incremental=incremental) for end in (1, 2, 3)]
    finish = sglang([1, 2, 3, 4], {"type": "length", "length": 4}, incremental=incremental)
    request = json.dumps(sglang_body(PROMPT, 4)).encode()
    record(log, "k", SGLANG, request, [*frames, finish, DONE])
    async with serving(log) as (_, client):
        await stream_until(client, sglang_body(PROMPT, 4), len(frames[0]) + len(frames[1]), SGLANG)
        got = frames_of(await stream_until(client, sglang_body([*PROMPT, 1, 2], 2), None, SGLANG))
    metas = [each["meta_info"] for each in got]
    assert [meta["completion_tokens"] for meta in metas] == [1, 2]
    assert [meta["prompt_tokens"] for meta in metas] == [5, 5]
    pairs = [[pair[1] for pair in meta["output_token_logprobs"]] for meta in metas]
    assert pairs == ([[3], [4]] if incremental else [[3], [3, 4]])
    assert metas[-1]["finish_reason"] == {"type": "length", "length": 4}


async def test_sglang_aborts_in_its_own_shape():
    log = MemoryLog()
    frames = [sglang([1]), sglang([1, 2])]
    record(log, "k", SGLANG, json.dumps(sglang_body(PROMPT, 4)).encode(), frames, end="cancelled")
    async with serving(log) as (_, client):
        reader = Reader(client, sglang_body(PROMPT, 4), SGLANG)
        await reader.until(sum(map(len, frames)))
        loads = (await client.get("/v1/loads?include=core")).json()["loads"]
        assert [(load["num_running_reqs"], load["num_waiting_reqs"]) for load in loads] == [(1, 0)]
        assert (await client.post("/abort_request", json={"abort_all": True})).status_code == 200
        got = await reader.task
    assert got.startswith(b"".join(frames))
    assert got.endswith(DONE)
    *_, last = frames_of(got)
    assert last["meta_info"]["finish_reason"]["type"] == "abort"
    assert last["meta_info"]["completion_tokens"] == 2
    assert [pair[1] for pair in last["meta_info"]["output_token_logprobs"]] == [1, 2]


# Pauses


async def test_a_pause_that_keeps():
    log = MemoryLog()
    sample(log, "k", PROMPT, [1, 2])
    async with serving(log) as (_, client):
        await client.post("/pause?mode=keep")
        async with client.stream("POST", VLLM, json=body(PROMPT, 2)) as response:
            assert response.status_code == 200, "headers come at once, frames after the pause"
            assert (await client.get("/is_paused")).json() == {"is_paused": True}
            await client.post("/resume")
            assert tokens_of(await response.aread()) == [1, 2]


async def paused(client: httpx.AsyncClient) -> None:
    if not (await client.get("/is_paused")).json()["is_paused"]:
        await paused(client)


async def test_a_pause_that_waits_lets_streams_end():
    log = MemoryLog()
    resumed(log)
    sample(log, "new", [5], [6])
    async with serving(log) as (_, client):
        running = Reader(client, body(PROMPT, 6))
        await running.until(len(frame([1], name="generate-tokens-k")))
        pausing = asyncio.create_task(client.post("/pause?mode=wait"))
        await paused(client)
        later = Reader(client, body([5], 1))
        await client.post("/abort_requests", json={"request_ids": ["generate-tokens-k"]})
        await running.task
        assert (await pausing).json() == {"status": "paused"}
        assert not later.got
        await client.post("/resume")
        assert tokens_of(await later.task) == [6]


async def test_a_pause_of_no_known_kind_is_refused():
    async with serving(MemoryLog()) as (_, client):
        assert (await client.post("/pause?mode=stop")).status_code == 400


# What it answers


async def test_the_endpoints_that_trainers_ask():
    log = MemoryLog()
    sample(log, "k", PROMPT, [1])
    record_capture(log, "p6-chat-render")
    async with serving(log) as (server, client):
        for path in ("/health", "/health_generate", "/"):
            assert (await client.get(path)).status_code == 200
        assert (await client.get("/workers")).json()["workers"][0]["url"] == server.url
        assert "tiny" in [model["id"] for model in (await client.get("/v1/models")).json()["data"]]
        assert (await client.get("/version")).json()["version"].startswith("rollout-log-")
        assert 'vllm:num_requests_running{model_name="tiny"} 0' in (await client.get("/metrics")).text
        assert (await client.get("/weight_info")).json() == {"weight_version": "default"}
        updated = await client.post("/update_weight_version", json={"new_version": 7})
        assert updated.json()["new_version"] == "7"
        for path in ("/weight_info", "/get_weight_version", "/model_info"):
            assert (await client.get(path)).json()["weight_version"] == "7"
        rendered = await client.post("/v1/chat/completions/render", content=body_of("p6-chat-render"))
        assert rendered.content == captures.load("p6-chat-render").body
        missing = await client.post("/no/such/path", json={})
        assert missing.status_code == 404
        assert missing.json()["error"]["type"] == "ReplayMiss"


@pytest.mark.parametrize(
    "name", ["p1-completions-nonstream", "p3-chat-nonstream", "p3-chat-stream", "p1-completions-stream"]
)
async def test_the_openai_endpoints(name):
    log = MemoryLog()
    record_capture(log, name)
    capture = captures.load(name)
    async with serving(log) as (_, client):
        response = await client.post(capture.request["path"], json=capture.request["body"])
    assert response.content == capture.body
    assert response.headers["content-type"] == dict(capture.headers)["content-type"]


async def test_a_miss_says_what_comes_nearest():
    log = MemoryLog()
    sample(log, "k", PROMPT, [1])
    async with serving(log) as (server, client):
        response = await client.post(VLLM, json=body([7, 8, 10], 1))
    assert response.status_code == 404
    assert "the nearest is k: token 2 is 10, recorded 9" in response.json()["error"]["message"]
    assert len(server.report().misses) == 1
    assert server.report().unused == ["k"]
