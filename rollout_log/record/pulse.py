"""What is done for all streams of an event loop together, so that it costs a fraction of each by itself.

Hundreds of streams take turns in an event loop, and what is done between two reads of one finds its code and
data gone from the caches. Done for all that came within a beat, one after the other, it finds the code there.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable
from time import monotonic

from rollout_log.log.ending import tell_before_end

__all__ = ["Pulse", "pulse"]

_AT_ONCE = 128
"""Works after which whatever else waits in the event loop gets its turn: about two milliseconds."""
_PATIENCE_S = 1.0
"""How long another thread's event loop may take to do what waits, before a log ends."""

_Work = Callable[[], None]


class Pulse:
    """Beats of one event loop, in whose thread it is used; there are none while nothing is to be done.

    A work must not raise: who handed it in is not there to be told. Where it does all the same, the event
    loop's exception handler is, and the other works are done.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, delay: float) -> None:
        """`delay`: seconds between the first work that waits and the beat."""
        self._loop = loop
        self._delay = delay
        self._next: list[_Work] = []
        """For the next beat."""
        self._timer: asyncio.TimerHandle | None = None
        """Of the next beat; there is one where `_next` has works."""
        self._now: deque[_Work] = deque()
        """Due, and to be done in turns; where it has works outside of a turn, the next turn is on its way."""

    @property
    def idle(self) -> bool:
        """Whether nothing waits for a beat."""
        return not (self._next or self._now)

    def soon(self, work: _Work) -> None:
        """Call `work` once, at the next beat."""
        self._next.append(work)
        if self._timer is None:
            self._timer = self._loop.call_later(self._delay, self._beat)

    def flush(self) -> None:
        """Do now what waits for a beat."""
        works = [*self._now, *self._next]
        self.forget()
        for work in works:
            self._do(work)

    def forget(self) -> None:
        """Do nothing of what waits."""
        self._now.clear()
        self._next.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _beat(self) -> None:
        self._timer = None
        works, self._next = self._next, []
        self._do_in_turns(works)

    def _do_in_turns(self, works: Iterable[_Work]) -> None:
        under_way = bool(self._now)
        self._now.extend(works)
        if not under_way:
            self._turn()

    def _turn(self) -> None:
        now = self._now
        try:
            for _ in range(min(_AT_ONCE, len(now))):
                if now:  # a work may have flushed
                    self._do(now.popleft())
        finally:  # whatever a signal handler raised in between
            if now:
                self._loop.call_soon(self._turn)

    def _do(self, work: _Work) -> None:
        try:
            work()
        except Exception as error:
            context = {"message": f"rollout-log: {work!r} failed in a beat", "exception": error}
            self._loop.call_exception_handler(context)


_pulses: dict[tuple[asyncio.AbstractEventLoop, float], Pulse] = {}


def pulse(delay: float) -> Pulse:
    """Return the pulse of the running event loop that beats `delay` seconds after the first work."""
    loop = asyncio.get_running_loop()
    found = _pulses.get((loop, delay))
    if found is None:
        for other in list(_pulses):
            if other[0].is_closed() and (left := _pulses.pop(other, None)) is not None:
                left.flush()  # it has no beats any more
        found = _pulses[loop, delay] = Pulse(loop, delay)
    return found


def _flush_all() -> None:
    """Do now what waits for a beat of any event loop, each in its own thread, if it is running."""
    try:
        own = asyncio.get_running_loop()
    except RuntimeError:
        own = None
    deadline, waiting = monotonic() + _PATIENCE_S, []
    for (loop, _), each in list(_pulses.items()):
        if each.idle:
            continue
        if loop is own or not loop.is_running():
            each.flush()
            continue
        done = threading.Event()
        with contextlib.suppress(RuntimeError):  # it was closed just now
            loop.call_soon_threadsafe(_flush_and_tell, each, done)
            waiting.append(done)
    for done in waiting:
        done.wait(max(deadline - monotonic(), 0))


def _flush_and_tell(each: Pulse, done: threading.Event) -> None:
    each.flush()
    done.set()


def _after_fork_in_child() -> None:
    """What waits is the parent's, even where the child goes on with its event loop."""
    for each in _pulses.values():
        each.forget()
    _pulses.clear()


tell_before_end(_flush_all)
os.register_at_fork(after_in_child=_after_fork_in_child)
