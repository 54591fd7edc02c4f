"""The thread that writes: it takes what is due from the queue, commits it, and goes on in new segments.

While the disk is full or commits fail it keeps what it has in hand, warns once, and tries again every second.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from multiprocessing.util import Finalize

from rollout_log.log.committer import Committer
from rollout_log.log.environment import Row
from rollout_log.log.keeper import Keeper
from rollout_log.log.queue import RETRY_S, Queue

__all__ = ["WriterThread"]

_logger = logging.getLogger("rollout_log")


class WriterThread:
    """One writer's. It begins with the first event, and ends when the queue is closed and empty."""

    def __init__(self, queue: Queue, committer: Committer, keeper: Keeper) -> None:
        self._queue = queue
        self._committer = committer
        self._keeper = keeper
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    @property
    def is_begun(self) -> bool:
        return self._thread is not None

    def begin(self, at_exit: Callable[[], None]) -> str | None:
        """Begin, if it has not; `at_exit` ends it with the process. Returns why it cannot, None where it can.

        Where the system has no thread to give just now, the next call tries again.
        """
        with self._lock:
            if self._thread is not None or self._queue.closed:
                return None
            thread = threading.Thread(target=self._run, name="rollout-log", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:
                return str(error)
            self._thread = thread
            # A child of multiprocessing leaves without running what atexit knows.
            self._finalizer = Finalize(None, at_exit, exitpriority=10)
            return None

    def join(self) -> None:
        """Wait for its end, once the queue is closed."""
        if self._thread is not None:
            self._thread.join()
            self._finalizer.cancel()

    def _run(self) -> None:
        rows: list[Row] | None = None
        while True:
            parts, rotate, stopping = self._queue.take()
            try:
                self._committer.start()
                if rows is None:
                    rows = self._committer.encode(parts)
                size = self._committer.write(rows) if rows else 0
            except Exception as error:
                self._report(error)
                if stopping:
                    _logger.warning(
                        "%s was closed with %d events that could not be written",
                        self._queue.path,
                        self._queue.give_up(),
                    )
                    return
                if rotate:
                    self._queue.rotate()
                continue
            rows, parts = None, []  # nothing of them is to live on while this thread sleeps
            if self._queue.committed(size, self._committer.number):
                _logger.warning("%s records again", self._queue.path)
            self._rotate(now=rotate)
            if stopping and self._queue.is_empty():
                return

    def _report(self, error: Exception) -> None:
        if self._queue.failed():
            _logger.warning(
                "cannot write to %s: %s: %s; requests go unrecorded until it works again (tried every %g s)",
                self._committer.folder,
                type(error).__name__,
                error,
                RETRY_S,
            )

    def _rotate(self, *, now: bool) -> None:
        try:
            if not now and not self._committer.is_full():
                return
            self._committer.rotate()
        except Exception as error:
            self._committer.segment_bytes = self._committer.segment_bytes * 5 // 4
            _logger.warning(
                "no new segment in %s: %s; going on in the old one", self._committer.folder, error
            )
        else:
            self._keeper.tend(self._committer.number)
            self._queue.counters.segments += 1  # who sees the new one may count on the old one being tended
