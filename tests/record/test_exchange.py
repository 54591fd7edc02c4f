"""Reads that arrive together are taken in as if they had come one after the other."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, cast

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_log.events import Body, Delta, Event, Opened, Reads
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

    def __init__(self) -> None:
        self.events: list[Event] = []

    def create(self, opened: Opened) -> int:
        return 0

    def append(self, sample: int, first: int, events: Sequence[Event], summary: object = None) -> bool:
        assert first == len(self.events)
        self.events += events
        return True


def recorded(bursts: list[list[bytes]], content_type: str = "text/event-stream") -> list[Event]:
    """Record a response whose reads come in bursts; return its events without their times."""
    log = ListLog()
    exchange = Samples(cast(Log, log)).request("t0-x", path="/inference/v1/generate", body=b"{}")
    exchange.respond(200, [("content-type", content_type)])
    for chunks in bursts:
        exchange.feed_all(chunks)
    exchange.end("eof")
    return [timeless(event) for event in log.events[3:-1]]


def timeless(event: Any) -> Event:
    if isinstance(event, (Delta, Body)):
        return msgspec.structs.replace(event, time=0)
    return msgspec.structs.replace(event, times=[]) if isinstance(event, Reads) else event


@pytest.mark.parametrize("content_type", ["text/event-stream", "application/json"])
@given(bursts=st.lists(st.lists(PIECE, max_size=6), max_size=6))
def test_a_burst_is_recorded_as_its_reads(content_type, bursts):
    one_by_one = [[chunk] for chunk in itertools.chain.from_iterable(bursts)]
    assert recorded(bursts, content_type) == recorded(one_by_one, content_type)


def test_a_real_stream_in_bursts_gives_the_same_frames_and_reads():
    chunks = [STREAM[start : start + 100] for start in range(0, len(STREAM), 100)]
    events = recorded([chunks[:7], chunks[7:]])
    assert events == recorded([[chunk] for chunk in chunks])
    assert [type(event) for event in events].count(Delta) > 10
    reads = events[-1]
    assert isinstance(reads, Reads)
    assert reads.sizes == [len(chunk) for chunk in chunks]


def test_what_is_elided_is_taken_from_the_read_it_came_in():
    before, after = b'data: {"a":1}\n\n', b'data: {"b":2}\n\n'
    large = b'data: {"choices":[{"routed_experts":"%b"}]}\n\n' % (b"A" * (LARGE + 100))
    *deltas, reads = recorded([[before, large, after]])
    assert isinstance(reads, Reads)
    assert reads.sizes[0] == len(before)
    assert reads.sizes[2] == len(after)
    assert sum(reads.sizes) == sum(len(b"data: %b\n\n" % delta.data) for delta in deltas)
