"""Events between those who hand them over and the thread that writes them.

All in memory and under one lock: the rule of sequences, the limits, and who waits for what.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import lmdb
import msgspec

from rollout_log.counting import several
from rollout_log.errors import RecordingFailed, RolloutLogError, SequenceConflict
from rollout_log.events import Event, Requested, encode_events
from rollout_log.log.pending import Part, summary_of, weigh
from rollout_log.log.summary import Summary
from rollout_log.log.waiting import Waiter, wake

__all__ = ["Counters", "Queue"]

COMMIT_BYTES = 8 << 20
"""Pending bytes that are committed before the window is over."""
GATHER_S = 0.005
"""How long a commit that is waited for gathers others."""
RETRY_S = 1.0
"""Between two tries of a commit that fails."""


class Counters(msgspec.Struct):
    """What a writer did since it was opened."""

    events: int = 0
    """Committed."""
    bytes: int = 0
    """Of batches, committed."""
    commits: int = 0
    late_flushes: int = 0
    """Finished requests that went on before their commit was done."""
    dropped_requests: int = 0
    """Requests that were refused whole."""
    dropped_events: int = 0
    """Other events that were refused."""
    failures: int = 0
    """Commits that failed, every retry counted."""
    segments: int = 0


class Queue:
    """What waits to be written. Any thread may call it; one thread takes from it.

    Of a sample of which nothing waits it keeps two integers: a process records millions.
    """

    def __init__(
        self,
        path: Path,
        *,
        window: float,
        limit: int,
        strict: bool,
        first_ordinal: int,
        read_back: Callable[[int, int, int], list[Event]],
    ) -> None:
        self.path = path
        self.counters = Counters()
        self._first_ordinal = first_ordinal
        self.closed = False
        self._strict = strict
        self._window = window
        self._least = window / 20  # so that what comes with an event that is late shares its commit
        self._limit = limit
        self._read_back = read_back
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)
        self._committed = array("Q")
        """Of each sample, by ordinal: how many of its events are on disk."""
        self._segments = array("L")
        """Of each sample: the segment that has its row; 0 before its first commit."""
        self._dirty: dict[int, Part] = {}
        """What waits to be taken, samples that waited longest first."""
        self._in_hand: dict[int, Part] = {}
        """What the commit under way, or being tried again, takes."""
        self._queued = 0
        """Bytes of both, roughly."""
        self._waiters: list[Waiter] = []
        self._wanted: dict[int, int] = {}
        """Samples that somebody waits for, or did: who gives up does not call off the commit."""
        self._due: float | None = None
        """When the window of the oldest event ends."""
        self._gathered: float | None = None
        """When those who wait have gathered."""
        self._retry_at = 0.0
        self._rotating = False
        self._full = False
        self._failing = False

    @property
    def accepting(self) -> bool:
        """Whether new requests are taken."""
        return not (self._failing or self._full or self.closed)

    @property
    def full(self) -> bool:
        """Whether so much waits that nothing is taken until half of it is written."""
        return self._full

    @property
    def next_ordinal(self) -> int:
        """The ordinal of the sample that is created next."""
        return self._first_ordinal + len(self._committed)

    def create(self) -> int:
        """Allocate an ordinal."""
        with self._lock:
            ordinal = self.next_ordinal
            self._committed.append(0)
            self._segments.append(0)
            return ordinal

    def append(
        self,
        sample: int,
        first: int,
        events: Sequence[Event],
        summary: Summary | None,
        since: float | None = None,
    ) -> bool:
        """Take events; see `Log.append`."""
        with self._lock:
            part = self._dirty.get(sample)
            if part is None:
                if not self._has(sample):
                    if not 0 <= sample < self._first_ordinal:
                        raise SequenceConflict(
                            f"sample {sample} was never created in {self.path}; call `create` first"
                        )
                    return self._refuse(events, f"sample {sample} was created before this process was forked")
                expected = self._next(sample)
            else:
                expected = part.first + len(part.events)
            if first != expected:
                known = self._repeated(sample, first, events, expected)
                if known is None:
                    return self._refuse(events, f"events of sample {sample} cannot be read back to compare")
                if not events[known:]:
                    return True
                events = events[known:]
            weight = weigh(events)
            if self.closed:
                return self._refuse(events, "the log is closed")
            if self._queued + weight > self._limit:
                self._full = bool(self._queued)
                return self._refuse(events, f"more than {self._limit} bytes wait to be written")
            if (self._failing or self._full) and any(isinstance(event, Requested) for event in events):
                return self._refuse(
                    events, "commits fail" if self._failing else "the queue is still draining"
                )
            if self._due is None or (since is not None and since + self._window < self._due):
                now = time.monotonic()
                due = max((now if since is None else since) + self._window, now + self._least)
                if self._due is None or due < self._due:
                    self._due = due
                    self._work.notify()
            if part is None:
                part = self._dirty[sample] = Part(sample, expected)
            part.events.extend(events)
            part.weight += weight
            if summary is not None or part.summary is None:
                part.summary = summary or (summary_of(events) if first == 0 else None)
            self._queued += weight
            if self._queued > COMMIT_BYTES:
                self._work.notify()
            return True

    def refuse(self, events: Sequence[Event], why: str) -> bool:
        """Count events as not taken; False, or `RecordingFailed` where that is wanted."""
        with self._lock:
            return self._refuse(events, why)

    def opening(self, key: str) -> int | None:
        """Return the newest sample of a key whose first event is not committed yet."""
        with self._lock:
            return max((part.ordinal for part in self._parts() if part.opens == key), default=None)

    def durable(self, sample: int) -> int:
        """How many events of a sample are committed."""
        with self._lock:
            return self._durable(sample) if self._has(sample) else 0

    def is_durable(self, sample: int) -> bool:
        """Whether everything of a sample is committed."""
        with self._lock:
            return self._reached(self._targets((sample,)))

    def count_late(self) -> None:
        """Count a flush that was not waited for to its end."""
        with self._lock:
            self.counters.late_flushes += 1

    def wait_for(
        self, samples: Sequence[int], *, patient: bool = False, loop: asyncio.AbstractEventLoop | None = None
    ) -> Waiter | None:
        """Ask for a commit of these samples; None where there is nothing to wait for. Takes the lock."""
        with self._lock:
            targets = self._targets(samples)
            if self._reached(targets):
                return None
            waiter = Waiter(targets, patient=patient, loop=loop)
            if self.closed or (self._failing and not patient):
                waiter.result = False
                waiter.settle()
                return waiter
            self._waiters.append(waiter)
            self._wanted.update(targets)
            if self._gathered is None:
                self._gathered = time.monotonic() + GATHER_S
                self._work.notify()
            return waiter

    def forget(self, waiter: Waiter) -> None:
        """Stop waiting."""
        with self._lock:
            if waiter.result is None and waiter in self._waiters:
                self._waiters.remove(waiter)

    def rotate(self) -> None:
        """Ask for a new segment after what is there so far."""
        with self._lock:
            self._rotating = True
            self._work.notify()

    def close(self) -> None:
        """Take nothing any more, and let the thread come to its end."""
        with self._lock:
            self.closed = True
            self._work.notify()

    def abandon(self) -> None:
        """Wake everybody who still waits, with False."""
        with self._lock:
            waiters, self._waiters = self._waiters, []
        wake(waiters, result=False)

    # What the writing thread calls.

    def take(self) -> tuple[list[Part], bool, bool]:
        """Sleep until something is due. Returns it, and whether to rotate after it and to stop."""
        with self._lock:
            self._await_work()
            rotate = self._rotating and not self._in_hand
            if not self._in_hand:
                self._rotating = False
                self._in_hand = self._take(everything=rotate or self.closed)
            return list(self._in_hand.values()), rotate, self.closed

    def is_empty(self) -> bool:
        """Whether nothing waits to be taken."""
        with self._lock:
            return not self._dirty

    def committed(self, size: int, segment: int) -> bool:
        """Count what is in hand as written, and wake who waited. Returns whether commits failed before."""
        with self._lock:
            parts, self._in_hand = self._in_hand.values(), {}
            for part in parts:
                place = part.ordinal - self._first_ordinal
                self._committed[place], self._segments[place] = part.end, segment
                self._queued -= part.weight
                self.counters.events += len(part.events)
            self.counters.bytes += size
            self.counters.commits += bool(parts)
            recovered, self._failing = self._failing, False
            if self._full and self._queued <= self._limit // 2:
                self._full = False
            done = [waiter for waiter in self._waiters if self._reached(waiter.targets)]
            if done:
                self._waiters = [waiter for waiter in self._waiters if not self._reached(waiter.targets)]
        wake(done, result=True)
        return recovered

    def failed(self) -> bool:
        """Keep what is in hand for another try. Returns whether this is the first failure in a row."""
        with self._lock:
            first, self._failing = not self._failing, True
            self._retry_at = time.monotonic() + RETRY_S
            self.counters.failures += 1
            done = [waiter for waiter in self._waiters if not waiter.patient]
            self._waiters = [waiter for waiter in self._waiters if waiter.patient]
        wake(done, result=False)
        return first

    def give_up(self) -> int:
        """Drop everything. Returns how many events that loses."""
        with self._lock:
            lost = sum(len(part.events) for part in self._parts())
            self._dirty.clear()
            self._in_hand.clear()
            self.counters.dropped_events += lost
            return lost

    # Under the lock.

    def _refuse(self, events: Sequence[Event], why: str) -> bool:
        requests = sum(isinstance(event, Requested) for event in events)
        self.counters.dropped_requests += requests
        self.counters.dropped_events += len(events) - requests
        if self._strict:
            raise RecordingFailed(f"{self.path} did not take {several(len(events), 'event')}: {why}")
        return False

    def _has(self, sample: int) -> bool:
        return 0 <= sample - self._first_ordinal < len(self._committed)

    def _parts(self) -> Iterable[Part]:
        return itertools.chain(self._in_hand.values(), self._dirty.values())

    def _durable(self, sample: int) -> int:
        return self._committed[sample - self._first_ordinal]

    def _next(self, sample: int) -> int:
        part = self._dirty.get(sample) or self._in_hand.get(sample)
        return self._durable(sample) if part is None else part.end

    def _repeated(self, sample: int, first: int, events: Sequence[Event], expected: int) -> int | None:
        """Return how many of the events are there already; None where that cannot be read back.

        The rare path: it reads the disk.
        """
        if first > expected or first < 0:
            raise SequenceConflict(
                f"events of sample {sample} in {self.path} begin at {first}, but {expected} is next"
            )
        end = min(first + len(events), expected)
        durable = self._durable(sample)
        known: list[Event] = []
        if first < durable:
            try:
                known += self._read_back(sample, first, min(end, durable))
            except (RolloutLogError, lmdb.Error, OSError):
                return None
        for parts in (self._in_hand, self._dirty):
            if (part := parts.get(sample)) is not None:
                known += part.events[max(first - part.first, 0) : max(end - part.first, 0)]
        given = list(events[: end - first])
        if len(known) != len(given):
            return None
        if encode_events(known) != encode_events(given):
            raise SequenceConflict(
                f"events {first} to {end - 1} of sample {sample} in {self.path} are there already, "
                "and not the same"
            )
        return len(given)

    def _targets(self, samples: Sequence[int]) -> dict[int, int]:
        if not samples:
            samples = [part.ordinal for part in self._parts()]
        return {sample: self._next(sample) for sample in samples if self._has(sample)}

    def _reached(self, targets: Mapping[int, int]) -> bool:
        return all(self._durable(sample) >= target for sample, target in targets.items())

    def _await_work(self) -> None:
        """Sleep until something is to be committed."""
        while not self.closed:
            now = time.monotonic()
            if self._failing:
                until: float | None = self._retry_at
            elif self._rotating or self._queued > COMMIT_BYTES:
                return
            else:
                until = min((at for at in (self._due, self._gathered) if at is not None), default=None)
            if until is not None and until <= now:
                return
            self._work.wait(None if until is None else until - now)

    def _take(self, *, everything: bool) -> dict[int, Part]:
        """Take what is due: all there is, or what is waited for."""
        due = self._due is not None and self._due <= time.monotonic()
        if everything or due or self._queued > COMMIT_BYTES:
            taken, self._dirty = self._dirty, {}
        else:
            taken = {sample: self._dirty.pop(sample) for sample in self._wanted if sample in self._dirty}
        for part in taken.values():
            part.segment = self._segments[part.ordinal - self._first_ordinal]
        self._gathered = None
        self._wanted.clear()
        if not self._dirty:
            self._due = None
        return taken
