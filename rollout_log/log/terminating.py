"""SIGTERM ends a process that does not handle it at once, without its exit handlers: flush before that."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from types import FrameType

__all__ = ["flush_on_sigterm"]


def flush_on_sigterm(flush: Callable[[], object]) -> None:
    """Have SIGTERM call `flush` in a thread of its own, and then end the process as it would have.

    Only where nobody handles SIGTERM, and only from the main thread, which alone may say so. Whoever handles
    it afterwards takes it over: leaving by `sys.exit` runs the exit handlers, which flush as well.
    """

    def end() -> None:
        try:
            flush()
        finally:
            os.kill(os.getpid(), signal.SIGTERM)

    def terminate(number: int, _: FrameType | None) -> None:
        signal.signal(number, signal.SIG_DFL)
        try:  # not here: the code that was interrupted may hold the very lock that a flush takes
            threading.Thread(target=end, name="rollout-log-sigterm", daemon=True).start()
        except RuntimeError:  # the interpreter is on its way out
            os.kill(os.getpid(), number)

    if threading.current_thread() is threading.main_thread() and (
        signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    ):
        signal.signal(signal.SIGTERM, terminate)
