"""When the pieces of a response are due; a clock of our own, so that nothing waits."""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

import captures
from replay.clock import Clock
from replay.exchanges import body_of, record_capture
from replay.memory import MemoryLog
from replay.streams import DONE, VLLM, aborted, body, frame, sample, tokens_of, whole
from rollout_log.events import Ended, Event, Reads, Responded
from rollout_log.replay import ReplayTransport, playback
from rollout_log.replay.asking import Asked
from rollout_log.replay.desk import Desk, pace_of
from rollout_log.replay.playback import Gate, Over, Playback, Wait

PROMPT = [7]
REQUEST = json.dumps(body(PROMPT, 3)).encode()


@pytest.fixture
def clock(monkeypatch) -> Clock:
    return Clock(monkeypatch, playback)


def timed(event: Event) -> Event:
    """Headers after 1 s, a read each second after 2 s, the end after 10 s."""
    if isinstance(event, Responded):
        return Responded(event.number, event.status, event.headers, 1_000_000)
    if isinstance(event, Reads):
        return Reads(event.number, event.sizes, [2_000_000, *[1_000_000] * (len(event.sizes) - 1)])
    if isinstance(event, Ended):
        return Ended(event.number, event.how, event.detail, 10_000_000)
    return event


def begin(pace: Any, chunks: list[bytes] | None = None, **options: Any) -> Playback:
    log = MemoryLog()
    chunks = whole([1, 2, 3], 1) if chunks is None else chunks
    sample(log, "k", PROMPT, [], chunks=chunks, max_tokens=3, **options)
    log.written[0] = [timed(event) for event in log.written[0]]
    return Desk(log, pace=pace).take(Asked.of("POST", VLLM, REQUEST))


def times(played: Playback, clock: Clock) -> list[float]:
    """Seconds after which each piece came, and the end."""
    found = []
    while True:
        step = played.step()
        if isinstance(step, Wait):
            assert step.seconds is not None
            clock.now += step.seconds
        else:
            found.append(round(clock.now - 100, 6))
            if isinstance(step, Over):
                return found


@pytest.mark.parametrize(
    ("pace", "expected"),
    [
        ("recorded", [2, 3, 4, 5, 6, 10]),
        (1, [2, 3, 4, 5, 6, 10]),
        (0.5, [1, 1.5, 2, 2.5, 3, 5]),
        (2, [4, 6, 8, 10, 12, 20]),
        (0, [0, 0, 0, 0, 0, 0]),
    ],
)
def test_the_pace_is_a_factor_on_recorded_waits(clock, pace, expected):
    played = begin(pace)
    assert played.head_wait() == pytest.approx(expected[0] / 2)
    assert times(played, clock) == expected


def test_a_late_consumer_does_not_shift_what_follows(clock):
    played = begin("recorded")
    clock.now += 3.5
    assert times(played, clock) == [3.5, 3.5, 4, 5, 6, 10]


@pytest.mark.parametrize("pace", ["brisk", -1, "nan"])
def test_what_is_no_pace(pace):
    with pytest.raises(ValueError, match=r"float|pace"):
        pace_of(pace)


def test_an_abort_is_at_once_whatever_the_pace(clock):
    played = begin("recorded")
    clock.now += 2
    first = played.step()
    assert first == frame([1])
    played.abort()
    rest = []
    while isinstance(step := played.step(), bytes):
        rest.append(step)
    assert isinstance(step, Over)
    assert b"".join([first, *rest]) == b"".join(aborted([1], 1))
    assert not played.finished


def test_an_abort_after_the_finish_changes_nothing(clock):
    played = begin(0)
    sent = [played.step() for _ in range(3)]
    assert played.finished
    played.abort()
    assert [*sent, played.step(), played.step()] == whole([1, 2, 3], 1)


def test_an_abort_of_a_queued_request(clock):
    played = begin("recorded")
    played.abort()
    steps = [played.step() for _ in range(3)]
    assert isinstance(played.step(), Over)
    assert steps[2] == DONE
    first = json.loads(steps[0][6:])["choices"][0]
    assert (first["finish_reason"], first["token_ids"], first["weight_versions"]) == ("abort", [], [])


def test_a_body_that_was_aborted_waits_for_the_abort():
    log = MemoryLog()
    record_capture(log, "f8-abort-nonstream")
    capture = captures.load("f8-abort-nonstream")
    desk = Desk(log)
    played = desk.take(Asked.of("POST", VLLM, body_of("f8-abort-nonstream")))
    assert isinstance(played.step(), Wait)
    assert desk.abort() == 1
    got = b""
    while isinstance(step := played.step(), bytes):
        got += step
    assert got == capture.body


def test_a_sync_stream_is_held_until_another_thread_aborts():
    log = MemoryLog()
    sample(log, "k", PROMPT, [], chunks=aborted([1, 2], 1), max_tokens=3)
    transport = ReplayTransport(log, cut="any")
    begun = threading.Event()

    def read() -> bytes:
        got = b""
        with (
            httpx.Client(transport=transport, base_url="http://engine") as client,
            client.stream("POST", VLLM, content=REQUEST) as response,
        ):
            for chunk in response.iter_raw():
                got += chunk
                begun.set()
        return got

    with ThreadPoolExecutor() as threads:
        reading = threads.submit(read)
        assert begun.wait(30)
        with httpx.Client(transport=transport, base_url="http://engine") as client:
            while not reading.done():
                client.post("/abort_requests", json={})
        assert reading.result().endswith(DONE)
    assert not transport.desk.playing


def test_threads_share_a_transport():
    log = MemoryLog()
    for number in range(64):
        sample(log, f"k{number}", PROMPT, [number, 1, 2], max_tokens=3)
    transport = ReplayTransport(log)

    def ask(_: int) -> list[int]:
        with httpx.Client(transport=transport, base_url="http://engine") as client:
            return tokens_of(client.post(VLLM, content=REQUEST).content)

    with ThreadPoolExecutor(8) as threads:
        answers = sorted(threads.map(ask, range(64)))
    assert answers == [[number, 1, 2] for number in range(64)]
    assert transport.report() == ([], [], [])


def test_what_plays_may_begin_and_end_while_it_is_looked_at():
    desk = ReplayTransport(MemoryLog()).desk

    class Restless:
        """Its gate is looked at while another thread ends this response."""

        @property
        def gate(self) -> Gate:
            desk.playing.pop(self, None)
            return Gate(is_open=False)

    desk.playing.update(dict.fromkeys([Restless(), Restless()]))
    assert not desk.running
    assert desk.playing == {}
