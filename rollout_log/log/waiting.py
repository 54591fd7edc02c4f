"""Who waits for a commit, and how they are woken: once per event loop and commit."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterable, Mapping

__all__ = ["Waiter", "wake"]


class Waiter:
    """Waits until samples are durable up to a sequence each; from a coroutine or from a thread."""

    __slots__ = ("_event", "future", "patient", "result", "targets")

    def __init__(
        self,
        targets: Mapping[int, int],
        *,
        patient: bool = False,
        loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        self.targets = targets
        self.patient = patient
        """Keeps waiting while commits fail."""
        self.result: bool | None = None
        self.future: asyncio.Future[bool] | None = loop.create_future() if loop else None
        self._event = None if loop else threading.Event()

    def wait(self, timeout: float | None) -> bool:
        """Block the calling thread; False when the time is up."""
        return self._event is not None and self._event.wait(timeout) and self.result is True

    def settle(self) -> None:
        """Hand the result over, on the waiter's own loop or thread."""
        if self._event is not None:
            self._event.set()
        elif self.future is not None and not self.future.done():
            self.future.set_result(self.result is True)


def wake(waiters: Iterable[Waiter], result: bool) -> None:
    """Settle waiters, from any thread."""
    loops: dict[asyncio.AbstractEventLoop, list[Waiter]] = {}
    for waiter in waiters:
        waiter.result = result
        if waiter.future is None:
            waiter.settle()
        else:
            loops.setdefault(waiter.future.get_loop(), []).append(waiter)
    for loop, theirs in loops.items():
        with contextlib.suppress(RuntimeError):  # the loop was closed: nobody waits any more
            loop.call_soon_threadsafe(_settle_all, theirs)


def _settle_all(waiters: list[Waiter]) -> None:
    for waiter in waiters:
        waiter.settle()
