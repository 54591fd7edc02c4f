"""One sample over several files."""

from __future__ import annotations

import random

from rollout_log.events import Delta
from rollout_log.log import Log, LogReader, Summary, environment
from rollout_log.log.directory import segments_of
from rollout_log.log.verify import verify


def test_a_sample_goes_on_in_the_next_segment_with_its_row(log, path, begin, deltas, read):
    sample = begin(log, "key", opened_unix_ns=5, step=2)
    other = begin(log, "other", opened_unix_ns=6)
    log.append(sample, 1, deltas(1, 3), Summary(key="key", status="aborted", opened_unix_ns=5, step=2))
    log.rotate()
    log.flush_sync()
    log.append(sample, 3, deltas(3, 6))
    log.rotate()
    log.flush_sync()
    log.append(sample, 6, deltas(6, 7))
    log.append(other, 1, deltas(1, 2))
    log.flush_sync()
    assert len(segments_of(path / log.writer)) == 3
    assert log.counters.segments == 3
    assert read("key")[1:] == deltas(1, 7)
    with LogReader.open(path) as reader:
        assert [(entry.name, entry.summary.status) for entry in reader.samples()] == [
            ("key", "aborted"),
            ("other", "pending"),
        ]
        assert [entry.name for entry in reader.samples(step=2)] == ["key"]
        assert log.append(sample, 2, deltas(2, 7)), "a repeat is compared over all segments"
    report = verify(path)
    assert (report.damage, report.samples, report.events) == ([], 2, 9)


def test_a_segment_that_has_its_size_is_followed_by_another(path, begin, read):
    log = Log.open(path, window_ms=3_600_000, segment_bytes=100_000)
    sample = begin(log, "key")
    events = [Delta(0, random.Random(number).randbytes(10_000)) for number in range(40)]
    for at, event in enumerate(events, 1):
        log.append(sample, at, [event])
        log.flush_sync()
    log.close()
    assert len(segments_of(path / log.writer)) > 2
    assert read("key")[1:] == events


def test_a_small_map_grows_beside_a_reader(path, begin, monkeypatch):
    monkeypatch.setattr(environment, "MAP_SIZE", 256 << 10)
    log = Log.open(path, window_ms=3_600_000)
    sample = begin(log, "key")
    log.flush_sync()
    with LogReader.open(path) as reader:
        ref = reader.find("key")
        for at in range(1, 30):
            log.append(sample, at, [Delta(0, random.Random(at).randbytes(50_000))])
            assert log.flush_sync()
            assert sum(1 for _ in reader.events(ref)) == at + 1
    assert log.counters.failures == 0
    log.close()


def test_a_segment_that_is_not_worth_it_goes_on(log, path, begin):
    sample = begin(log, "key")
    log.rotate(least=1 << 20)
    log.append(sample, 1, [Delta(0, random.Random(1).randbytes(2 << 20))])
    log.flush_sync()
    assert log.counters.segments == 1
    log.rotate(least=1 << 20)
    log.append(sample, 2, [Delta(0, b"x")])
    log.close()
    assert log.counters.segments == 2
