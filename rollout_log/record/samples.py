"""The samples a process is recording: which sample a request belongs to, and where it goes on from.

A request joins the sample of its key, or, where gluing it on would be untrue (another one is open, another
path or model, other prompt), a child of it: `KEY~2`, `KEY~3`, … A key that happens to be a child's name is
the caller's own all the same: a request of that key which does not take up the child exactly where it stands
begins another life of the name. Nothing here does IO; what happened goes to the log as events, which the log
writes in its own thread.
"""

from __future__ import annotations

import os
import socket
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import msgspec

from rollout_log.engines import RequestInfo, dialect_for
from rollout_log.events import (
    Cause,
    Event,
    Marked,
    Observed,
    Opened,
    Requested,
    elide_token_ids,
)
from rollout_log.fold import Rollout
from rollout_log.record.base import Start, start_of
from rollout_log.record.elision import elide
from rollout_log.record.exchange import Exchange
from rollout_log.record.headers import safe_headers, safe_url
from rollout_log.record.live import LiveSample
from rollout_log.response import Choice

if TYPE_CHECKING:
    from rollout_log.log import Log

__all__ = ["Samples"]

_HOST = socket.gethostname()
_KEPT_IDLE = 16_384
"""Samples that stay in memory, so that a resume finds them; those with an open request always do."""
_KEPT_TOKENS = 8 << 20
"""Tokens that those without an open request may have."""
_TOKEN, _MASK, _MASK_ID = 70, 90, 40
"""Bytes that a token takes, about, and the set it was sampled from: for itself and for each id in it."""
_LOOKED_AT = 16
"""Sets of a response that stand for all of them."""
_COUNT_EVERY = 256
"""Samples that open between two times that the tokens are counted."""
_GO_AT_ONCE = 4
"""Samples that leave when one opens, so that no stream waits long for it."""
_everywhere: weakref.WeakSet[Samples] = weakref.WeakSet()


class Samples:
    """All samples of one log in this process, by key."""

    def __init__(self, log: Log | None, *, let_go: Callable[[LiveSample], None] | None = None) -> None:
        """`let_go` is told of each sample that leaves the memory because there is no more room."""
        self._log = log
        self._let_go = let_go
        self.unrecorded = 0
        """Requests that the log did not take."""
        self._live: OrderedDict[str, LiveSample] = OrderedDict()
        self._lock = threading.RLock()
        self._opened = 0
        self._excess = 0
        """Tokens above the limit, when they were counted last."""
        _everywhere.add(self)

    def get(self, key: str) -> LiveSample | None:
        """Return the newest life of a sample, None when this process has not seen it."""
        return self._live.get(key)

    def all(self) -> list[LiveSample]:
        """Return the samples in memory, those that were used last at the end."""
        with self._lock:
            return list(self._live.values())

    def children(self, sample: LiveSample) -> list[LiveSample]:
        """Return a sample's children in memory, oldest first."""
        names = (f"{sample.key}~{number}" for number in range(2, sample.children + 1))
        found = (self._live.get(name) for name in names)
        return [child for child in found if child is not None and child.opened.parent == sample.key]

    def adopt(
        self, opened: Opened, older: Rollout, length: int, *, path: str | None, model: str | None
    ) -> LiveSample:
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
        return sample

    def forget(self, key: str) -> None:
        """Let go of a sample and its children, but for those that are busy; the log keeps what it has."""
        with self._lock:
            sample = self._live.get(key)
            for each in [] if sample is None else [sample, *self.children(sample)]:
                if not each.busy:
                    del self._live[each.key]

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
        sample: LiveSample | None = None,
    ) -> Exchange:
        """Begin a request for a sample and return what takes in its response.

        `key` None makes a new one. `base`, `cause`: the caller's own word, before inference. `supersede`:
        the consumer of an open request of this key is gone. `opened`: what else is known of the sample,
        should it be new (its `step` counts for the request in any case). `sample`: what the request is made
        for, as the caller knows from one before, whatever the key names.
        """
        key = _storable(key) if key else _new_key()
        dialect = dialect_for(path)
        info = dialect.read_request(body) if dialect else RequestInfo()
        with self._lock:
            sample = self._place(key, path, info, opened, sample=sample, base=base, supersede=supersede)
            if sample.inherited:
                sample = self._take_over(sample)
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

    def _take_over(self, sample: LiveSample) -> LiveSample:
        """Go on with a sample of the process that this one was forked from: in another life of it."""
        older, length = sample.rollout, sample.recorded
        heir = self.adopt(sample.opened, older, length, path=sample.path, model=sample.model)
        heir.children = sample.children
        made_up = sample.make_up(older.length)
        heir.rollout.apply_all(made_up)
        if made_up:
            heir.write(made_up)
        return heir

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
        sample: LiveSample | None,
        base: int | None,
        supersede: bool,
    ) -> LiveSample:
        """Find or make the sample a request belongs to."""
        known = sample or self._live.get(key)
        if known is None or known.rollout.closed is not None:
            return self._open(key, path, info, opened, after=known)
        if sample is None and known.opened.parent is not None and not _goes_on(known, path, info):
            return self._open(key, path, info, opened, after=known)  # the caller's key, by accident a child's
        sample = known
        self._live.setdefault(sample.key, sample)
        self._live.move_to_end(sample.key)
        again = base == 0 and info.token_ids is None and (path, info.model) == (sample.path, sample.model)
        if not again and not _belongs(sample, path, info):  # text that the caller knows to start over
            return self._child(sample, path, info, opened)
        if sample.busy and sample.exchange is not None:
            sample.exchange.take()  # of what comes now, it all came before
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
        children = (child for child in self.children(parent) if not child.busy)
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
        if self._opened % _COUNT_EVERY == 0:
            tokens = sum(_tokens_of(sample) for sample in self._live.values() if not sample.busy)
            self._excess = tokens - _KEPT_TOKENS
        for _ in range(_GO_AT_ONCE):
            if len(self._live) <= _KEPT_IDLE and self._excess <= 0:
                return
            key = next((key for key, sample in self._live.items() if not sample.busy), None)
            if key is None:
                return
            sample = self._live.pop(key)
            self._excess -= _tokens_of(sample)
            if self._let_go is not None:
                self._let_go(sample)


def _tokens_of(sample: LiveSample) -> int:
    """Return how many plain tokens take the memory that a sample takes."""
    rollout = sample.rollout
    return len(rollout.prompt_token_ids) + sum(map(_tokens_in, rollout.choices.values()))


def _tokens_in(choice: Choice) -> int:
    masks = choice.sampling_mask
    if not masks and choice.routed_experts is None:  # nearly always
        return len(choice.token_ids)
    some = masks[:: len(masks) // _LOOKED_AT + 1]
    ids = sum(map(len, filter(None, some))) * len(masks) // max(len(some), 1)
    more = _MASK * len(masks) + _MASK_ID * ids + len(choice.routed_experts or "")
    return len(choice.token_ids) + more // _TOKEN


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


def _after_fork_in_child() -> None:
    for samples in _everywhere:
        samples._lock = threading.RLock()  # another thread may have held it, which is not here


os.register_at_fork(after_in_child=_after_fork_in_child)
