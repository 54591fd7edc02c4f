"""Recorded is returned is what the engine answers without streaming; cuts and kills change nothing."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import httpx
import pytest

from engine.folded import told
from engine.server import Engine
from engine.wire import GENERATE, GREEDY, PROMPT, ask_all, body, mixture
from rollout_log.fold import Rollout
from rollout_log.log import Log, LogReader
from rollout_log.record import Recorder
from rollout_log.record.retry import Backoff

pytestmark = pytest.mark.engine


@pytest.fixture
async def client() -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(timeout=120.0, limits=httpx.Limits(), trust_env=False) as client:
        yield client


async def test_64_streams_are_recorded_as_returned_as_answered(url, engine, client, tmp_path):
    requests = mixture(64)
    with contextlib.closing(Log.open(tmp_path / "log")) as log:
        async with Recorder(log, client) as recorder:
            calls = [recorder.generate(key, url + GENERATE, request) for key, request in requests.items()]
            returned = await asyncio.gather(*calls)
    answered = await asyncio.to_thread(ask_all, engine.url, list(requests.values()))
    assert [told(rollout) for rollout in returned] == answered
    assert [problem for rollout in returned for problem in rollout.problems] == []
    with LogReader.open(tmp_path / "log") as reader:
        assert [told(reader.rollout(key)) for key in requests] == answered


@pytest.mark.parametrize("how", ["inference", "all", "pause", "cancel", "stop"])
async def test_a_generation_cut_and_resumed_equals_one_that_was_not(how, url, engine, client, tmp_path):
    chance = random.Random(how)
    kept: list[int] = []
    cuts: list[int] = []
    with contextlib.closing(Log.open(tmp_path / "log")) as log:
        async with Recorder(log, client) as recorder:
            for number in range(5):
                # The last request is left alone; how far the others get depends on the engine's pace.
                last = number == 4
                request = body(prompt=PROMPT + kept, **GREEDY, max_tokens=50 if last else 8000 - len(kept))
                request["request_id"] = f"{how}-{number}"
                at = len(kept) + (1000 if last else chance.choice([0, *range(1, 100)]))
                call = _Call(recorder, url, request)
                rollout = await call.run_until(at, how, lambda call=call: _abort(client, engine, how, call))
                assert rollout.status == ("truncated" if last else "aborted")
                cuts.append(len(kept))
                kept = list(rollout.choice().token_ids)
    (whole,) = await asyncio.to_thread(ask_all, engine.url, [body(**GREEDY, max_tokens=len(kept))])
    assert told(rollout) == whole
    assert [request.base for request in rollout.requests] == cuts == sorted(cuts)
    with LogReader.open(tmp_path / "log") as reader:
        assert told(reader.rollout("k")) == whole


async def test_kill_9_of_the_engine_loses_and_doubles_no_token(engine, router, client, tmp_path):
    requests = {
        f"s{number}": body(prompt=PROMPT[: 3 + number], **GREEDY, max_tokens=1500) for number in range(16)
    }
    answered = await asyncio.to_thread(ask_all, engine.url, list(requests.values()))
    lengths = dict.fromkeys(requests, 0)
    under_way = asyncio.Event()

    def watch(key: str) -> Callable[[Rollout], None]:
        def on_read(rollout: Rollout) -> None:
            lengths[key] = rollout.length
            if min(lengths.values()) >= 20:
                under_way.set()

        return on_read

    with contextlib.closing(Log.open(tmp_path / "log")) as log:
        backoff = Backoff(first=0.5, longest=2.0, tries=1000)
        async with Recorder(log, client, backoff=backoff) as recorder:
            tasks = [
                asyncio.create_task(
                    recorder.generate(
                        key,
                        (router if number % 2 else engine).url + GENERATE,
                        request,
                        on_read=watch(key),
                        weight_version="default",
                    )
                )
                for number, (key, request) in enumerate(requests.items())
            ]
            await asyncio.wait_for(under_way.wait(), 60)
            await asyncio.to_thread(engine.kill9)
            assert not any(task.done() for task in tasks)
            await asyncio.to_thread(engine.start)
            returned = await asyncio.wait_for(asyncio.gather(*tasks), 120)
    assert [told(rollout) for rollout in returned] == answered
    # Not one began anew: each went on from what it had, and nothing it had was thrown away.
    assert all(rollout.requests[-1].base >= 20 and rollout.discarded == 0 for rollout in returned)
    with LogReader.open(tmp_path / "log") as reader:
        assert [told(reader.rollout(key)) for key in requests] == answered


class _Call:
    """One request for the sample `k`."""

    def __init__(self, recorder: Recorder, url: str, request: dict[str, Any]) -> None:
        self.recorder = recorder
        self.url = url
        self.request = request

    async def run_until(self, at: int, how: str, abort: Callable[[], Awaitable[None]]) -> Rollout:
        """Generate, and abort when the response has `at` tokens."""
        reached = asyncio.Event()

        def on_read(rollout: Rollout) -> None:
            if rollout.length >= at:
                reached.set()

        options = {"should_stop": reached.is_set} if how == "stop" else {}
        generating = asyncio.create_task(
            self.recorder.generate("k", self.url + GENERATE, self.request, on_read=on_read, **options)
        )
        waiting = asyncio.create_task(reached.wait())
        await asyncio.wait({generating, waiting}, return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        if how == "cancel":
            generating.cancel()
        elif how != "stop" and not generating.done():
            await abort()
        try:
            return await generating
        except asyncio.CancelledError:
            return self.recorder.samples.get("k").rollout


async def _abort(client: httpx.AsyncClient, engine: Engine, how: str, call: _Call) -> None:
    if how == "pause":
        (await client.post(f"{engine.url}/pause", params={"mode": "abort"})).raise_for_status()
        (await client.post(f"{engine.url}/resume")).raise_for_status()
    elif how == "all":
        (await client.post(f"{engine.url}/abort_requests", json={})).raise_for_status()
    else:
        named = {"request_ids": [f"generate-tokens-{call.request['request_id']}"]}
        (await client.post(f"{engine.url}/inference/v1/abort_requests", json=named)).raise_for_status()
