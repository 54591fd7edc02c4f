"""For how long a response is held at a recorded cut, and what becomes of one that nobody aborts."""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Any

import httpx
import pytest

from replay.clock import Clock
from replay.exchanges import body_of, record_capture
from replay.memory import MemoryLog
from replay.streams import DONE, VLLM, aborted, body, frame, sample, whole
from rollout_log.replay import ReplayTransport, desk, playback, serve_replay
from rollout_log.replay.asking import Asked
from rollout_log.replay.desk import Desk
from rollout_log.replay.playback import Over, Playback, Wait
from rollout_log.replay.recording import Read

HELD = [7]
OTHER = [5, 6]
WHY = "'k' request 0 was held at token 2, where the recording was aborted, and in {} s the client has neither"


@pytest.fixture
def clock(monkeypatch) -> Clock:
    return Clock(monkeypatch, desk, playback)


def log_of_two(**options: Any) -> MemoryLog:
    """One response that was aborted after two tokens, and one that was not."""
    log = MemoryLog()
    sample(log, "k", HELD, [], chunks=aborted([1, 2], 1), max_tokens=3, **options)
    sample(log, "other", OTHER, [4, 5, 6])
    return log


def take(desk: Desk, prompt: list[int]) -> Playback:
    return desk.take(Asked.of("POST", VLLM, json.dumps(body(prompt, 3)).encode()))


def wait(played: Playback) -> float:
    """Play on until a wait, and return its seconds."""
    while not isinstance(step := played.step(), Wait):
        assert isinstance(step, bytes)
    assert step.seconds is not None
    return step.seconds


def test_what_is_held_for_too_long_ends_as_a_lost_connection(clock):
    desk = Desk(log_of_two(), hold_s=3)
    played = take(desk, HELD)
    assert wait(played) == 3
    clock.now += 2.5
    assert wait(played) == 0.5
    assert desk.held_out == []
    clock.now += 0.5
    step = played.step()
    assert isinstance(step, Over)
    assert step.script.ending == "cut"
    assert step.script.body == frame([1]) + frame([2])
    assert desk.held_out == [step.script.detail]
    assert step.script.detail.startswith(WHY.format(3))
    assert "at_cut='end'" in step.script.detail
    assert not played.finished


def test_all_that_are_held_end_together(clock):
    log = MemoryLog()
    for key in "ab":
        sample(log, key, HELD, [], chunks=aborted([1, 2], 1), max_tokens=3)
    desk = Desk(log, hold_s=3)
    first, second = take(desk, HELD), take(desk, HELD)
    wait(first)
    clock.now += 1
    assert wait(second) == 3
    clock.now += 3
    assert isinstance(first.step(), Over)
    assert [why.partition(" request")[0] for why in desk.held_out] == ["'a'", "'b'"]
    assert isinstance(second.step(), Over)
    assert len(desk.held_out) == 2


def test_it_is_held_while_anything_else_moves(clock):
    desk = Desk(log_of_two(), hold_s=3)
    held, other = take(desk, HELD), take(desk, OTHER)
    assert wait(held) == 3
    clock.now += 2
    assert isinstance(other.step(), bytes)
    clock.now += 2
    assert wait(held) == 1
    desk.leave(other)
    assert wait(held) == 3
    clock.now += 2
    take(desk, OTHER)
    clock.now += 2
    assert wait(held) == 1, "whether the new one's client reads it or not"


def test_it_is_held_until_what_is_due_later_has_come(clock):
    log = log_of_two()
    desk = Desk(log, hold_s=3)
    held, other = take(desk, HELD), take(desk, OTHER)
    other.pace = 1.0
    other.script.pieces = [Read(60_000_000, piece.data) for piece in other.script.pieces]
    assert wait(other) == 60
    assert wait(held) == 63
    clock.now += 61
    assert wait(held) == 2


def test_time_in_which_the_whole_process_stood_still_does_not_count(clock):
    desk = Desk(log_of_two(), hold_s=3)
    played = take(desk, HELD)
    assert wait(played) == 3
    clock.now += 600
    assert wait(played) == 3
    clock.now += 3
    assert isinstance(played.step(), Over)


def test_a_pause_does_not_count(clock):
    desk = Desk(log_of_two(), hold_s=3)
    played = take(desk, HELD)
    wait(played)
    desk.pause("keep")
    clock.now += 3.5
    assert played.step() == Wait(None)
    desk.resume()
    assert wait(played) == 3


def test_without_a_limit_it_is_said_once_and_held_on(clock, caplog):
    desk = Desk(log_of_two())
    played = take(desk, HELD)
    for _ in range(5):
        clock.now += wait(played)
    assert played.held
    [said] = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert "nothing moves: 1 response held where the recording was aborted ('k' request 0)" in said.message
    assert "--at-cut go or end" in said.message
    assert desk.held_out == []


def test_a_response_whose_recorded_client_left_ends_too(clock):
    log = MemoryLog()
    sample(log, "k", HELD, [], chunks=whole([1, 2, 3], 1)[:2], max_tokens=3, end="cancelled")
    for cut in ("any", "exact"):
        desk = Desk(log, cut=cut, hold_s=3)
        played = take(desk, HELD)
        clock.now += wait(played)
        assert isinstance(played.step(), Over)
        assert desk.held_out[0].startswith(WHY.format(3))


def test_a_body_that_is_not_streamed_ends_without_a_byte(clock):
    log = MemoryLog()
    record_capture(log, "f8-abort-nonstream")
    desk = Desk(log, hold_s=3)
    played = desk.take(Asked.of("POST", VLLM, body_of("f8-abort-nonstream")))
    clock.now += wait(played)
    step = played.step()
    assert isinstance(step, Over)
    assert (step.script.ending, step.script.body) == ("cut", b"")
    assert len(desk.held_out) == 1


@pytest.mark.parametrize("hold_s", [0, -1, float("nan"), float("inf"), "long"])
def test_what_is_no_time_to_hold(hold_s):
    with pytest.raises(ValueError, match=r"hold_s is a number of seconds above 0, not "):
        Desk(MemoryLog(), hold_s=hold_s)


# Through clients


def test_a_sync_client_is_told_why():
    transport = ReplayTransport(log_of_two(), cut="any", hold_s=0.05)
    with (
        httpx.Client(transport=transport, base_url="http://engine", timeout=None) as client,
        pytest.raises(httpx.RemoteProtocolError) as error,
    ):
        client.post(VLLM, json=body(HELD, 3))
    assert str(error.value).startswith(WHY.format(0.05))
    assert transport.desk.held_out == [str(error.value)]
    assert not transport.desk.playing


async def test_an_async_client_is_told_why():
    transport = ReplayTransport(log_of_two(), cut="any", hold_s=0.05)
    async with httpx.AsyncClient(transport=transport, base_url="http://engine", timeout=None) as client:
        with pytest.raises(httpx.RemoteProtocolError) as error:
            await client.post(VLLM, json=body(HELD, 3))
        assert str(error.value).startswith(WHY.format(0.05))
        assert (await client.post(VLLM, json=body(OTHER, 3))).content.endswith(DONE)


async def test_a_client_of_the_server_loses_its_connection_and_may_ask_again():
    log = log_of_two()
    async with (
        serve_replay(log, hold_s=0.05) as server,
        httpx.AsyncClient(base_url=server.url, timeout=30) as client,
    ):
        request = client.build_request("POST", VLLM, json=body(HELD, 3))
        response = await client.send(request, stream=True)
        with pytest.raises(httpx.RemoteProtocolError):
            await response.aread()
        assert len(server.desk.held_out) == 1
        assert (await client.post(VLLM, json=body(OTHER, 3))).content.endswith(DONE)


def test_a_response_whose_event_loop_is_gone_holds_nothing_up():
    log = MemoryLog()
    for key in "ab":
        sample(log, key, HELD, [], chunks=aborted([1, 2], 1), max_tokens=3)
    transport = ReplayTransport(log, cut="any", hold_s=0.05)

    async def forget() -> httpx.Response:
        client = httpx.AsyncClient(transport=transport, base_url="http://engine")
        request = client.build_request("POST", VLLM, json=body(HELD, 3))
        response = await client.send(request, stream=True)
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(response.aread(), 0.01)
        return response

    kept = asyncio.run(forget())
    assert len(transport.desk.playing) == 1
    with (
        httpx.Client(transport=transport, base_url="http://engine", timeout=None) as client,
        pytest.raises(httpx.RemoteProtocolError),
    ):
        client.post(VLLM, json=body(HELD, 3))
    assert len(transport.desk.held_out) == 2
    assert kept.status_code == 200
