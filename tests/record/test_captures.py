"""What a real engine sent, served raw, recorded through the proxy, and folded by a fresh reader."""

from __future__ import annotations

import asyncio
import json
import math

import httpx
import pytest

import captures
from raw_server import RawStream, captured, play
from reading import read
from rollout_log.fold import Rollout
from rollout_log.log import Log, LogReader
from rollout_log.record.proxy import serve_proxy
from rollout_log.record.samples import Samples

ALL = captures.names()
STREAMS = [name for name in ALL if captures.load(name).is_sse]
TWINS = [name for name in ALL if f"{name}-nonstream" in ALL]


def body_of(capture: captures.Capture) -> bytes:
    raw = capture.request.get("raw_body")
    return raw.encode() if raw is not None else json.dumps(capture.request["body"]).encode()


def taken_in(capture: captures.Capture) -> Rollout:
    """Fold a capture without a network."""
    exchange = Samples(None).request("k", path=capture.request["path"], body=body_of(capture))
    exchange.respond(capture.status or 200, capture.headers)
    exchange.feed(capture.body)
    exchange.end("eof" if capture.ended == "eof" else "reset")
    assert exchange.broken is None
    return exchange.rollout


def check(capture: captures.Capture, rollout: Rollout) -> None:
    """Assert that a fold says what an independent reading of the bytes says."""
    expected = read(capture)
    (request,) = rollout.requests
    assert request.http_status == capture.status
    assert rollout.usage == expected.usage
    if capture.is_sse:
        assert request.deltas == expected.frames
    if expected.error is not None:
        assert rollout.status == "failed"
        assert request.error == expected.error
    for index, reading in expected.choices.items():
        choice = rollout.choice(index)
        assert choice.token_ids == reading.token_ids
        known = [logprob for logprob in choice.logprobs if not math.isnan(logprob)]
        assert known == reading.logprobs
        assert choice.finish_reason == reading.finish_reason
        assert choice.stop_reason == reading.stop_reason
        if reading.versions:
            assert [(s.version, s.start, s.end) for s in choice.told] == reading.versions
    assert not [problem for problem in rollout.problems if problem.severity != "info"]


async def test_every_capture_through_the_proxy(tmp_path):
    log = Log.open(tmp_path / "log")
    served = [name for name in ALL if captures.load(name).status is not None]
    by_key = {name: captured(captures.load(name)) for name in served}

    def choose(request) -> RawStream:
        return by_key[request.header("x-request-key")]

    async with (
        play(choose=choose) as engine,
        serve_proxy(log, engine.url) as proxy,
        httpx.AsyncClient() as client,
    ):
        for name in served:
            capture = captures.load(name)
            got = b""
            try:
                async with client.stream(
                    capture.request["method"],
                    proxy.url + capture.request["path"],
                    content=body_of(capture),
                    headers={"x-rollout-log-key": name, "x-request-key": name},
                ) as response:
                    assert response.status_code == capture.status
                    async for chunk in response.aiter_raw():
                        got += chunk
            except httpx.TransportError:
                assert capture.ended == "cut"
            assert got == capture.body
    log.close()
    with LogReader.open(tmp_path / "log") as reader:
        recorded = {entry.summary.key for entry in reader.samples()}
        assert recorded == {name for name in served if captures.load(name).request["method"] == "POST"}
        for name in recorded:
            check(captures.load(name), reader.rollout(reader.find(name)))


@pytest.mark.parametrize("name", TWINS)
def test_a_stream_folds_to_its_non_streamed_twin(name):
    streamed = taken_in(captures.load(name))
    whole = taken_in(captures.load(f"{name}-nonstream"))
    assert streamed.choices.keys() == whole.choices.keys()
    for index, choice in streamed.choices.items():
        twin = whole.choice(index)
        assert choice.token_ids == twin.token_ids
        assert (choice.finish_reason, choice.stop_reason) == (twin.finish_reason, twin.stop_reason)
        assert [str(x) for x in choice.logprobs] == [str(x) for x in twin.logprobs]


@pytest.mark.parametrize("name", STREAMS)
def test_cut_at_every_byte(name):
    capture = captures.load(name)
    exchange = Samples(None).request("k", path=capture.request["path"], body=body_of(capture))
    exchange.respond(capture.status or 200, capture.headers)
    rollout = exchange.rollout
    if capture.status != 200:
        pytest.skip("an error body, whatever its type says")
    ends = dict(read(capture).ends)
    expected, first = 0, rollout.choice(0)
    for at in range(1, len(capture.body) + 1):
        exchange.feed(capture.body[at - 1 : at])
        expected = ends.get(at, expected)
        if len(first.token_ids) != expected:
            pytest.fail(f"cut after byte {at}: {len(first.token_ids)} tokens, not {expected}")
    assert first.token_ids == (read(capture).choices[0].token_ids if read(capture).choices else [])


@pytest.mark.parametrize("at", [0, 1, 500, 5000, 8638])
async def test_a_cut_stream_is_an_aborted_sample(tmp_path, at):
    capture = captures.load("f1-abort-inference-v1")
    stream = RawStream(200, capture.headers, capture.body[:at], end="incomplete")
    log = Log.open(tmp_path / "log")
    async with play(stream) as engine, serve_proxy(log, engine.url) as proxy, httpx.AsyncClient() as client:
        with pytest.raises(httpx.RemoteProtocolError):
            await asyncio.wait_for(
                client.post(
                    proxy.url + capture.request["path"],
                    json=capture.request["body"],
                    headers={"x-rollout-log-key": "k"},
                ),
                30,
            )
    log.close()
    with LogReader.open(tmp_path / "log") as reader:
        rollout = reader.rollout(reader.find("k"))
    whole = [tokens for end, tokens in read(capture).ends if end <= at]
    assert rollout.length == (whole[-1] if whole else 0)
    assert rollout.status == "aborted"
    finished = b'"finish_reason":"abort"' in capture.body[:at]
    assert rollout.ended_of(rollout.requests[0]) == ("aborted" if finished else "reset")
