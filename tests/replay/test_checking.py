"""Recorded exchanges go through the client code again, and give the sample that was recorded."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

import cases
from replay.exchanges import CAPTURES, record_capture, record_case
from replay.memory import MemoryLog
from rollout_log.events import Closed, Delta, Event, Marked, Unrecorded
from rollout_log.fixture import FixtureReader
from rollout_log.replay.checking import CannotCheck, Difference, check_sample

ODD = {
    "g06-malformed-json": "its body is no JSON object",
    "g06-malformed-json-router": "its body is no JSON object",
    "g16-no-such-path": "no path an engine generates on",
    "p6-chat-render": "no path an engine generates on",
}


async def check(log: MemoryLog) -> list[Difference]:
    """The first sample of a log."""
    reader = FixtureReader(Path("memory"), log.written)
    return await check_sample(reader, next(reader.samples()))


@pytest.mark.parametrize("name", [name for name in CAPTURES if name not in ODD])
async def test_every_capture_comes_out_as_recorded(name):
    log = MemoryLog()
    record_capture(log, name)
    assert await check(log) == []


@pytest.mark.parametrize("name", cases.names())
async def test_every_case_comes_out_as_recorded(name):
    case, log = cases.load(name), MemoryLog()
    record_case(log, name, case, next(iter(case.variants())))
    assert await check(log) == []


@pytest.mark.parametrize("name", ODD)
async def test_what_the_client_code_never_sends_is_passed_over(name):
    log = MemoryLog()
    record_capture(log, name)
    with pytest.raises(CannotCheck, match=ODD[name]):
        await check(log)


def resumed() -> MemoryLog:
    """A sample of two requests, five tokens."""
    log = MemoryLog()
    case = cases.load("resume-after-abort")
    record_case(log, "resumed", case, next(iter(case.variants())))
    return log


async def test_what_did_not_come_from_the_engine_is_taken_from_the_recording():
    log = resumed()
    log.written[0][0] = replace(log.written[0][0], continues=None, run="r", step=3, group_index=7)
    log.written[0] += [Marked("paused", {"why": "x"}), Closed("completed", 0.5, 3)]
    assert await check(log) == []


async def test_a_recording_that_stops_in_mid_response_is_compared_up_to_there():
    log = MemoryLog()
    record_capture(log, "a1-plain-length")
    del log.written[0][20:]
    assert isinstance(log.written[0][-1], Delta)
    assert await check(log) == []


async def test_a_life_that_goes_on_from_an_older_one_starts_from_it():
    log = resumed()
    older = log.written[0]
    later: list[Event] = [replace(older[0], incarnation=1, continues=(0, 3))]
    later += [replace(event, number=0) for event in older if getattr(event, "number", 0) == 1]
    log.written = [older[: len(older) - len(later) + 1], later]
    reader = FixtureReader(Path("memory"), log.written)
    entries = {entry.ref.incarnation: entry for entry in reader.samples()}
    assert reader.rollout(entries[1].ref).length == 5
    assert await check_sample(reader, entries[1]) == []


async def test_tokens_that_came_while_recording_was_off_cannot_be_replayed():
    log = resumed()
    log.written[0].append(Unrecorded(base=5, token_ids=[1]))
    with pytest.raises(CannotCheck, match="came while recording was off"):
        await check(log)


class Bent(FixtureReader):
    """A log whose fold is not what its exchanges say."""

    def rollout(self, ref):
        rollout = super().rollout(ref)
        rollout.choice_or_first().token_ids[4] = 99
        rollout.requests[1].tokens = 3
        return rollout


async def test_a_difference_names_sample_and_field():
    reader = Bent(Path("memory"), resumed().written)
    found = await check_sample(reader, next(reader.samples()))
    assert found == [
        Difference("resumed", "token_ids[4]", 99, 15),
        Difference("resumed", "requests[1].tokens", 3, 2),
    ]
