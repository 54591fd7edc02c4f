"""What stays in memory of samples that are on disk: a process records millions of them."""

from __future__ import annotations

import gc
import tracemalloc

import pytest

from rollout_log.errors import SequenceConflict
from rollout_log.events import Closed, Delta, Event, Opened
from rollout_log.log import Log


def record(log: Log, samples: int) -> None:
    for number in range(samples):
        opened = Opened(f"key-{number}", prompt_token_ids=[1, 2, 3])
        sample = log.create(opened)
        log.append(sample, 0, [opened, Delta(0, b"x" * 100), Closed("completed")])
        if number % 500 == 0:
            assert log.flush_sync()
    assert log.flush_sync()


def objects() -> int:
    gc.collect()
    return len(gc.get_objects())


def test_no_object_stays_of_a_sample_that_is_on_disk(log):
    record(log, 100)
    before = objects()
    record(log, 3000)
    assert objects() - before < 100


def test_a_few_bytes_stay_of_a_sample_that_is_on_disk(log):
    record(log, 100)
    tracemalloc.start()
    try:
        record(log, 100)
        before = tracemalloc.get_traced_memory()[0]
        record(log, 3000)
        gc.collect()
        assert (tracemalloc.get_traced_memory()[0] - before) / 3000 < 40
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("rotated", [False, True])
async def test_a_sample_that_is_on_disk_goes_on_and_knows_its_events(log, begin, deltas, read, rotated):
    sample = begin(log, "key")
    log.append(sample, 1, deltas(1, 4))
    assert await log.flush(sample)
    if rotated:
        log.rotate()
    record(log, 10)
    assert not log._queue._dirty

    assert (log.durable(sample), await log.settle(sample)) == (4, True)
    assert log.append(sample, 2, deltas(2, 4)), "a repeat"
    assert not log._queue._dirty
    with pytest.raises(SequenceConflict, match=r"events 2 to 2 of sample 0 .* not the same"):
        log.append(sample, 2, [Delta(0, b"other")])
    with pytest.raises(SequenceConflict, match="begin at 5, but 4 is next"):
        log.append(sample, 5, deltas(5, 6))
    assert log.append(sample, 3, deltas(3, 6)), "a repeat, and two more"
    assert log.durable(sample) == 4
    assert await log.flush("key")
    assert log.durable(sample) == 6
    found: list[Event] = read("key")
    assert found == [Opened("key"), *deltas(1, 6)]


async def test_the_newest_sample_of_a_key_is_found_wherever_it_is(log, begin, deltas):
    older = begin(log, "key")
    assert await log.flush("key")
    log.append(older, 1, deltas(1, 2))
    newer = begin(log, "key")
    assert await log.flush("key")
    assert (log.durable(older), log.durable(newer)) == (1, 1)
    log.append(newer, 1, deltas(1, 2))
    log.rotate()
    assert await log.flush("key")
    assert log.durable(newer) == 2


def test_what_a_closed_log_could_not_write_is_not_durable(path, begin, deltas, monkeypatch):
    log = Log.open(path, window_ms=3_600_000)
    sample = begin(log, "key")
    assert log.flush_sync()
    log.append(sample, 1, deltas(1, 3))

    def fail(rows: list) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(log._committer, "write", fail)
    log.close()
    assert log.durable(sample) == 1
