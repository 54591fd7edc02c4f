"""When events reach the disk, and who waits for it."""

from __future__ import annotations

import asyncio
import threading
import time
from types import SimpleNamespace

import pytest

from rollout_log.errors import SampleNotFound
from rollout_log.events import Delta, Event, Opened
from rollout_log.log import Log, LogReader
from rollout_log.log.committer import Committer
from rollout_log.log.queue import Queue


async def test_flush_commits_only_the_samples_it_is_asked_for(log, path, begin):
    first, second = begin(log, "first"), begin(log, "second")
    assert await log.flush(first)
    assert (log.durable(first), log.durable(second)) == (1, 0)
    with LogReader.open(path) as reader:
        assert [entry.name for entry in reader.samples()] == ["first"]
        assert await log.flush()
        assert [entry.name for entry in reader.samples()] == ["first", "second"]
    assert log.counters.commits == 2


async def test_those_who_wait_together_share_a_commit(log, begin):
    samples = [begin(log, f"key-{number}") for number in range(20)]
    assert await asyncio.gather(*(log.flush(sample) for sample in samples)) == [True] * 20
    assert log.counters.commits == 1


async def test_nothing_to_wait_for_is_no_commit(log, begin):
    sample = begin(log, "key")
    assert await log.flush(sample)
    assert await log.flush(sample)
    assert await log.flush()
    assert log.flush_sync(sample)
    assert log.counters.commits == 1


async def test_a_cancelled_wait_does_not_cancel_the_commit(log, begin, read):
    sample = begin(log, "key")
    task = asyncio.create_task(log.flush(sample))
    await asyncio.sleep(0)
    task.cancel()
    assert (await asyncio.gather(task, return_exceptions=True))[0].__class__ is asyncio.CancelledError
    while not log.durable(sample):  # noqa: ASYNC110 - nobody waits for this commit any more
        await asyncio.sleep(0.005)
    assert len(read("key")) == 1


def test_any_number_of_loops_and_threads_may_flush(log, begin):
    samples = [begin(log, f"key-{number}") for number in range(4)]
    done = {}

    def run(sample):
        done[sample] = asyncio.run(log.flush(sample)), log.flush_sync(sample)

    threads = [threading.Thread(target=run, args=(sample,)) for sample in samples]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert done == dict.fromkeys(samples, (True, True))


def test_threads_append_to_one_log_without_losing_anything(log, read):
    def run(number):
        from rollout_log.events import Opened

        sample = log.create(Opened(f"key-{number}"))
        log.append(sample, 0, [Opened(f"key-{number}")])
        for at in range(1, 300):
            log.append(sample, at, [Delta(number, b"%d" % at)])

    threads = [threading.Thread(target=run, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert log.flush_sync()
    for number in range(4):
        assert read(f"key-{number}")[1:] == [Delta(number, b"%d" % at) for at in range(1, 300)]


def test_the_window_commits_by_itself(path, begin, deltas):
    log = Log.open(path, window_ms=10)
    sample = begin(log, "key")
    while log.durable(sample) < 1:
        time.sleep(0.005)
    log.append(sample, 1, deltas(1, 9))
    while log.durable(sample) < 9:
        time.sleep(0.005)
    log.close()


def test_no_event_waits_longer_than_the_window_for_its_commit_to_begin(path, monkeypatch):
    """By a clock that stands still: the oldest event counts, whatever comes after it."""
    now = [1000.0]
    monkeypatch.setattr("rollout_log.log.queue.time", SimpleNamespace(monotonic=lambda: now[0]))

    def nothing(sample: int, first: int, end: int) -> list[Event]:
        return []

    queue = Queue(path, window=0.25, limit=1 << 20, strict=False, first_ordinal=0, read_back=nothing)
    old, new = queue.create(), queue.create()
    queue.append(old, 0, [Opened("old")], None)
    for step in range(1, 25):
        now[0] = 1000 + step / 100
        queue.append(new, step - 1, [Delta(0, b"x")], None)
        assert queue._take(everything=False) == {}
    now[0] = 1000.25
    taken, _, _ = queue.take()
    assert [part.ordinal for part in taken] == [old, new]
    queue.committed(0, 1)
    queue.append(new, 24, [Delta(0, b"x")], None)
    now[0] = 1000.49
    assert queue._take(everything=False) == {}, "a window begins with its first event"
    now[0] = 1000.5
    assert list(queue._take(everything=False)) == [new]


def test_many_bytes_are_committed_before_the_window_ends(log, begin):
    sample = begin(log, "key")
    log.append(sample, 1, [Delta(0, b"x" * (9 << 20))])
    while log.durable(sample) < 2:
        time.sleep(0.005)


async def test_settle_waits_as_the_durability_says(tmp_path, begin, monkeypatch):
    window = Log.open(tmp_path / "window", window_ms=3_600_000, durability="window")
    sample = begin(window, "key")
    assert not await window.settle(sample)
    assert window.counters.late_flushes == 0
    window.close()

    finish = Log.open(tmp_path / "finish", window_ms=3_600_000)
    sample = begin(finish, "key")
    assert await finish.settle(sample)
    assert finish.durable(sample) == 1
    finish.close()

    gate = threading.Event()
    write = Committer.write
    monkeypatch.setattr(Committer, "write", lambda self, rows: gate.wait() and write(self, rows))
    late = Log.open(tmp_path / "late", window_ms=3_600_000, late_flush_ms=1)
    sample = begin(late, "key")
    assert not await late.settle(sample)
    assert late.counters.late_flushes == 1
    gate.set()
    assert await late.flush(sample)
    late.close()


async def test_strict_settling_waits_through_failures(path, begin, monkeypatch):
    monkeypatch.setattr("rollout_log.log.queue.RETRY_S", 0.01)
    left = [3]
    write = Committer.write

    def fail(self, rows):
        if left[0]:
            left[0] -= 1
            raise OSError(28, "No space left on device")
        return write(self, rows)

    monkeypatch.setattr(Committer, "write", fail)
    log = Log.open(path, durability="strict")
    sample = begin(log, "key")
    assert await log.settle(sample)
    assert (log.durable(sample), log.counters.failures) == (1, 3)
    log.close()


async def test_a_sample_may_be_named_by_its_key(tmp_path):
    with Log.open(tmp_path / "log", window_ms=60_000) as log:
        opened = Opened(key="k")
        other = log.create(Opened(key="other"))
        log.append(other, 0, [Opened(key="other")])
        sample = log.create(opened)
        log.append(sample, 0, [opened])
        assert await log.flush("k")
        assert (log.durable(sample), log.durable(other)) == (1, 0)
        with pytest.raises(SampleNotFound, match="no sample 'x'"):
            await log.flush("x")


def test_what_taps_hold_back_is_a_part_of_the_window(path):
    with Log.open(path, window_ms=250) as log:
        assert log.window_ms == 250
        assert log.hold_back_s == pytest.approx(0.225)


def test_the_window_of_events_that_were_held_back_began_when_they_came(path, monkeypatch):
    now = [1000.0]
    monkeypatch.setattr("rollout_log.log.queue.time", SimpleNamespace(monotonic=lambda: now[0]))
    queue = Queue(path, window=0.2, limit=1 << 20, strict=False, first_ordinal=0, read_back=lambda *_: [])
    first, second, third = queue.create(), queue.create(), queue.create()
    queue.append(first, 0, [Opened("first")], None)
    queue.append(second, 0, [Opened("second")], None, since=999.9)
    now[0] = 1000.09
    assert queue._take(everything=False) == {}
    now[0] = 1000.1
    assert list(queue._take(everything=False)) == [first, second], "with what is not due yet"
    queue.append(third, 0, [Opened("third")], None, since=990.0)
    now[0] = 1000.105
    assert queue._take(everything=False) == {}, "what is late waits a moment for what comes with it"
    now[0] = 1000.11
    assert list(queue._take(everything=False)) == [third]
