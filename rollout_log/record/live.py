"""One sample of this process: what is folded so far, and how much of it the log took."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

import msgspec

from rollout_log.errors import RecordingFailed
from rollout_log.events import Closed, Event, Observed, Opened, Unrecorded
from rollout_log.fold import Rollout
from rollout_log.log.summary import decode_summary, encode_summary
from rollout_log.record.summary import summarize
from rollout_log.response import Origin

if TYPE_CHECKING:
    from rollout_log.log import Log
    from rollout_log.record.exchange import Exchange

__all__ = ["Closable", "LiveSample"]

_logger = logging.getLogger("rollout_log")


class Closable(msgspec.Struct):
    """A sample that left the memory: it can be closed, and no more."""

    key: str
    log: Log
    ordinal: int
    written: int
    """Events that the log has."""
    summary: bytes

    def close(self, closed: Closed) -> None:
        """Write down what the trainer made of the sample. Raises only where the log is strict."""
        before = decode_summary(self.summary)
        summary = msgspec.structs.replace(
            before,
            trainer_status=closed.status,
            step=before.step if closed.step is None else closed.step,
            evaluation=before.evaluation or closed.evaluation,
            events=before.events + 1,
            updated_unix_ns=time.time_ns(),
        )
        try:
            self.log.append(self.ordinal, self.written, [closed], summary)
        except RecordingFailed:
            raise
        except Exception as error:
            _logger.warning("%r was not closed in the log: %s: %s", self.key, type(error).__name__, error)


class LiveSample:
    """One sample of this process: what is folded so far, and how much of it the log took."""

    def __init__(self, opened: Opened, log: Log | None, state: Rollout | None = None) -> None:
        self.opened = opened
        self.rollout = state or Rollout()
        self.exchange: Exchange | None = None
        """The latest request's; the sample is busy while it is open."""
        self.path: str | None = None
        self.model: str | None = None
        self.children = 1
        self._log = log
        self._ordinal: int | None = None
        self._written = 0
        self._unrecorded_from: int | None = None
        self._pid = os.getpid()

    @property
    def inherited(self) -> bool:
        """Whether another process, which this one was forked from, records the sample."""
        return self._ordinal is not None and self._pid != os.getpid()

    @property
    def recorded(self) -> int:
        """How many tokens of the response the log has, or will have."""
        length = self.rollout.length
        return length if self._unrecorded_from is None else min(self._unrecorded_from, length)

    @property
    def key(self) -> str:
        """The sample's name in the log."""
        return self.opened.key

    @property
    def kept(self) -> Collection[str]:
        """The large parts that the log keeps whole; see `elision`."""
        return getattr(self._log, "keep", ())

    @property
    def hold_back_s(self) -> float:
        """For how many seconds what comes for the log may wait before it is handed over."""
        return self._log.hold_back_s if self._log is not None else 0.0

    @property
    def busy(self) -> bool:
        """Whether a request is open and its consumer not known to be gone."""
        return self.exchange is not None and not self.exchange.ended

    def open(self) -> None:
        """Write the sample's first event."""
        self.rollout.apply(self.opened)
        self.write([self.opened], summarized=True)

    def write(self, events: Sequence[Event], *, summarized: bool = False, since: float | None = None) -> bool:
        """Hand events to the log; False when it did not take them. Raises only where the log is strict.

        `summarized`: the events are folded already, and the sample's summary goes with them. `since`: as
        `Log.append` takes it.
        """
        log = self._log
        if log is None:
            return False
        try:
            if summarized:
                return self._append_with_summary(log, events)
            if self._ordinal is None or not log.append(self._ordinal, self._written, events, None, since):
                return False
            self._written += len(events)
            return True
        except RecordingFailed:
            raise
        except Exception as error:
            _logger.warning("recording of %r stopped: %s: %s", self.key, type(error).__name__, error)
            return False

    def _append_with_summary(self, log: Log, events: Sequence[Event]) -> bool:
        if self._ordinal is None:
            self._create(log)
            if events and events[0] is self.opened:
                events = events[1:]
            if not events:
                return self._ordinal is not None
        summary = summarize(self.rollout)
        if self._ordinal is None or not log.append(self._ordinal, self._written, events, summary):
            return False
        self._written += len(events)
        return True

    def miss(self, length: int) -> None:
        """The log did not take what came after the first `length` tokens; the next request makes it up."""
        if self._unrecorded_from is None or length < self._unrecorded_from:
            self._unrecorded_from = length

    def make_up(self, base: int) -> list[Observed | Unrecorded]:
        """Return what must be written first, before a request at `base`, to close a gap."""
        start, self._unrecorded_from = self._unrecorded_from, None
        if start is None:
            return []
        choice = self.rollout.choice_or_first()
        events: list[Observed | Unrecorded] = []
        for run in choice.runs:
            kind = Observed if run.origin is Origin.OBSERVED else Unrecorded
            if token_ids := choice.token_ids[max(run.start, start) : min(run.end, base)]:
                events.append(kind(max(run.start, start), token_ids))
        return events

    def close(self, closed: Closed) -> None:
        """Write down what the trainer made of the sample."""
        if self.exchange is not None:
            self.exchange.take()
        self.rollout.apply(closed)
        self.write([closed], summarized=True)

    def closable(self) -> Closable | None:
        """Return what stays of a sample that leaves the memory; None where the log has nothing of it."""
        if self._log is None or self._ordinal is None or self.inherited:
            return None
        summary = encode_summary(summarize(self.rollout))
        return Closable(self.key, self._log, self._ordinal, self._written, summary)

    async def settle(self) -> bool:
        """Wait, as the log's durability says, until what was written is on disk."""
        if self._log is None or self._ordinal is None or self.inherited:
            return True
        return await self._log.settle(self._ordinal)

    def settle_sync(self) -> bool:
        """As `settle`, for callers without an event loop."""
        if self._log is None or self._ordinal is None or self.inherited:
            return True
        return self._log.flush_sync(self._ordinal, timeout=0.1)

    def _create(self, log: Log) -> None:
        self._ordinal, self._written, self._pid = log.create(self.opened), 0, os.getpid()
        # Of a new one the log makes the summary itself, and the first request brings the next.
        summary = summarize(self.rollout) if self.rollout.length else None
        if not log.append(self._ordinal, 0, [self.opened], summary):
            self._ordinal = None
            self._unrecorded_from = 0
            return
        self._written = 1
