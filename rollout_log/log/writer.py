"""The writer: takes events from any thread or event loop, and commits them from a thread of its own.

Recording never kills a run: while the disk is full or commits fail, the log stops accepting requests,
keeps what it has, warns once, and tries again every second.
"""

from __future__ import annotations

import asyncio
import atexit
import logging
import os
import threading
import time
from collections.abc import Mapping, Sequence
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Literal, final

import lmdb
import msgspec

from rollout_log.errors import RecordingFailed, RolloutLogError, SequenceConflict
from rollout_log.events import Event, Opened, Requested, encode_events
from rollout_log.log.committer import Committer
from rollout_log.log.directory import writer_name
from rollout_log.log.environment import Row
from rollout_log.log.pending import Part, Sample, summary_of, weigh
from rollout_log.log.summary import Summary
from rollout_log.log.waiting import Waiter, wake

__all__ = ["Counters", "Durability", "Log"]

Durability = Literal["window", "finish", "strict"]

COMMIT_BYTES = 8 << 20
"""Pending bytes that are committed before the window is over."""
GATHER_S = 0.005
"""How long a commit that is waited for gathers others."""
RETRY_S = 1.0
"""Between two tries of a commit that fails."""

_logger = logging.getLogger("rollout_log")
_logs: dict[str, Log] = {}
_logs_lock = threading.Lock()


class Counters(msgspec.Struct):
    """What a writer did since it was opened."""

    events: int = 0
    """Committed."""
    bytes: int = 0
    """Of blocks, committed."""
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


@final
class Log:
    """The writer of a log: one per directory and process. Get it from `Log.open`.

    Any thread and any number of event loops may use it. After a fork, the child's copy starts a folder
    of its own with its first events; samples created before the fork are the parent's, and the child's
    events for them are not accepted: create them anew.
    """

    path: Path
    run: str
    writer: str
    """The name of this process's folder in the log."""
    counters: Counters

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        *,
        run: str | None = None,
        window_ms: int = 250,
        segment_bytes: int = 4 << 30,
        queue_bytes: int = 256 << 20,
        late_flush_ms: int = 100,
        durability: Durability = "finish",
        strict: bool = False,
    ) -> Log:
        """Open a log for writing, and make it where there is none.

        The same path gives the same handle within a process; each `open` wants its `close`, and the
        first one's settings hold. `run` names the training run (default: the directory's name).

        Raises `NotALog`, `LogTooNew`, `UnsafeFileSystem`, or `RecordingFailed` where nothing can be
        written; the caller decides whether to go on without recording.
        """
        name = os.fspath(Path(path).absolute() if Path(path).is_symlink() else Path(path).resolve())
        with _logs_lock:
            log = _logs.get(name)
            if log is None:
                log = cls(
                    Path(path).absolute(),
                    name=name,
                    run=run,
                    window_ms=window_ms,
                    segment_bytes=segment_bytes,
                    queue_bytes=queue_bytes,
                    late_flush_ms=late_flush_ms,
                    durability=durability,
                    strict=strict,
                )
            log._start()
            log._references += 1
            _logs[name] = log
            return log

    def __init__(
        self,
        path: Path,
        *,
        name: str,
        run: str | None,
        window_ms: int,
        segment_bytes: int,
        queue_bytes: int,
        late_flush_ms: int,
        durability: Durability,
        strict: bool,
    ) -> None:
        self.path = path
        self.run = path.name if run is None else run
        self.durability = durability
        self.strict = strict
        self._name = name
        self._window = window_ms / 1000
        self._segment_bytes = segment_bytes
        self._queue_bytes = queue_bytes
        self._late = late_flush_ms / 1000
        self._next_ordinal = 0
        self._references = 0
        self._reset()

    def _reset(self) -> None:
        """Begin as a writer that has written nothing: when made, and in the child of a fork."""
        self.writer = writer_name()
        self.counters = Counters()
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)
        self._samples: dict[int, Sample] = {}
        self._dirty: dict[int, Sample] = {}
        self._queued = 0
        self._waiters: list[Waiter] = []
        self._due: float | None = None
        self._gathered: float | None = None
        self._rotating = False
        self._stopping = False
        self._closed = False
        self._full = False
        self._failing = False
        self._retry_at = 0.0
        self._in_hand: list[Part] = []
        self._thread: threading.Thread | None = None
        self._committer = Committer(self.path, self.writer, self.run, self._segment_bytes)

    @property
    def accepting(self) -> bool:
        """False while the queue is full or commits fail: whole requests should then go unrecorded."""
        return not (self._failing or self._full or self._closed)

    def create(self, opened: Opened) -> int:
        """Allocate a sample's ordinal, unique within the writer. Writes nothing: `opened` is event 0."""
        with self._lock:
            ordinal = self._next_ordinal
            self._next_ordinal += 1
            self._samples[ordinal] = Sample(ordinal)
            return ordinal

    def append(
        self, sample: int, first: int, events: Sequence[Event], summary: Summary | None = None
    ) -> bool:
        """Hand over events `first`, `first + 1`, … of a sample, and its new summary if it has one.

        Takes no time: the events are kept as they are and written by the log's thread. Returns False
        where they are not accepted (queue full, commits failing, log closed, sample of a parent
        process); nothing of them is kept then, and `strict` raises `RecordingFailed` instead. While
        commits fail, requests under way are still taken as long as the queue has room; new ones are not.

        Events that are there already are not kept twice; a gap, or another body, raises
        `SequenceConflict`.
        """
        with self._lock:
            state = self._samples.get(sample)
            if state is None:
                if sample >= self._next_ordinal or sample < 0:
                    raise SequenceConflict(
                        f"sample {sample} was never created in {self.path}; call `create` first"
                    )
                return self._refuse(events, f"sample {sample} was created before this process was forked")
            if first != state.next:
                known = self._repeated(state, first, events)
                if known is None:
                    return self._refuse(events, f"events of sample {sample} cannot be read back to compare")
                if not events[known:]:
                    return True
                events = events[known:]
            weight = weigh(events)
            if self._closed:
                return self._refuse(events, "the log is closed")
            if self._queued + weight > self._queue_bytes:
                self._full = bool(self._queued)
                return self._refuse(events, f"more than {self._queue_bytes} bytes wait to be written")
            if not self.accepting and any(isinstance(event, Requested) for event in events):
                return self._refuse(
                    events, "commits fail" if self._failing else "the queue is still draining"
                )
            if self._thread is None:
                try:
                    self._start_thread()
                except RuntimeError as error:  # the interpreter is going down
                    return self._refuse(events, str(error))
            state.pending.extend(events)
            state.next += len(events)
            state.weight += weight
            self._queued += weight
            if summary is not None or state.summary is None:
                state.summary = summary or (summary_of(events) if first == 0 else None)
            if not self._dirty:
                self._due = time.monotonic() + self._window
                self._work.notify()
            self._dirty[sample] = state
            if self._queued > COMMIT_BYTES:
                self._work.notify()
            return True

    async def flush(self, *samples: int) -> bool:
        """Wait until what was appended to these samples so far is on disk; to all, where none are given.

        Commits these samples only. Cancelling the wait does not cancel the commit. False where commits
        fail, at once: see `accepting`.
        """
        waiter = self._wait_for(samples, loop=asyncio.get_running_loop())
        return True if waiter is None else await self._await(waiter)

    async def settle(self, sample: int) -> bool:
        """Wait as a finished request does, by the log's durability. Returns whether its events are on disk.

        `window`: does not wait. `finish`: at most the late-flush time, then counts it and goes on.
        `strict`: as long as it takes, through failing commits as well.
        """
        if self.durability == "window":
            with self._lock:
                return self._reached(self._targets((sample,)))
        loop = asyncio.get_running_loop()
        waiter = self._wait_for((sample,), patient=self.durability == "strict", loop=loop)
        if waiter is None:
            return True
        if self.durability == "strict":
            return await self._await(waiter)
        try:
            done = await asyncio.wait_for(self._await(waiter), self._late)
        except asyncio.TimeoutError:  # another class than TimeoutError in Python 3.10
            done = False
        if not done:
            with self._lock:
                self.counters.late_flushes += 1
        return done

    def flush_sync(self, *samples: int, timeout: float | None = None) -> bool:
        """Block as `flush` waits; False also when `timeout` seconds are over."""
        waiter = self._wait_for(samples)
        if waiter is None:
            return True
        try:
            return waiter.wait(timeout)
        finally:
            self._forget(waiter)

    def durable(self, sample: int) -> int:
        """Return how many events of the sample are committed."""
        with self._lock:
            state = self._samples.get(sample)
            return state.durable if state else 0

    def rotate(self) -> None:
        """Go on in a new segment, once what was appended so far is committed. Does not wait for it."""
        with self._lock:
            self._rotating = True
            self._work.notify()

    def close(self) -> None:
        """Write what is left and let go of the directory, once every `open` has had its `close`."""
        with _logs_lock:
            if self._closed:
                return
            self._references -= 1
            if self._references > 0:
                return
            if _logs.get(self._name) is self:
                del _logs[self._name]
        self._stop()

    def __enter__(self) -> Log:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # What callers of any thread do, under the lock unless said otherwise.

    def _refuse(self, events: Sequence[Event], why: str) -> bool:
        requests = sum(isinstance(event, Requested) for event in events)
        self.counters.dropped_requests += requests
        self.counters.dropped_events += len(events) - requests
        if self.strict:
            raise RecordingFailed(f"{self.path} did not take {len(events)} events: {why}")
        return False

    def _repeated(self, state: Sample, first: int, events: Sequence[Event]) -> int | None:
        """Return how many of the events are there already; None where that cannot be read back.

        The rare path: it reads the disk.
        """
        if first > state.next or first < 0:
            raise SequenceConflict(
                f"events of sample {state.ordinal} in {self.path} begin at {first}, but {state.next} is next"
            )
        end = min(first + len(events), state.next)
        known: list[Event] = []
        if first < state.durable:
            try:
                known += self._committer.read_back(state.ordinal, first, min(end, state.durable))
            except (RolloutLogError, lmdb.Error, OSError):
                return None
        unwritten = [*state.taken, *state.pending]
        known += unwritten[max(first - state.durable, 0) : max(end - state.durable, 0)]
        given = list(events[: end - first])
        if len(known) != len(given):
            return None
        if encode_events(known) != encode_events(given):
            raise SequenceConflict(
                f"events {first} to {end - 1} of sample {state.ordinal} in {self.path} are there already, "
                "and not the same"
            )
        return len(given)

    def _targets(self, samples: Sequence[int]) -> dict[int, int]:
        if not samples:
            return {
                state.ordinal: state.next
                for state in [*self._dirty.values(), *(p.sample for p in self._in_hand)]
            }
        return {sample: self._samples[sample].next for sample in samples if sample in self._samples}

    def _reached(self, targets: Mapping[int, int]) -> bool:
        return all(self._samples[sample].durable >= target for sample, target in targets.items())

    def _wait_for(
        self, samples: Sequence[int], *, patient: bool = False, loop: asyncio.AbstractEventLoop | None = None
    ) -> Waiter | None:
        """Ask for a commit of these samples; None where there is nothing to wait for. Takes the lock."""
        with self._lock:
            targets = self._targets(samples)
            if self._reached(targets):
                return None
            waiter = Waiter(targets, patient=patient, loop=loop)
            if self._failing and not patient:
                waiter.result = False
                waiter.settle()
                return waiter
            self._waiters.append(waiter)
            if self._gathered is None:
                self._gathered = time.monotonic() + GATHER_S
                self._work.notify()
            return waiter

    async def _await(self, waiter: Waiter) -> bool:
        try:
            return waiter.future is not None and await waiter.future
        finally:
            self._forget(waiter)

    def _forget(self, waiter: Waiter) -> None:
        with self._lock:
            if waiter.result is None and waiter in self._waiters:
                self._waiters.remove(waiter)

    # What the log's own thread does.

    def _run(self) -> None:
        rows: list[Row] | None = None
        rotate = False
        while True:
            with self._lock:
                self._await_work()
                stopping = self._stopping
                if not self._in_hand:
                    rotate, self._rotating = self._rotating, False
                    self._in_hand = self._take(everything=rotate or stopping)
            try:
                self._committer.start()
                if rows is None:
                    rows = self._committer.encode(self._in_hand)
                size = self._committer.write(rows) if rows else 0
            except Exception as error:
                self._failed(error)
                if stopping:
                    self._give_up()
                    return
                continue
            self._committed(size)
            rows = None
            if rotate or self._committer.is_full():
                self._rotate()
            rotate = False
            with self._lock:
                if self._stopping and not self._dirty:
                    return

    def _await_work(self) -> None:
        """Sleep until something is to be committed."""
        while not self._stopping:
            now = time.monotonic()
            if self._in_hand:
                until: float | None = self._retry_at
            elif self._rotating or self._queued > COMMIT_BYTES:
                return
            else:
                until = min((at for at in (self._due, self._gathered) if at is not None), default=None)
            if until is not None and until <= now:
                return
            self._work.wait(None if until is None else until - now)

    def _take(self, *, everything: bool) -> list[Part]:
        """Take what is due: all there is, or what is waited for."""
        due = self._due is not None and self._due <= time.monotonic()
        if everything or due or self._queued > COMMIT_BYTES:
            wanted = list(self._dirty.values())
        else:
            samples = {sample: None for waiter in self._waiters for sample in waiter.targets}
            wanted = [self._dirty[sample] for sample in samples if sample in self._dirty]
        for state in wanted:
            del self._dirty[state.ordinal]
        self._gathered = None
        if not self._dirty:
            self._due = None
        return [state.take() for state in wanted]

    def _committed(self, size: int) -> None:
        parts, self._in_hand = self._in_hand, []
        with self._lock:
            for part in parts:
                state = part.sample
                state.durable += len(part.events)
                state.taken = ()
                state.segment = self._committer.number
                self._queued -= part.weight
                self.counters.events += len(part.events)
            self.counters.bytes += size
            self.counters.commits += bool(parts)
            recovered, self._failing = self._failing, False
            if self._full and self._queued <= self._queue_bytes // 2:
                self._full = False
            done = [waiter for waiter in self._waiters if self._reached(waiter.targets)]
            if done:
                self._waiters = [waiter for waiter in self._waiters if not self._reached(waiter.targets)]
            if self._waiters and self._gathered is None:
                self._gathered = time.monotonic() + GATHER_S
        wake(done, result=True)
        if recovered:
            _logger.warning("%s records again", self.path)

    def _failed(self, error: Exception) -> None:
        with self._lock:
            first, self._failing = not self._failing, True
            self._retry_at = time.monotonic() + RETRY_S
            self.counters.failures += 1
            done = [waiter for waiter in self._waiters if not waiter.patient]
            self._waiters = [waiter for waiter in self._waiters if waiter.patient]
        wake(done, result=False)
        if first:
            _logger.warning(
                "cannot write to %s: %s: %s; requests go unrecorded until it works again (tried every %g s)",
                self._committer.folder,
                type(error).__name__,
                error,
                RETRY_S,
            )

    def _rotate(self) -> None:
        try:
            self._committer.rotate()
        except Exception as error:
            self._committer.segment_bytes = self._committer.segment_bytes * 5 // 4
            _logger.warning(
                "no new segment in %s: %s; going on in the old one", self._committer.folder, error
            )
        else:
            with self._lock:
                self.counters.segments += 1

    def _give_up(self) -> None:
        with self._lock:
            lost = sum(
                len(part.events) for part in [*self._in_hand, *(s.take() for s in self._dirty.values())]
            )
            self._dirty.clear()
            self.counters.dropped_events += lost
        _logger.warning("%s was closed with %d events that could not be written", self.path, lost)

    # Beginning and end.

    def _start(self) -> None:
        """Make this process's folder now, so that `open` can say what is wrong."""
        if self._thread is not None:
            return
        try:
            self._committer.start()
        except (OSError, lmdb.Error) as error:
            self._committer.close()
            raise RecordingFailed(
                f"cannot record into {self.path}: {error}; give a local directory that can be written"
            ) from error
        except RolloutLogError:
            self._committer.close()
            raise
        self.counters.segments = self._committer.number

    def _start_thread(self) -> None:
        self._thread = threading.Thread(target=self._run, name="rollout-log", daemon=True)
        self._thread.start()
        # A child of multiprocessing leaves without running what atexit knows.
        self._finalizer = Finalize(None, self._stop, exitpriority=10)

    def _stop(self) -> None:
        with self._lock:
            self._closed = self._stopping = True
            self._work.notify()
        if self._thread is not None:
            self._thread.join()
            self._finalizer.cancel()
        self._committer.close()
        with self._lock:
            waiters, self._waiters = self._waiters, []
        wake(waiters, result=False)


def _close_all() -> None:
    for log in list(_logs.values()):
        log._references = 1
        log.close()


def _after_fork_in_child() -> None:
    global _logs_lock
    _logs_lock = threading.Lock()
    for log in _logs.values():
        log._reset()


atexit.register(_close_all)
os.register_at_fork(after_in_child=_after_fork_in_child)
