"""The library tap between two beats: what was read is nowhere stale where it counts, and errors come out."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from raw_server import RawStream, play
from recorded import PATH, frame
from rollout_log.errors import RecordingFailed
from rollout_log.fold import Rollout
from rollout_log.log import Log, LogReader
from rollout_log.record import Recorder
from rollout_log.record.exchange import FOLD_AT

BODY = {"token_ids": [1, 2], "sampling_params": {"max_tokens": 9, "logprobs": 1}}
HELD = RawStream(body=frame(11) + frame(12), reads=[len(frame(11))], end="hang", delay=0.01)
FINISHED = RawStream(body=frame(11) + frame(12, finish="stop"), end="hang")


@pytest.fixture
def _no_beats(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next beat is an hour away."""
    monkeypatch.setattr("rollout_log.log.writer._HELD_BACK", 1e6)


class Streaming:
    """A call whose stream goes on until something is done to it."""

    def __init__(self, recorder: Recorder, url: str) -> None:
        self.recorder, self.url = recorder, url
        self.read = asyncio.Event()
        self.aborts = False
        self.came = b""
        self.seen: list[int] = []
        """Lengths that were told."""

    def begin(self, whole: bytes, **options: Any) -> asyncio.Task[Rollout]:
        def on_chunk(chunk: bytes) -> None:
            self.came += chunk
            if self.came == whole:
                self.read.set()

        options = {
            "on_chunk": on_chunk,
            "on_read": lambda rollout: self.seen.append(rollout.length),
            "should_stop": lambda: self.aborts,
            **options,
        }
        return asyncio.create_task(self.recorder.generate("k", self.url + PATH, BODY, **options))

    @property
    def rollout(self) -> Rollout:
        sample = self.recorder.samples.get("k")
        assert sample is not None
        return sample.rollout


async def streaming(
    stream: RawStream, log: Log | None, act: Callable[[Streaming, asyncio.Task[Rollout]], Awaitable[Any]]
) -> Any:
    """Read a whole stream, and then act."""
    async with play(stream) as engine, httpx.AsyncClient() as client:
        call = Streaming(Recorder(log, client), engine.url)
        task = call.begin(stream.body)
        await asyncio.wait_for(call.read.wait(), 20)
        return await asyncio.wait_for(act(call, task), 20)


async def cancel(_: Streaming, task: asyncio.Task[Rollout]) -> Rollout | None:
    task.cancel()
    try:
        return await task
    except asyncio.CancelledError:
        return None


async def error_of(task: asyncio.Task[Rollout]) -> BaseException | None:
    """Wait for a call that ends by itself."""
    await asyncio.wait({task}, timeout=10)
    return task.exception()


async def abort(call: Streaming, task: asyncio.Task[Rollout]) -> Rollout:
    call.aborts = True
    return await task


@pytest.mark.usefixtures("_no_beats")
@pytest.mark.parametrize("how", [cancel, abort])
async def test_an_abort_between_two_beats_loses_nothing(how, tmp_path):
    async def act(call: Streaming, task: asyncio.Task[Rollout]) -> None:
        assert (call.rollout.length, call.seen) == (0, [0])
        rollout = await how(call, task)
        assert (rollout is None) == (how is cancel)
        assert call.rollout.choice().token_ids == [11, 12]
        assert call.seen[-1] == 2
        assert call.rollout.status == "aborted"

    with Log.open(tmp_path) as log:
        await streaming(HELD, log, act)
    with LogReader.open(tmp_path) as reader:
        rollout = reader.rollout("k")
    assert (rollout.choice().token_ids, rollout.status) == ([11, 12], "aborted")


@pytest.mark.usefixtures("_no_beats")
async def test_a_cancel_after_the_finish_was_read_returns_the_finished_sample():
    rollout = await streaming(FINISHED, None, cancel)
    assert (rollout.status, rollout.choice().token_ids) == ("completed", [11, 12])


@pytest.mark.usefixtures("_no_beats")
async def test_a_stream_that_ends_between_two_beats_is_whole():
    async def finish(_: Streaming, task: asyncio.Task[Rollout]) -> Rollout:
        return await task

    rollout = await streaming(RawStream(body=FINISHED.body), None, finish)
    assert (rollout.status, rollout.choice().token_ids) == ("completed", [11, 12])


@pytest.mark.usefixtures("_no_beats")
async def test_a_log_that_is_closed_between_two_beats_has_what_was_read(tmp_path):
    log = Log.open(tmp_path)

    async def close(_: Streaming, task: asyncio.Task[Rollout]) -> None:
        log.close()
        task.cancel()

    await streaming(HELD, log, close)
    with LogReader.open(tmp_path) as reader:
        assert reader.rollout("k").choice().token_ids == [11, 12]


async def test_what_was_read_is_folded_once_nothing_comes_for_a_while_as_of_when_it_came():
    async def wait(call: Streaming, task: asyncio.Task[Rollout]) -> None:
        assert call.rollout.length == 0
        while call.rollout.length < 2:  # noqa: ASYNC110 - no event to wait for
            await asyncio.sleep(0.01)
        assert call.seen == [0, 2]
        await asyncio.sleep(2.2)
        assert call.seen == [0, 2], "and not again"
        exchange = call.recorder.samples.get("k").exchange
        assert exchange._times[1] >= 10_000, "µs after the first one, whenever they were taken in"
        task.cancel()

    await streaming(HELD, None, wait)


async def test_a_response_is_folded_some_at_a_time():
    many = RawStream(body=b"".join(map(frame, range(3000))), end="hang")

    async def look(call: Streaming, task: asyncio.Task[Rollout]) -> None:
        behind = len(many.body) - call.rollout.requests[-1].bytes
        assert 0 < call.rollout.length == call.seen[-1]
        assert behind < FOLD_AT + 3000 * len(b"data: \n\n")
        await cancel(call, task)
        assert call.rollout.length == call.seen[-1] == 3000

    await streaming(many, None, look)


async def test_what_others_had_folded_is_told_as_well():
    async def look(call: Streaming, task: asyncio.Task[Rollout]) -> None:
        call.recorder.samples.get("k").exchange.take()
        assert (call.rollout.length, call.seen) == (2, [0])
        while call.seen[-1] < 2:  # noqa: ASYNC110 - no event to wait for
            await asyncio.sleep(0.01)
        await cancel(call, task)

    await streaming(HELD, None, look)


async def test_a_strict_log_that_fails_in_a_beat_fails_the_call_that_waits(tmp_path, monkeypatch):
    def refuse(*_: object) -> bool:
        raise RecordingFailed("the disk is gone")

    async def fail(call: Streaming, task: asyncio.Task[Rollout]) -> None:
        monkeypatch.setattr("rollout_log.log.queue.Queue.append", refuse)
        assert isinstance(await error_of(task), RecordingFailed)
        assert not call.recorder.samples.get("k").busy

    with Log.open(tmp_path, strict=True) as log:
        await streaming(HELD, log, fail)


@pytest.mark.usefixtures("_no_beats")
@pytest.mark.parametrize("stream", [HELD, FINISHED], ids=["aborted", "finished"])
async def test_a_strict_log_that_fails_at_a_cancel_fails_the_call(tmp_path, monkeypatch, stream):
    def refuse(*_: object) -> bool:
        raise RecordingFailed("the disk is gone")

    async def fail(call: Streaming, task: asyncio.Task[Rollout]) -> None:
        monkeypatch.setattr("rollout_log.log.queue.Queue.append", refuse)
        task.cancel()
        assert isinstance(await error_of(task), RecordingFailed)
        assert not call.recorder.samples.get("k").busy

    with Log.open(tmp_path, strict=True) as log:
        await streaming(stream, log, fail)


@pytest.mark.parametrize("error", [LookupError, pytest.fail.Exception])
@pytest.mark.parametrize("name", ["on_read", "on_chunk", "should_stop"])
async def test_what_a_callers_function_raises_ends_its_call_and_no_other(name, error, caplog):
    """Even where the stream that it was called for says nothing more."""
    raising = asyncio.Event()

    def failing(*_: object) -> bool:
        if raising.is_set():
            raise error("no such field")
        return False

    second = RawStream(body=frame(21) + frame(22, finish="stop"), reads=[len(frame(21))], delay=0.2)
    async with play(HELD, second) as engine, httpx.AsyncClient() as client:
        call = Streaming(Recorder(None, client), engine.url)
        failed = call.begin(HELD.body, **{name: failing})
        while not engine.requests:  # noqa: ASYNC110
            await asyncio.sleep(0)
        other = asyncio.create_task(call.recorder.generate("other", engine.url + PATH, BODY))
        if name == "should_stop":
            await call.read.wait()
        raising.set()
        assert isinstance(await error_of(failed), error)
        assert not call.recorder.samples.get("k").busy
        assert (await other).choice().token_ids == [21, 22]
    assert caplog.records == []


async def test_no_beat_and_no_task_is_left_of_a_call(tmp_path: Path):
    before = asyncio.all_tasks()
    await streaming(HELD, None, cancel)
    await asyncio.sleep(0)
    assert asyncio.all_tasks() - before == set()
