"""A wall clock that jumps: lives stay in order, and durations are those of the monotonic clock."""

from __future__ import annotations

import itertools
import random
import time

import pytest

from recorded import Writer, frame
from rollout_log.events import Closed, Delta, Ended, Reads
from rollout_log.log import LogReader

HOUR = 3600 * 10**9


@pytest.fixture
def jumping(monkeypatch):
    """A wall clock that jumps by up to ten years, back and forth, at each look."""
    chance, true = random.Random(5), time.time_ns
    monkeypatch.setattr(time, "time_ns", lambda: true() + chance.randrange(-87_600, 87_600) * HOUR)


def live(writer: Writer, key: str, token: int) -> None:
    exchange = writer.request(key, [frame(token), frame(token + 1, finish="stop")])
    exchange.sample.close(Closed(status="completed"))


def tokens_of_lives(path, key: str) -> list[list[int]]:
    with LogReader.open(path) as reader:
        entries = {entry.ref.incarnation: entry.ref for entry in reader.samples() if entry.summary.key == key}
        assert reader.find(key) == entries[max(entries)]
        return [reader.rollout(entries[number]).choice().token_ids for number in sorted(entries)]


def test_lives_of_a_key_stay_in_order(jumping, tmp_path):
    with Writer(tmp_path / "log") as writer:
        for life in range(20):
            live(writer, "k", 10 * life)
            live(writer, "other", 10 * life)
    expected = [[10 * life, 10 * life + 1] for life in range(20)]
    assert tokens_of_lives(tmp_path / "log", "k") == expected
    assert tokens_of_lives(tmp_path / "log", "other") == expected


def test_lives_that_the_process_has_forgotten_stay_in_order(jumping, tmp_path):
    """Each declares itself the first one; the writer's order is all there is."""
    with Writer(tmp_path / "log") as writer:
        for life in range(20):
            live(writer, "k", 10 * life)
            writer.samples.forget("k")
    assert tokens_of_lives(tmp_path / "log", "k") == [[10 * life, 10 * life + 1] for life in range(20)]


def test_durations_do_not_jump(jumping, tmp_path):
    with Writer(tmp_path / "log") as writer:
        for number in range(20):
            writer.request(f"k{number}", [frame(token) for token in range(5)])
    with LogReader.open(tmp_path / "log") as reader:
        assert len(list(reader.samples())) == 20
        for entry in reader.samples():
            events = [event for _, event in reader.events(entry.ref)]
            times = [event.time for event in events if isinstance(event, (Delta, Ended))]
            assert all(0 <= a <= b < 600e6 for a, b in itertools.pairwise(times))
            assert all(0 <= step < 600e6 for e in events if isinstance(e, Reads) for step in e.times)
