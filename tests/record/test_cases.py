"""Small streams from public bug reports, through the library tap and through the proxy."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable

import httpx
import pytest

import cases
from raw_server import RawServer, RawStream, play
from rollout_log.log import Log, LogReader
from rollout_log.record import GenerationFailed, Recorder
from rollout_log.record.proxy import serve_proxy
from rollout_log.record.retry import Backoff
from rollout_log.view import SampleView, view

Tap = Callable[[cases.Case, list[RawStream], str], Awaitable[None]]


def library(log: Log, engine: RawServer, client: httpx.AsyncClient) -> Tap:
    recorder = Recorder(log, client, backoff=Backoff(tries=0), no_terminal="abort")

    async def tap(case: cases.Case, streams: list[RawStream], key: str) -> None:
        for request, stream in zip(case.requests, streams, strict=True):
            whole = asyncio.Event()
            calls = (
                {"on_read": lambda rollout, whole=whole: rollout.length and whole.set()}
                if stream.end == "hang"
                else {}
            )
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

    return tap


def proxied(url: str, engine: RawServer, client: httpx.AsyncClient) -> Tap:
    async def tap(case: cases.Case, streams: list[RawStream], key: str) -> None:
        for request, stream in zip(case.requests, streams, strict=True):
            headers = {"x-rollout-log-key": key}
            body = b""
            try:
                async with client.stream(
                    "POST", url + case.path, json=request["body"], headers=headers
                ) as response:
                    async for chunk in response.aiter_raw():
                        body += chunk
                        if stream.end == "hang" and body == stream.body:
                            break
            except httpx.TransportError:
                assert stream.end in ("incomplete", "reset")
            assert body == stream.body
            if stream.end == "hang":
                await asyncio.wait_for(engine.left.wait(), 10)

    return tap


@pytest.mark.parametrize("through", ["library", "proxy"])
@pytest.mark.parametrize("name", cases.names())
async def test_case(tmp_path, name, through, monkeypatch):
    monkeypatch.setattr("rollout_log.record.exchange.FOLD_AT", 1)  # so that the client leaves at once
    case = cases.load(name)
    log = Log.open(tmp_path / "log", durability="window")
    waiting: list[RawStream] = []
    async with contextlib.AsyncExitStack() as stack:
        engine = await stack.enter_async_context(play(choose=lambda _: waiting.pop(0)))
        client = await stack.enter_async_context(httpx.AsyncClient())
        if through == "proxy":
            proxy = await stack.enter_async_context(serve_proxy(log, engine.url))
            tap = proxied(proxy.url, engine, client)
        else:
            tap = library(log, engine, client)
        keys = []
        for number, streams in enumerate(case.variants()):
            waiting[:] = streams
            keys.append(f"k{number}")
            await asyncio.wait_for(tap(case, streams, keys[-1]), 30)
            assert not waiting
    log.close()
    with LogReader.open(log.path) as reader:
        for key in keys:
            cases.check(case.expect, *shown(reader, key))


def shown(reader: LogReader, key: str) -> tuple[SampleView, list[SampleView]]:
    """Return a sample and its choices as a fresh reader folds them."""
    rollout = reader.rollout(reader.find(key))
    choices = sorted(rollout.choices)
    return view(rollout), [view(rollout, choice=i) for i in choices] if len(choices) > 1 else []


def test_the_cases_are_all_there():
    assert len(cases.names()) == 13
    framing = cases.load("framing")
    assert len(list(framing.variants())) > 2 * len(framing.streams()[0])
    assert json.loads((cases.FOLDER / "framing.json").read_text())["requests"][0]["splits"] == "every"
