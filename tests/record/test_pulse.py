"""The beats of an event loop: what is done in them, in which order, and that nothing is left of them."""

from __future__ import annotations

import asyncio
import gc
import itertools
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest

from log.test_processes import in_fork
from rollout_log.log.ending import before_end
from rollout_log.record.pulse import _AT_ONCE, _pulses, pulse

BEAT_S = 0.05


class Counted:
    """The event loop's own times: which callbacks were asked for, and what its exception handler was told."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.loop = asyncio.get_running_loop()
        self.later: list[asyncio.TimerHandle] = []
        self.soon = 0
        self.told: list[dict[str, Any]] = []
        call_later, call_soon = self.loop.call_later, self.loop.call_soon

        def later(delay: float, callback: Callable[..., Any], *args: Any, **more: Any) -> asyncio.TimerHandle:
            handle = call_later(delay, callback, *args, **more)
            if type(getattr(callback, "__self__", None)).__name__ == "Pulse":
                self.later.append(handle)
            return handle

        def soon(callback: Callable[..., Any], *args: Any, **more: Any) -> asyncio.Handle:
            self.soon += type(getattr(callback, "__self__", None)).__name__ == "Pulse"
            return call_soon(callback, *args, **more)

        monkeypatch.setattr(self.loop, "call_later", later)
        monkeypatch.setattr(self.loop, "call_soon", soon)
        self.loop.set_exception_handler(lambda _, context: self.told.append(context))

    @property
    def pending(self) -> int:
        """How many of the timers are still to come."""
        return sum(not handle.cancelled() and handle.when() > self.loop.time() for handle in self.later)


@pytest.fixture
async def counted(monkeypatch: pytest.MonkeyPatch) -> Counted:
    return Counted(monkeypatch)


async def beats(number: int = 1) -> None:
    await asyncio.sleep(1.5 * BEAT_S * number)


async def test_what_comes_within_a_beat_is_done_in_one_in_its_order(counted):
    done: list[int] = []
    for number in range(5):
        pulse(BEAT_S).soon(lambda number=number: done.append(number))
        await asyncio.sleep(0)
    assert (done, len(counted.later)) == ([], 1)
    await beats()
    assert done == [0, 1, 2, 3, 4]
    assert pulse(BEAT_S).idle
    assert counted.pending == 0, "no timer where nothing is to be done"
    await beats(3)
    assert len(counted.later) == 1


async def test_what_a_work_hands_in_waits_for_the_next_beat(counted):
    done: list[float] = []

    def again() -> None:
        done.append(counted.loop.time())
        if len(done) < 3:
            pulse(BEAT_S).soon(again)

    pulse(BEAT_S).soon(again)
    await beats(5)
    assert len(done) == len(counted.later) == 3
    assert min(after - before for before, after in itertools.pairwise(done)) > 0.9 * BEAT_S


async def test_many_works_are_done_in_turns_with_the_rest_of_the_loop(counted):
    """However many are handed in meanwhile, there is one timer for them, and one turn on its way."""
    done: list[int] = []
    between: list[int] = []
    late: list[int] = []
    several = 3 * _AT_ONCE + 5

    def work(number: int) -> None:
        done.append(number)
        if number % 100 == 0:
            pulse(BEAT_S).soon(lambda: late.append(number))

    for number in range(several):
        pulse(BEAT_S).soon(lambda number=number: work(number))
    while len(done) < several:
        await asyncio.sleep(0)
        if done and done[-1:] != between[-1:]:
            between.append(done[-1])
        assert counted.pending <= 1
    assert between == [_AT_ONCE - 1, 2 * _AT_ONCE - 1, 3 * _AT_ONCE - 1, several - 1]
    assert (done, late) == (list(range(several)), [])
    await beats()
    assert late == list(range(0, several, 100))
    assert (len(counted.later), counted.soon) == (2, 3)


async def test_a_work_that_fails_stops_no_other(counted):
    done: list[str] = []

    def fail() -> None:
        raise LookupError("of no use")

    for work in (lambda: done.append("before"), fail, lambda: done.append("after")):
        pulse(BEAT_S).soon(work)
    await beats()
    assert done == ["before", "after"]
    (context,) = counted.told
    assert isinstance(context["exception"], LookupError)


async def test_what_a_signal_handler_raises_in_a_work_keeps_the_others_for_their_turn():
    """As Ctrl-C does in Python 3.10: the loop goes on, to cancel its tasks."""
    done: list[str] = []

    def interrupted() -> None:
        raise KeyboardInterrupt

    beating = pulse(BEAT_S)
    beating._now.extend([interrupted, lambda: done.append("after")])
    with pytest.raises(KeyboardInterrupt):
        beating._turn()
    await asyncio.sleep(0)
    assert done == ["after"]


async def test_a_flush_does_what_waits_and_leaves_no_timer(counted):
    done: list[int] = []
    for number in range(2 * _AT_ONCE):
        pulse(BEAT_S).soon(lambda number=number: done.append(number))
    pulse(BEAT_S).flush()
    assert done == list(range(2 * _AT_ONCE))
    assert counted.pending == 0
    pulse(BEAT_S).soon(lambda: done.append(-1))
    await beats()
    assert done[-1] == -1


async def test_a_work_may_flush():
    done: list[int] = []
    pulse(BEAT_S).soon(pulse(BEAT_S).flush)
    for number in range(2 * _AT_ONCE):
        pulse(BEAT_S).soon(lambda number=number: done.append(number))
    await beats()
    assert done == list(range(2 * _AT_ONCE))


async def test_before_a_log_ends_what_waits_is_done_at_once():
    done: list[bool] = []
    pulse(BEAT_S).soon(lambda: done.append(True))
    before_end()
    assert done == [True]


async def test_before_a_log_ends_in_another_thread_what_waits_is_done_in_the_loops_own():
    threads: list[threading.Thread] = []
    pulse(BEAT_S).soon(lambda: threads.append(threading.current_thread()))
    await asyncio.get_running_loop().run_in_executor(None, before_end)
    assert threads == [threading.current_thread()]


def test_before_a_log_ends_what_waits_in_a_stopped_loop_is_done_as_well():
    done: list[bool] = []

    async def begin() -> None:
        pulse(BEAT_S).soon(lambda: done.append(True))

    loop = asyncio.new_event_loop()
    try:
        loop.run_until_complete(begin())
        before_end()
        assert done == [True]
    finally:
        loop.close()


async def test_a_loop_that_hangs_holds_up_no_end(monkeypatch):
    monkeypatch.setattr("rollout_log.record.pulse._PATIENCE_S", 0.05)
    done: list[bool] = []
    pulse(BEAT_S).soon(lambda: done.append(True))
    thread = threading.Thread(target=before_end)
    thread.start()
    thread.join()  # which the loop does not survive a beat of
    assert done == []
    await asyncio.sleep(0)
    assert done == [True]


def test_each_loop_has_its_own_and_a_closed_one_leaves_nothing():
    async def use() -> None:
        pulse(BEAT_S).soon(lambda: None)
        assert pulse(BEAT_S) is pulse(BEAT_S)

    loops = [asyncio.new_event_loop() for _ in range(2)]
    for loop in loops:
        loop.run_until_complete(use())
    assert _pulses[loops[0], BEAT_S] is not _pulses[loops[1], BEAT_S]
    for loop in loops:
        loop.close()
    gone = [weakref.ref(loop) for loop in loops]
    del loop, loops
    asyncio.run(use())
    gc.collect()
    assert [loop() for loop in gone] == [None, None]


def test_what_waited_in_a_loop_that_was_closed_is_done_before_another_loop_beats():
    done: list[str] = []

    async def begin(name: str) -> None:
        pulse(BEAT_S).soon(lambda: done.append(name))

    asyncio.run(begin("first"))
    asyncio.run(begin("second"))
    assert done == ["first"]
    before_end()
    assert done == ["first", "second"]


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_what_waits_is_not_done_in_the_child_of_a_fork():
    done: list[str] = []
    loop = asyncio.new_event_loop()

    async def begin() -> None:
        pulse(BEAT_S).soon(lambda: done.append("parent's"))

    async def go_on() -> None:
        pulse(BEAT_S).soon(lambda: done.append("own"))
        await beats()

    def work() -> list[str]:
        before_end()
        loop.run_until_complete(go_on())
        return done

    loop.run_until_complete(begin())
    try:
        assert in_fork(work) == ["own"]
        time.sleep(0.02)
        loop.run_until_complete(go_on())
        assert done.count("own") == 1
        assert done.count("parent's") == 1
    finally:
        loop.close()
