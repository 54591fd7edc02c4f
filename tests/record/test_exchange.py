"""Reads that are taken in together are recorded as if each had been taken in when it came."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from typing import cast
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_log.events import Delta, Event, Opened, Reads
from rollout_log.log import Log
from rollout_log.record.elision import LARGE
from rollout_log.record.samples import Samples
from tests.captures import load

PIECE = st.binary(max_size=20) | st.sampled_from([b"data: {}\n\n", b"\r\n", b"\n\n", b"data: ", b":x\n"])
STREAM = load("a1-plain-length").body


class ListLog:
    """Takes events as a log does."""

    run = ""
    keep = ()
    hold_back_s = 3600.0

    def __init__(self) -> None:
        self.events: list[Event] = []

    def create(self, opened: Opened) -> int:
        return 0

    def append(
        self,
        sample: int,
        first: int,
        events: Sequence[Event],
        summary: object = None,
        since: float | None = None,
    ) -> bool:
        assert first == len(self.events)
        self.events += events
        return True


def recorded(beats: list[list[bytes]], content_type: str = "text/event-stream") -> list[Event]:
    """Record a response that is taken in beat by beat, its reads 10 µs apart; return its events."""
    log, ticks = ListLog(), itertools.count(0, 10_000)
    with patch("rollout_log.record.exchange.monotonic_ns", lambda: 0):
        exchange = Samples(cast(Log, log)).request("t0-x", path="/inference/v1/generate", body=b"{}")
        exchange.respond(200, [("content-type", content_type)])
    for chunks in beats:
        with (
            patch("rollout_log.record.exchange.monotonic_ns", ticks.__next__),
            patch("rollout_log.record.exchange.pulse"),
        ):
            for chunk in chunks:
                exchange.put(chunk)
        exchange._beat()
    with patch("rollout_log.record.exchange.monotonic_ns", ticks.__next__):
        exchange.end("eof")
    return log.events[3:-1]


@pytest.mark.parametrize("content_type", ["text/event-stream", "application/json"])
@given(beats=st.lists(st.lists(PIECE, max_size=6), max_size=6))
def test_a_beat_is_recorded_as_its_reads(content_type, beats):
    one_by_one = [[chunk] for chunk in itertools.chain.from_iterable(beats)]
    assert recorded(beats, content_type) == recorded(one_by_one, content_type)


def test_a_real_stream_in_beats_gives_the_same_frames_and_reads():
    chunks = [STREAM[start : start + 100] for start in range(0, len(STREAM), 100)]
    events = recorded([chunks[:7], chunks[7:]])
    assert events == recorded([[chunk] for chunk in chunks])
    assert [type(event) for event in events].count(Delta) > 10
    reads = events[-1]
    assert isinstance(reads, Reads)
    assert reads.sizes == [len(chunk) for chunk in chunks]
    assert reads.times == [0] + [10] * (len(chunks) - 1), "µs since the read before"
    came = list(itertools.accumulate(reads.times))
    assert {event.time for event in events if isinstance(event, Delta)} < set(came)


@pytest.mark.parametrize("parts", [1, 2, 5])
def test_what_is_elided_is_taken_from_the_reads_it_came_in(parts):
    before, after = b'data: {"a":1}\n\n', b'data: {"b":2}\n\n'
    large = b'data: {"choices":[{"routed_experts":"%b"}]}\n\n' % (b"A" * (LARGE + 100))
    size = len(large) // parts + 1
    pieces = [large[start : start + size] for start in range(0, len(large), size)]
    *deltas, reads = recorded([[before, *pieces, after]])
    assert isinstance(reads, Reads)
    assert reads.sizes[0] == len(before)
    assert reads.sizes[-1] == len(after)
    assert sum(reads.sizes) == sum(len(b"data: %b\n\n" % delta.data) for delta in deltas)
    assert [*deltas, reads] == recorded([[before], *([piece] for piece in pieces), [after]])


def test_reads_are_written_in_the_same_stretches_however_they_are_taken_in():
    chunks = [STREAM[at : at + 1] for at in range(1200)]
    events = recorded([chunks])
    assert [len(event.sizes) for event in events if isinstance(event, Reads)] == [512, 512, 176]
    counts = Counter(map(type, events))
    assert counts == Counter(map(type, recorded([[chunk] for chunk in chunks])))
