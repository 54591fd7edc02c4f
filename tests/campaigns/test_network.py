"""Connections that drop, refuse and redirect; cancels, pools and soaks: nothing is lost and nothing leaks."""

from __future__ import annotations

import asyncio
import gc
import gzip
import json
import os
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import httpx
import pytest

from raw_server import EVENT_STREAM, RawStream, play
from recorded import PATH, frame
from rollout_log.http_server import Request, Responder, serve
from rollout_log.log import Log, LogReader
from rollout_log.log.verify import verify
from rollout_log.record import GenerationFailed, GenerationRefused, Recorder
from rollout_log.record.proxy import serve_proxy
from rollout_log.record.retry import Backoff
from rollout_log.record.samples import Samples

LENGTH = 6
BODY = {"token_ids": [1, 2], "sampling_params": {"max_tokens": 50, "logprobs": 1, "temperature": 1.0}}
QUICK = Backoff(first=0.001, longest=0.002, tries=3)


def frames(start: int = 0) -> list[bytes]:
    return [frame(10 + n, finish="stop" if n == LENGTH - 1 else None) for n in range(start, LENGTH)]


def descriptors() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def memory() -> int:
    """Resident bytes, but for pages of files, which the kernel takes back when it wants to."""
    resident, shared = map(int, Path("/proc/self/statm").read_text().split()[1:3])
    return (resident - shared) * os.sysconf("SC_PAGE_SIZE")


@asynccontextmanager
async def nothing_leaks(client: httpx.AsyncClient | None = None) -> AsyncIterator[None]:
    """As many tasks and files at the end as at the beginning, and no connection in use."""
    gc.collect()
    tasks, files = len(asyncio.all_tasks()), descriptors()
    yield
    if client is not None:
        pool = client._transport._pool
        assert all(connection.is_idle() or connection.is_closed() for connection in pool.connections)
        await client.aclose()
    for _ in range(200):
        gc.collect()
        if len(asyncio.all_tasks()) <= tasks and descriptors() <= files:
            return
        await asyncio.sleep(0.05)
    raise AssertionError(f"{len(asyncio.all_tasks()) - tasks} tasks, {descriptors() - files} files are left")


@pytest.mark.parametrize("end", ["incomplete", "reset"])
async def test_a_drop_after_every_frame(end, tmp_path):
    """The connection is lost after each number of frames, and in mid-frame; the retry has it all."""
    whole = b"".join(frames())
    cuts = [len(b"".join(frames()[:n])) + within for n in range(LENGTH) for within in (0, 7)]
    log = Log.open(tmp_path / "log", window_ms=10)
    async with httpx.AsyncClient() as client, nothing_leaks(client):
        for cut in cuts:
            async with play(RawStream(body=whole[:cut], end=end), RawStream(body=whole)) as engine:
                rollout = await Recorder(log, client, backoff=QUICK).generate(
                    f"k{cut}", engine.url + PATH, BODY
                )
                assert rollout.choice().token_ids == [10 + n for n in range(LENGTH)]
                finished_before = cut == len(whole)
                assert len(engine.requests) == (1 if finished_before else 2)
    log.close()
    with LogReader.open(tmp_path / "log") as reader:
        for cut in cuts:
            rollout = reader.rollout(f"k{cut}")
            assert rollout.choice().token_ids == [10 + n for n in range(LENGTH)]
            assert rollout.discarded == min(cut // len(frames()[0]), LENGTH - 1)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


async def test_hosts_that_cannot_be_reached():
    async with (
        serve(lambda request, responder: responder.answer(200, b"")) as plain,
        httpx.AsyncClient() as client,
    ):
        recorder = Recorder(None, client, backoff=QUICK)
        async with nothing_leaks():
            for url in (
                f"http://127.0.0.1:{free_port()}",
                "http://no-such-host.invalid:8000",
                plain.url.replace("http://", "https://"),
            ):
                with pytest.raises(GenerationFailed, match="given up after 4 requests") as failed:
                    await recorder.generate("k", url + PATH, BODY)
                assert url in str(failed.value)
                assert failed.value.rollout.status == "aborted"


@pytest.fixture
def proxied(monkeypatch):
    """An environment that sends everything through a proxy that is not there."""
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(name, f"http://127.0.0.1:{free_port()}")
        monkeypatch.setenv(name.lower(), f"http://127.0.0.1:{free_port()}")
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.delenv("no_proxy", raising=False)


async def test_our_own_clients_do_not_take_a_proxy_from_the_environment(proxied, tmp_path):
    with Log.open(tmp_path / "log") as log:
        async with (
            play(RawStream(body=b"".join(frames()))) as engine,
            serve_proxy(log, engine.url) as proxy,
            httpx.AsyncClient(trust_env=False) as client,
        ):
            answer = await client.post(proxy.url + PATH, json=BODY)
            assert (answer.status_code, answer.content) == (200, b"".join(frames()))


async def test_an_engine_on_ipv6(tmp_path):
    async def handle(request: Request, responder: Responder) -> None:
        await responder.start(200, EVENT_STREAM)
        responder.send(b"".join(frames()))
        await responder.finish()

    async with serve(handle, "::1") as engine, httpx.AsyncClient() as client:
        rollout = await Recorder(None, client).generate("k", engine.url + PATH, BODY)
        assert rollout.status == "completed"
        async with serve_proxy(None, engine.url, "::1") as proxy:
            assert "[::1]" in proxy.url
            assert (await client.post(proxy.url + PATH, json=BODY)).content == b"".join(frames())


async def test_a_redirect_is_not_followed():
    moved = RawStream(307, [("location", "http://127.0.0.1:1/elsewhere"), ("content-length", "0")])
    async with play(moved, moved) as engine, httpx.AsyncClient() as client:
        with pytest.raises(GenerationRefused, match="a redirect; give the final URL"):
            await Recorder(None, client, backoff=QUICK).generate("k", engine.url + PATH, BODY)
        async with serve_proxy(None, engine.url) as proxy:
            assert (await client.post(proxy.url + PATH, json=BODY)).status_code == 307


async def test_a_compressed_answer_is_passed_on_marked_and_refused(tmp_path):
    """Though `identity` was asked for. Trying again would not help."""
    body = gzip.compress(b"".join(frames()))
    headers = [*EVENT_STREAM, ("content-encoding", "gzip")]
    log = Log.open(tmp_path / "log")
    async with play(RawStream(200, headers, body), RawStream(200, headers, body)) as engine:
        async with httpx.AsyncClient() as client, serve_proxy(log, engine.url) as proxy:
            answer = await client.post(proxy.url + PATH, json=BODY, headers={"x-rollout-log-key": "k"})
            assert answer.content == b"".join(frames())
            with pytest.raises(GenerationRefused, match="compressed"):
                await Recorder(log, client, backoff=QUICK).generate("l", engine.url + PATH, BODY)
        assert [request.header("accept-encoding") for request in engine.requests] == ["identity"] * 2
    log.close()
    with LogReader.open(tmp_path / "log") as reader:
        for key in ("k", "l"):
            rollout = reader.rollout(key)
            assert [mark.fields["encoding"] for mark in rollout.marks] == ["gzip"]
            assert rollout.length == 0


class Engine:
    """Streams that wait for `go` after their first frame, then send the rest in turns."""

    def __init__(self) -> None:
        self.open = self.most = 0
        self.go = asyncio.Event()

    async def __call__(self, request: Request, responder: Responder) -> None:
        if request.method == "GET":  # somebody asks for its health
            await responder.answer(200, b"")
            return
        self.open += 1
        self.most = max(self.most, self.open)
        try:
            await responder.start(200, EVENT_STREAM)
            kept = len(json.loads(request.body)["token_ids"]) - 2
            first, *rest = frames(kept)
            responder.send(first)
            await self.go.wait()
            for each in rest:
                responder.send(each)
                await responder.drain()
            await responder.finish()
        finally:
            self.open -= 1


LIMITS = httpx.Limits(max_connections=None, max_keepalive_connections=None)


@pytest.mark.parametrize("streams", [128, pytest.param(4096, marks=pytest.mark.campaign)])
async def test_many_streams_at_once(streams, tmp_path):
    """Into one log. By 128 a client: what httpx does for a request grows with the connections of its pool."""
    engine = Engine()
    log = Log.open(tmp_path / "log")
    async with serve(engine) as server, nothing_leaks(), AsyncExitStack() as stack:
        samples, url = Samples(log), server.url + PATH
        calls = []
        for first in range(0, streams, 128):
            client = await stack.enter_async_context(
                httpx.AsyncClient(timeout=None, limits=LIMITS, verify=False, trust_env=False)
            )
            recorder = Recorder(log, client, samples=samples)
            calls += [
                asyncio.create_task(recorder.generate(f"k{n}", url, BODY)) for n in range(first, first + 128)
            ]
        while engine.open < streams:  # noqa: ASYNC110 - counted by the engine
            await asyncio.sleep(0.05)
        engine.go.set()
        rollouts = await asyncio.wait_for(asyncio.gather(*calls), 300)
        expected = tuple(range(10, 10 + LENGTH))
        assert {tuple(rollout.choice().token_ids) for rollout in rollouts} == {expected}
    log.close()
    assert engine.most == streams
    with LogReader.open(tmp_path / "log") as reader:
        assert sum(1 for entry in reader.samples(status="completed")) == streams
        assert reader.rollout("k0").choice().token_ids == list(expected)


@pytest.mark.parametrize("cancels", [60, pytest.param(1000, marks=pytest.mark.campaign)])
async def test_cancels_in_mid_stream_half_of_them_twice(cancels, tmp_path):
    """Over a pool of 10 connections, which are all free afterwards: ten streams then run at once."""
    engine = Engine()
    log = Log.open(tmp_path / "log")
    limits = httpx.Limits(max_connections=10)
    async with (
        serve(engine) as server,
        httpx.AsyncClient(timeout=None, limits=limits) as client,
        nothing_leaks(client),
    ):
        recorder = Recorder(log, client)
        url = server.url + PATH

        async def one(number: int) -> None:
            call = asyncio.create_task(recorder.generate(f"k{number}", url, BODY))
            while (  # noqa: ASYNC110 - no event for it
                not ((sample := recorder.samples.get(f"k{number}")) and sample.rollout.length) and number % 3
            ):
                await asyncio.sleep(0)
            call.cancel()
            if number % 2:
                await asyncio.sleep(0)
                call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call

        for start in range(0, cancels, 20):
            await asyncio.gather(*(one(number) for number in range(start, min(start + 20, cancels))))
        engine.go.set()
        after = [asyncio.create_task(recorder.generate(f"after{n}", url, BODY)) for n in range(30)]
        rollouts = await asyncio.wait_for(asyncio.gather(*after), 60)
        assert {rollout.status for rollout in rollouts} == {"completed"}
    log.close()
    assert engine.open == 0
    assert engine.most <= 20
    assert verify(tmp_path / "log").damage == []
    with LogReader.open(tmp_path / "log") as reader:
        statuses = [entry.summary.status for entry in reader.samples(key_prefix="k")]
        lengths = [
            entry.summary.tokens for entry in reader.samples(key_prefix="k") if int(entry.summary.key[1:]) % 3
        ]
    assert set(statuses) == {"aborted"}
    assert set(lengths) == {1}, "what had come by then is kept"


async def test_a_pool_that_is_used_up_serves_everybody_in_turn():
    engine = Engine()
    engine.go.set()
    limits = httpx.Limits(max_connections=10)
    async with (
        serve(engine) as server,
        httpx.AsyncClient(timeout=None, limits=limits) as client,
        nothing_leaks(client),
    ):
        recorder = Recorder(None, client)
        calls = (recorder.generate(f"k{n}", server.url + PATH, BODY) for n in range(200))
        rollouts = await asyncio.wait_for(asyncio.gather(*calls), 60)
    assert {rollout.status for rollout in rollouts} == {"completed"}
    assert engine.most <= 10


def soak(samples: int, tokens: int, log: Log) -> None:
    """Feed samples through, each in the way a tap does, 50 frames a read, and let go of them."""
    taken, body = Samples(log), json.dumps(BODY).encode()
    wire = [frame(10 + n, finish="stop" if n == tokens - 1 else None) for n in range(tokens)]
    reads = [b"".join(wire[at : at + 50]) for at in range(0, tokens, 50)]
    for number in range(samples):
        exchange = taken.request(f"k{number}", path=PATH, body=body)
        exchange.respond(200, EVENT_STREAM)
        for read in reads:
            exchange.feed(read)
        exchange.end("cancelled" if number % 5 == 0 else "eof")
        taken.forget(exchange.key)
        if number * tokens % 12_000 == 0:
            assert log.flush_sync()


@pytest.mark.campaign
@pytest.mark.parametrize(("samples", "tokens", "events"), [(100_000, 6, 900_000), (9_000, 1000, 9_000_000)])
def test_memory_stays_flat_over_millions_of_events(tmp_path, samples, tokens, events):
    """What the writer keeps of a sample is two integers; of an event nothing."""
    with Log.open(tmp_path / "log", window_ms=20, max_bytes=1 << 30) as log:
        soak(samples // 5, tokens, log)
        gc.collect()
        before, so_far = memory(), log.counters.events
        soak(samples, tokens, log)
        assert log.flush_sync()
        gc.collect()
        grown, more = memory() - before, log.counters.events - so_far
        print(f"{more} events of {samples} samples: {grown / 1e6:.1f} MB more")
        assert more > events
        assert grown < 10_000_000
        assert log.counters.dropped_requests == 0
