"""Small streams from public bug reports, through the library tap and through the proxy."""

from __future__ import annotations

import asyncio
import json

import httpx
import pytest

import cases
from raw_server import RawStream, play
from rollout_log.log import Log, LogReader
from rollout_log.record import GenerationFailed, Recorder
from rollout_log.record.proxy import serve_proxy
from rollout_log.record.retry import Backoff
from rollout_log.view import SampleView, view


def shown(log: Log, key: str) -> tuple[SampleView, list[SampleView]]:
    """Return a sample and its choices as a fresh reader folds them."""
    log.flush_sync()
    with LogReader.open(log.path) as reader:
        rollout = reader.rollout(reader.find(key))
    choices = sorted(rollout.choices)
    return view(rollout), [view(rollout, choice=i) for i in choices] if len(choices) > 1 else []


async def through_library(log: Log, case: cases.Case, streams: list[RawStream], key: str) -> None:
    async with play(*streams) as engine, httpx.AsyncClient() as client:
        recorder = Recorder(log, client, backoff=Backoff(tries=0), no_terminal="abort")
        for request, stream in zip(case.requests, streams, strict=True):
            whole = asyncio.Event()
            calls = {"on_read": lambda _, whole=whole: whole.set()} if stream.end == "hang" else {}
            call = recorder.generate(key, engine.url + case.path, request["body"], **calls)
            task = asyncio.create_task(call)
            if stream.end == "hang":
                await whole.wait()
                task.cancel()
            try:
                await task
            except asyncio.CancelledError:
                assert stream.end == "hang"
            except GenerationFailed:
                assert stream.end != "hang"


async def through_proxy(log: Log, case: cases.Case, streams: list[RawStream], key: str) -> None:
    async with play(*streams) as engine, serve_proxy(log, engine.url) as proxy, httpx.AsyncClient() as client:
        for request, stream in zip(case.requests, streams, strict=True):
            headers = {"x-rollout-log-key": key}
            url = proxy.url + case.path
            body = b""
            try:
                async with client.stream("POST", url, json=request["body"], headers=headers) as response:
                    async for chunk in response.aiter_raw():
                        body += chunk
                        if stream.end == "hang" and body == stream.body:
                            break
            except httpx.TransportError:
                assert stream.end in ("incomplete", "reset")
            assert body == stream.body
            if stream.end == "hang":
                await asyncio.wait_for(engine.left.wait(), 10)


@pytest.mark.parametrize("tap", [through_library, through_proxy])
@pytest.mark.parametrize("name", cases.names())
async def test_case(tmp_path, name, tap):
    case = cases.load(name)
    log = Log.open(tmp_path / "log", durability="window")
    try:
        for number, streams in enumerate(case.variants()):
            await asyncio.wait_for(tap(log, case, streams, f"k{number}"), 30)
        for key in [f"k{i}" for i in range(number + 1)]:
            cases.check(case.expect, *shown(log, key))
    finally:
        log.close()


def test_the_cases_are_all_there():
    assert len(cases.names()) == 13
    framing = cases.load("framing")
    assert len(list(framing.variants())) > 2 * len(framing.streams()[0])
    assert json.loads((cases.FOLDER / "framing.json").read_text())["requests"][0]["splits"] == "every"
