"""A process that keeps itself to a share of one core, whatever it is at.

The kernel interrupts it after every bit of CPU time that it used (`ITIMER_PROF`), and it then sleeps as long
as it takes. So no code that is to be slowed down has to know.
"""

from __future__ import annotations

import atexit
import signal
import time
from collections.abc import Callable

__all__ = ["Duty", "limit_cpu"]

TICK = 0.05
"""Seconds of CPU time between two rests."""


class Duty:
    """Turns work into rest: after `rest`, CPU time was at most `share` of the time since the last one."""

    def __init__(
        self,
        share: float,
        *,
        cpu: Callable[[], float] = time.process_time,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.share = share
        self._cpu, self._clock, self._sleep = cpu, clock, sleep
        self._since = cpu(), clock()

    def rest(self) -> None:
        """Sleep for what was worked. Time that was spent waiting counts, but is not saved up."""
        worked, passed = self._cpu() - self._since[0], self._clock() - self._since[1]
        if (owed := worked / self.share - passed) > 0:
            self._sleep(owed)
        self._since = self._cpu(), self._clock()


def limit_cpu(share: float) -> None:
    """Keep this process to a share of one core from now on. For the main thread of a process of one's own."""
    duty = Duty(share)
    signal.signal(signal.SIGPROF, lambda *_: duty.rest())
    signal.siginterrupt(signal.SIGPROF, False)  # whoever waits in the kernel is not disturbed
    signal.setitimer(signal.ITIMER_PROF, TICK, TICK)
    atexit.register(signal.setitimer, signal.ITIMER_PROF, 0)  # the interpreter ends without handlers
