"""A log while it is written: what runs, how fast, and what happened since the last look.

What happens is told by the summaries, which the writer renews whenever a request begins or ends; the
events of samples that run are folded on from where the last look left them.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import msgspec

from rollout_log.fold import Rollout
from rollout_log.log import Entry, LogReader, Summary

__all__ = ["Glance", "Happening", "Running", "Watcher"]

_Place = tuple[Path, int]


class Running(msgspec.Struct):
    """A sample with an open request."""

    name: str
    step: int | None
    tokens: int
    """Of the response so far."""
    tokens_per_second: float
    """Since the last look."""
    seconds: float
    """Since its latest request was sent."""
    requests: int
    cause: str


class Happening(msgspec.Struct):
    """Something that became of a sample."""

    unix_ns: int
    name: str
    what: str
    """A status, `retry` or `resume`."""
    tokens: int
    detail: str | None
    """The finish reason, what a retry came after, or `so far`: it may yet be retried or resumed."""


class Glance(msgspec.Struct):
    """A log at one moment."""

    unix_ns: int
    samples: int
    statuses: dict[str, int]
    tokens_per_second: float
    """Since the last look; 0 at the first."""
    running: list[Running]
    """The longest first."""
    happened: list[Happening]
    """Since the last look, in order; nothing at the first."""


class _Followed:
    """A running sample, folded as far as it is on disk."""

    def __init__(self) -> None:
        self.rollout = Rollout()
        self.generated = 0

    def catch_up(self, reader: LogReader, entry: Entry) -> int:
        """Fold what is new; return how many tokens were generated in it."""
        rollout = self.rollout
        for number, event in reader.events(entry.ref, rollout.events):
            if number > rollout.events:
                rollout.skip_to(number)
            rollout.apply(event)
        before, self.generated = self.generated, sum(request.tokens for request in rollout.requests)
        return self.generated - before


class Watcher:
    """Looks at a log again and again."""

    def __init__(self, reader: LogReader) -> None:
        self._reader = reader
        self._seen: dict[_Place, Summary] = {}
        self._followed: dict[_Place, _Followed] = {}
        self._looked: float | None = None
        self._generated = 0

    def look(self) -> Glance:
        """Return how things stand, and what happened since the last look."""
        first = self._looked is None
        moment, now = time.monotonic(), time.time_ns()
        elapsed = moment - self._looked if self._looked is not None else 0.0
        statuses: Counter[str] = Counter()
        running: list[Running] = []
        happened: list[Happening] = []
        generated = 0
        for entry in self._reader.samples():
            place = entry.ref.folder, entry.ref.ordinal
            summary = entry.summary
            statuses[summary.status] += 1
            if not first:
                happened += _happenings(entry, self._seen.get(place))
            self._seen[place] = summary
            if summary.status != "pending":
                self._followed.pop(place, None)
                generated += summary.tokens + summary.discarded
                continue
            followed = self._followed.setdefault(place, _Followed())
            new = followed.catch_up(self._reader, entry)
            generated += followed.generated
            if followed.rollout.request is not None:
                running.append(_running(entry, followed.rollout, now, new / elapsed if elapsed else 0.0))
        rate = max(generated - self._generated, 0) / elapsed if elapsed else 0.0
        self._looked, self._generated = moment, generated
        running.sort(key=lambda one: -one.seconds)
        happened.sort(key=lambda one: one.unix_ns)
        return Glance(now, sum(statuses.values()), dict(statuses.most_common()), rate, running, happened)


def _running(entry: Entry, rollout: Rollout, now: int, rate: float) -> Running:
    request = rollout.requests[-1]
    return Running(
        name=entry.name,
        step=rollout.step,
        tokens=sum(len(choice.token_ids) for choice in rollout.choices.values()),
        tokens_per_second=rate,
        seconds=max((now - request.sent_unix_ns) / 1e9, 0.0),
        requests=len(rollout.requests),
        cause=request.cause,
    )


def _happenings(entry: Entry, before: Summary | None) -> Iterator[Happening]:
    """Yield what two summaries of a sample tell of the time between them."""
    after = entry.summary
    before = before or Summary()

    def happening(what: str, detail: str | None = None) -> Happening:
        return Happening(after.updated_unix_ns, entry.name, what, after.tokens, detail)

    for cause, count in after.retries.items():
        for _ in range(count - before.retries.get(cause, 0)):
            yield happening("retry", f"after {cause}")
    for _ in range(after.resumes - before.resumes):
        yield happening("resume", None if after.resumed_from is None else f"from step {after.resumed_from}")
    if after.status != "pending" and (after.status, after.requests) != (before.status, before.requests):
        open_ended = after.status in ("failed", "aborted") and after.trainer_status is None
        yield happening(after.status, after.finish_reason or ("so far" if open_ended else None))
