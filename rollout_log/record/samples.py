"""The samples a process is recording: which sample a request belongs to, and where it goes on from.

A request joins the sample of its key, or, where gluing it on would be untrue (another one is open, another
path or model, other prompt), a child of it: `KEY~2`, `KEY~3`, … Nothing here does IO; what happened goes to
the log as events, which the log writes in its own thread.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections import OrderedDict
from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from rollout_log.engines import RequestInfo, dialect_for
from rollout_log.errors import RecordingFailed
from rollout_log.events import (
    Cause,
    Closed,
    Event,
    Marked,
    Observed,
    Opened,
    Requested,
    Unrecorded,
    elide_token_ids,
)
from rollout_log.fold import Rollout
from rollout_log.record.base import Start, start_of
from rollout_log.record.elision import elide
from rollout_log.record.exchange import Exchange
from rollout_log.record.headers import safe_headers, safe_url
from rollout_log.record.summary import summarize
from rollout_log.response import Origin

if TYPE_CHECKING:
    from rollout_log.log import Log

__all__ = ["LiveSample", "Samples"]

_logger = logging.getLogger("rollout_log")
_HOST = socket.gethostname()
_KEPT_IDLE = 16_384
"""Samples that stay in memory, so that a resume finds them; those with an open request always do."""
_KEPT_TOKENS = 8 << 20
"""Tokens that those without an open request may have, at about 70 bytes each."""
_COUNT_EVERY = 256
"""Samples that open between two times that the tokens are counted."""


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
    def key(self) -> str:
        """The sample's name in the log."""
        return self.opened.key

    @property
    def kept(self) -> Collection[str]:
        """The large parts that the log keeps whole; see `elision`."""
        return getattr(self._log, "keep", ())

    @property
    def busy(self) -> bool:
        """Whether a request is open and its consumer not known to be gone."""
        return self.exchange is not None and not self.exchange.ended

    def open(self) -> None:
        """Write the sample's first event."""
        self.rollout.apply(self.opened)
        self.write([self.opened], summarized=True)

    def write(self, events: Sequence[Event], *, summarized: bool = False) -> bool:
        """Hand events to the log; False when it did not take them. Raises only where the log is strict.

        `summarized`: the events are folded already, and the sample's summary goes with them.
        """
        try:
            return self._log is not None and self._append(self._log, events, summarized)
        except RecordingFailed:
            raise
        except Exception as error:
            _logger.warning("recording of %r stopped: %s: %s", self.key, type(error).__name__, error)
            return False

    def _append(self, log: Log, events: Sequence[Event], summarized: bool) -> bool:
        summary = None
        if summarized:
            if self._ordinal is None or self._pid != os.getpid():  # new, or inherited through a fork
                self._create(log)
                if events and events[0] is self.opened:
                    events = events[1:]
            summary = summarize(self.rollout)
        if self._ordinal is None:
            return False
        if events and not log.append(self._ordinal, self._written, events, summary):
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
        self.rollout.apply(closed)
        self.write([closed], summarized=True)

    async def settle(self) -> bool:
        """Wait, as the log's durability says, until what was written is on disk."""
        if self._log is None or self._ordinal is None or self._pid != os.getpid():
            return True
        return await self._log.settle(self._ordinal)

    def settle_sync(self) -> bool:
        """As `settle`, for callers without an event loop."""
        if self._log is None or self._ordinal is None or self._pid != os.getpid():
            return True
        return self._log.flush_sync(self._ordinal, timeout=0.1)

    def _create(self, log: Log) -> None:
        self._ordinal, self._written, self._pid = log.create(self.opened), 0, os.getpid()
        if not log.append(self._ordinal, 0, [self.opened], summarize(self.rollout)):
            self._ordinal = None
            self._unrecorded_from = 0
            return
        self._written = 1


class Samples:
    """All samples of one log in this process, by key."""

    def __init__(self, log: Log | None) -> None:
        self._log = log
        self.unrecorded = 0
        """Requests that the log did not take."""
        self._live: OrderedDict[str, LiveSample] = OrderedDict()
        self._lock = threading.RLock()
        self._opened = 0

    def get(self, key: str) -> LiveSample | None:
        """Return the newest life of a sample, None when this process has not seen it."""
        return self._live.get(key)

    def all(self) -> list[LiveSample]:
        """Return the samples in memory, those that were used last at the end."""
        with self._lock:
            return list(self._live.values())

    def adopt(self, opened: Opened, older: Rollout, length: int, *, path: str, model: str | None) -> None:
        """Begin another life of a sample, from the first `length` tokens of one that another process left."""
        state = Rollout.continue_from(older, length)
        before = older.opened or Opened(key=opened.key)
        incarnation = before.incarnation
        opened = msgspec.structs.replace(
            opened,
            run=opened.run or before.run,
            incarnation=incarnation + 1,
            continues=(incarnation, length),
            opened_unix_ns=_later(before),
            host=_HOST,
        )
        with self._lock:
            self._forget_idle()
            sample = self._live[opened.key] = LiveSample(opened, self._log, state)
            sample.path, sample.model = path, model
            sample.open()

    def forget(self, key: str) -> None:
        """Let go of a sample and its children, but for those that are busy; the log keeps what it has."""
        with self._lock:
            sample = self._live.get(key)
            children = range(2, sample.children + 1) if sample is not None else ()
            for name in (key, *(f"{key}~{number}" for number in children)):
                if name in self._live and not self._live[name].busy:
                    del self._live[name]

    def request(
        self,
        key: str | None,
        *,
        method: str = "POST",
        path: str,
        body: bytes,
        url: str = "",
        headers: Iterable[tuple[str, str]] = (),
        base: int | None = None,
        cause: Cause | None = None,
        weight_version: str | None = None,
        supersede: bool = False,
        opened: Opened | None = None,
    ) -> Exchange:
        """Begin a request for a sample and return what takes in its response.

        `key` None makes a new one. `base`, `cause`: the caller's own word, before inference. `supersede`:
        the consumer of an open request of this key is gone. `opened`: what else is known of the sample,
        should it be new (its `step` counts for the request in any case).
        """
        key = _storable(key) if key else _new_key()
        dialect = dialect_for(path)
        info = dialect.read_request(body) if dialect else RequestInfo()
        with self._lock:
            sample = self._place(key, path, info, opened, base=base, supersede=supersede)
            start = start_of(sample.rollout, info.token_ids, base)
            number = len(sample.rollout.requests)
            elided = elide_token_ids(body, info.token_ids)
            requested = Requested(
                number=number,
                base=start.base,
                cause=cause or start.cause,
                dialect=dialect.name if dialect else "",
                method=method,
                path=safe_url(path),
                body=elided.body,
                ids_at=elided.at,
                ids_separator=elided.separator,
                headers=safe_headers(headers),
                weight_version=weight_version,
                sent_unix_ns=time.time_ns(),
                url=safe_url(url),
                step=opened.step if opened else None,
            )
            recording = self._begin(sample, start, requested)
            self.unrecorded += not recording and self._log is not None
            exchange = sample.exchange = Exchange(sample, number, recording=recording)
        return exchange

    def _begin(self, sample: LiveSample, start: Start, requested: Requested) -> bool:
        rollout = sample.rollout
        events: list[Event] = []
        if start.observed:
            events.append(Observed(base=start.keep, token_ids=start.observed))
        events.append(requested)
        made_up = sample.make_up(start.keep)
        for event in events:
            rollout.apply(event)
        if sample.write(elide([*made_up, *events], sample.kept), summarized=True):
            return True
        sample.miss(made_up[0].base if made_up else start.keep)
        return False

    def _place(
        self,
        key: str,
        path: str,
        info: RequestInfo,
        opened: Opened | None,
        *,
        base: int | None,
        supersede: bool,
    ) -> LiveSample:
        """Find or make the sample a request belongs to."""
        sample = self._live.get(key)
        if sample is None or sample.rollout.closed is not None:
            return self._open(key, path, info, opened, after=sample)
        self._live.move_to_end(key)
        again = base == 0 and info.token_ids is None and (path, info.model) == (sample.path, sample.model)
        if not again and not _belongs(sample, path, info):  # text that the caller knows to start over
            return self._child(sample, path, info, opened)
        if sample.busy and sample.exchange is not None:
            if not supersede:
                child = self._child(sample, path, info, opened)
                mark = Marked("concurrent_request", {"child": child.key}, time.time_ns())
                sample.rollout.apply(mark)
                sample.write([mark])
                return child
            # It is not ended: what still comes for it is kept, counted and never appended (`late_delta`).
        elif base is None:
            taken_up = self._taken_up(sample, path, info)
            if taken_up is not None and not _goes_on(sample, path, info, taken_up.rollout.length):
                return taken_up
        return sample

    def _child(self, parent: LiveSample, path: str, info: RequestInfo, opened: Opened | None) -> LiveSample:
        if (child := self._taken_up(parent, path, info)) is not None:
            return child
        while True:
            parent.children += 1
            name = f"{parent.key}~{parent.children}"
            there = self._live.get(name)
            if there is None or there.opened.parent == parent.key:  # of an older life, but nobody else's
                return self._open(name, path, info, opened, after=there, parent=parent.key)

    def _taken_up(self, parent: LiveSample, path: str, info: RequestInfo) -> LiveSample | None:
        """Return the child that a request takes up exactly where it stands; of several, the longest."""
        if info.token_ids is None:
            return None
        names = (f"{parent.key}~{number}" for number in range(2, parent.children + 1))
        children = [child for name in names if (child := self._live.get(name)) is not None and not child.busy]
        return max(
            (child for child in children if _goes_on(child, path, info)),
            key=lambda child: child.rollout.length,
            default=None,
        )

    def _open(
        self,
        key: str,
        path: str,
        info: RequestInfo,
        opened: Opened | None,
        *,
        after: LiveSample | None = None,
        parent: str | None = None,
    ) -> LiveSample:
        template = opened or Opened(key=key)
        fields: dict[str, Any] = {
            "key": key,
            "run": template.run or (self._log.run if self._log else ""),
            "incarnation": after.opened.incarnation + 1 if after else template.incarnation,
            "parent": parent,
            "opened_unix_ns": _later(after.opened if after else None),
            "host": _HOST,
        }
        if info.token_ids is not None and not template.prompt_token_ids:
            fields["prompt_token_ids"] = list(info.token_ids)
        sample = LiveSample(msgspec.structs.replace(template, **fields), self._log)
        sample.path, sample.model = path, info.model
        self._forget_idle()
        self._live[key] = sample
        sample.open()
        return sample

    def _forget_idle(self) -> None:
        """Before another sample comes, keep within the limits; those go first that were used longest ago."""
        self._opened += 1
        tokens = 0
        if self._opened % _COUNT_EVERY == 0:
            tokens = sum(_tokens_of(sample) for sample in self._live.values() if not sample.busy)
        while len(self._live) > _KEPT_IDLE or tokens > _KEPT_TOKENS:
            key = next((key for key, sample in self._live.items() if not sample.busy), None)
            if key is None:
                return
            tokens -= _tokens_of(self._live.pop(key))


def _tokens_of(sample: LiveSample) -> int:
    return len(sample.rollout.prompt_token_ids) + sample.rollout.length


def _belongs(sample: LiveSample, path: str, info: RequestInfo) -> bool:
    if path != sample.path or info.model != sample.model or info.token_ids is None:
        return False
    prompt = sample.rollout.prompt_token_ids
    return bool(prompt) and info.token_ids[: len(prompt)] == prompt


def _goes_on(sample: LiveSample, path: str, info: RequestInfo, at_least: int = 1) -> bool:
    """Whether a request takes up a sample exactly where it stands, with a response of some length."""
    response = sample.rollout.choice_or_first().token_ids
    if len(response) < at_least or not _belongs(sample, path, info) or info.token_ids is None:
        return False
    prompt = len(sample.rollout.prompt_token_ids)
    return info.token_ids[prompt : prompt + len(response)] == response


def _later(older: Opened | None) -> int:
    """Return now, as lives are ordered by it: after the life before, whatever became of the clock."""
    return max(time.time_ns(), older.opened_unix_ns + 1 if older else 0)


def _new_key() -> str:
    return os.urandom(8).hex()


def _storable(key: str) -> str:
    return key.encode("utf-8", "backslashreplace").decode()
