"""Notices that a stream stands still, without costing anything per read."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from time import monotonic

from rollout_log.events import End

__all__ = ["Watchdog"]

LINGER_S = 10.0
"""How long what is of no use to anyone may take."""


class Watchdog:
    """Cancels the task that made it when no read came for `limit` seconds, or when `stop` says so.

    `last_read` says by `time.monotonic` when a read came last. No limit holds while it is None: queueing
    and a paused engine are normal. `finished` is asked whenever nothing came for a second, and once it
    says that all that matters has come, the limit is ten seconds. When the limit is reached, `healthy` is
    asked first, and while it says yes one more limit is granted. The cancellation is meant for the code
    between `start` and `close`; `fired` says whose it was.
    """

    def __init__(
        self,
        limit: float,
        last_read: Callable[[], float | None],
        *,
        healthy: Callable[[], Awaitable[bool]] | None = None,
        stop: Callable[[], bool] | None = None,
        finished: Callable[[], bool] | None = None,
        interval: float = 1.0,
    ) -> None:
        self._limit = limit
        self.fired: str | None = None
        """`timeout`, `stopped` or what `fire` was told, once it has cancelled the task."""
        self._last_read = last_read
        self._healthy = healthy
        self._stop = stop
        self._finished = finished
        self._interval = min(interval, limit)
        self._task: asyncio.Task[object] | None = None
        self._cancels = 0
        """Cancellations that the task had asked of it before."""
        self._granted_at = float("-inf")
        self._timer: asyncio.TimerHandle | None = None
        self._check: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin watching the current task."""
        self._task = asyncio.current_task()
        self._cancels = _cancels()
        self._schedule()

    def close(self) -> None:
        """Stop watching."""
        self._task = None
        if self._timer is not None:
            self._timer.cancel()
        if self._check is not None:
            self._check.cancel()

    def fire(self, why: str) -> None:
        """Cancel the task, unless that was done or the watch is over."""
        if self._task is not None and self.fired is None:
            self.fired = why
            self._task.cancel()

    def absorb(self) -> bool:
        """Whether a CancelledError just caught was this watchdog's alone; it is then taken back."""
        if self.fired is None:
            return False
        take_back_cancel()
        return _cancels() <= self._cancels

    def verdict(self) -> tuple[End, str]:
        """How the request ends that this watchdog has cancelled, and why."""
        if self.fired == "stopped":
            return "cancelled", "the run aborts"
        return "timeout", f"no bytes for {self._limit:g} s"

    def _schedule(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(self._interval, self._tick)

    def _tick(self) -> None:
        if self._task is None or self.fired:
            return
        if self._stop is not None and self._stop():
            self.fire("stopped")
        elif (
            (last := self._last_read()) is not None
            and self._is_over(monotonic() - max(last, self._granted_at))
            and (self._check is None or self._check.done())
        ):
            if self._healthy is None or self._granted_at > last:
                self.fire("timeout")
            else:
                self._check = asyncio.get_running_loop().create_task(self._ask(self._healthy, last))
        self._schedule()

    def _is_over(self, silent: float) -> bool:
        """Whether the limit is reached after so many seconds without a read."""
        if silent >= self._interval and self._finished is not None and self._finished():
            self._limit = min(self._limit, LINGER_S)
        return silent >= self._limit

    async def _ask(self, healthy: Callable[[], Awaitable[bool]], last: float) -> None:
        try:
            answer = await healthy()
        except Exception:  # what cannot be asked is not healthy
            answer = False
        if self._last_read() != last:
            return
        if answer:
            self._granted_at = monotonic()
        else:
            self.fire("timeout")


def take_back_cancel() -> None:
    """Tell the task that a cancellation was dealt with (Python 3.11 counts them)."""
    task = asyncio.current_task()
    uncancel = getattr(task, "uncancel", None)
    if uncancel is not None:
        uncancel()


def _cancels() -> int:
    """How many cancellations of the current task nobody has taken back (Python 3.10 cannot tell)."""
    task = asyncio.current_task()
    cancelling = getattr(task, "cancelling", None)
    return cancelling() if cancelling is not None else 0
