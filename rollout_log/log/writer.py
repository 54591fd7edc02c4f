"""The writer: takes events from any thread or event loop, and has them committed by a thread of its own.

Recording never kills a run: while the disk is full or commits fail, the log stops accepting requests.
"""

from __future__ import annotations

import asyncio
import atexit
import logging
import os
import threading
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Literal, NoReturn, final

import lmdb

from rollout_log.errors import RecordingFailed, RolloutLogError, SampleNotFound
from rollout_log.events import Event, Opened
from rollout_log.log.committer import Committer
from rollout_log.log.directory import writer_name
from rollout_log.log.ending import before_end
from rollout_log.log.keeper import Keeper, Plan
from rollout_log.log.queue import Counters, Queue
from rollout_log.log.retention import cap_of
from rollout_log.log.summary import Summary
from rollout_log.log.terminating import flush_on_sigterm
from rollout_log.log.thread import WriterThread
from rollout_log.log.waiting import Waiter

__all__ = ["Counters", "Durability", "Log"]

Durability = Literal["window", "finish", "strict"]

_SEGMENTS = 4
"""A segment is at most this part of the cap, so that deleting the oldest leaves most of the log …"""
_LEAST_SEGMENT = 1 << 20
"""… but has at least so many bytes."""

_HELD_BACK = 0.9
"""The part of the window for which taps may hold events back; the rest is for handing them over together."""

_PATIENCE_S = 2.0
"""How long SIGTERM waits for a flush."""

_logger = logging.getLogger("rollout_log")
_logs: dict[str, Log] = {}
_logs_lock = threading.Lock()


@final
class Log:
    """The writer of a log: one per directory and process. Get it from `Log.open`.

    Any thread and any number of event loops may use it. It is not pickled: other processes (spawned ones,
    actors) are given the path, and open it. After a fork, the child's copy starts a folder
    of its own with its first events; samples created before the fork are the parent's, and the child's
    events for them are not accepted: create them anew.
    """

    path: Path
    run: str
    writer: str
    """The name of this process's folder in the log."""
    window_ms: int
    """What a killed process loses, beside the commit under way."""
    hold_back_s: float
    """For how many seconds events may be kept before they are appended, with word of `since` when."""

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
        max_bytes: int | None = None,
        archive: str | os.PathLike[str] | None = None,
        seal: bool = True,
        seal_cpu: float = 0.5,
        keep: Collection[str] = (),
    ) -> Log:
        """Open a log for writing, and make it where there is none.

        The same path gives the same handle within a process; each `open` wants its `close`, and the
        first one's settings hold. `run` names the training run (default: the directory's name). What a tap
        read is on its way to the disk within `window_ms`.

        Rotated segments are sealed by a child process in the background, which takes at most `seal_cpu` of
        one core (from above 0 to 1, where it takes all of it), copied into the folder `archive`
        where one is given, and deleted, oldest first, while all segments together have more than
        `max_bytes` (default: 100 GB, or 20 % of what is free, the log itself included). `seal=False` does
        none of that. `keep`: large parts of frames and requests that are stored whole (`record.elision`).

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
                    max_bytes=max_bytes,
                    archive=None if archive is None else Path(archive).absolute(),
                    seal=seal,
                    seal_cpu=seal_cpu,
                    keep=keep,
                )
            log._start()
            log._references += 1
            _logs[name] = log
        flush_on_sigterm(_flush_all)
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
        max_bytes: int | None,
        archive: Path | None,
        seal: bool,
        seal_cpu: float,
        keep: Collection[str],
    ) -> None:
        self.path = path
        self.run = path.name if run is None else run
        self.durability = durability
        self.strict = strict
        self.keep = frozenset(keep)
        self._name = name
        self.window_ms = window_ms
        self.hold_back_s = _HELD_BACK * window_ms / 1000
        self._max_bytes = cap_of(path) if max_bytes is None else max_bytes
        self._segment_bytes = min(segment_bytes, max(self._max_bytes // _SEGMENTS, _LEAST_SEGMENT))
        self._archive = archive
        self._seal = seal
        self._seal_cpu = seal_cpu if seal_cpu < 1 else None
        self._queue_bytes = queue_bytes
        self._late = late_flush_ms / 1000
        self._first_ordinal = 0
        self._references = 0
        self._reset()

    def _reset(self) -> None:
        """Begin as a writer that has written nothing: when made, and in the child of a fork."""
        self.writer = writer_name()
        self._committer = Committer(self.path, self.writer, self.run, self._segment_bytes)
        self._queue = Queue(
            self.path,
            window=self.window_ms / 1000,
            limit=self._queue_bytes,
            strict=self.strict,
            first_ordinal=self._first_ordinal,
            read_back=self._committer.read_back,
        )
        self._rotated_at = 0
        plan = Plan(
            self.path / self.writer, archive=self._archive, max_bytes=self._max_bytes, cpu=self._seal_cpu
        )
        self._keeper = Keeper(plan, seals=self._seal)
        self._thread = WriterThread(self._queue, self._committer, self._keeper)
        self._said: set[str] = set()

    def _begin_again(self) -> None:
        """In the child of a fork: the parent's samples are its own, so number on from them."""
        self._first_ordinal = self._queue.next_ordinal
        self._reset()

    @property
    def counters(self) -> Counters:
        return self._queue.counters

    @property
    def accepting(self) -> bool:
        """False while the queue is full or commits fail: whole requests should then go unrecorded."""
        return self._queue.accepting

    def create(self, opened: Opened) -> int:
        """Allocate a sample's ordinal, unique within the writer. Writes nothing: `opened` is event 0."""
        return self._queue.create()

    def append(
        self,
        sample: int,
        first: int,
        events: Sequence[Event],
        summary: Summary | None = None,
        since: float | None = None,
    ) -> bool:
        """Hand over events `first`, `first + 1`, … of a sample, and its new summary if it has one.

        `since` says by `time.monotonic` when the first of them came, where that was a while ago: the window
        counts from then.

        Takes no time: the events are kept as they are and written by the log's thread. Returns False
        where they are not accepted (queue full, commits failing, log closed, sample of a parent
        process); nothing of them is kept then, and `strict` raises `RecordingFailed` instead. While
        commits fail, requests under way are still taken as long as the queue has room; new ones are not.

        Events that are there already are not kept twice; a gap, or another body, raises
        `SequenceConflict`.
        """
        if not self._thread.is_begun and (why := self._thread.begin(self._stop)) is not None:
            self._warn_once("nothing is recorded into %s for now: %s", self.path, why)
            return self._queue.refuse(events, why)
        taken = self._queue.append(sample, first, events, summary, since)
        if not taken:
            if self._queue.closed:
                self._warn_once("%s is closed; nothing more is recorded into it", self.path)
            elif self._queue.full:
                self._warn_once(
                    "%s cannot be written as fast as it is recorded into: requests go unrecorded until what "
                    "waits (%d bytes at most) is written", self.path, self._queue_bytes,
                )  # fmt: skip
        return taken

    async def flush(self, *samples: int | str) -> bool:
        """Wait until what was appended to these samples so far is on disk; to all, where none are given.

        A sample is named by its ordinal, or by its key: the newest one that this writer has of it (which
        may take a look at the disk).
        Commits these samples only. Cancelling the wait does not cancel the commit. False where commits
        fail, at once: see `accepting`.
        """
        waiter = self._queue.wait_for(self._ordinals_of(samples), loop=asyncio.get_running_loop())
        return True if waiter is None else await self._await(waiter)

    async def settle(self, sample: int) -> bool:
        """Wait as a finished request does, by the log's durability. Returns whether its events are on disk.

        `window`: does not wait. `finish`: at most the late-flush time, then counts it and goes on.
        `strict`: as long as it takes, through failing commits as well.
        """
        if self.durability == "window":
            return self._queue.is_durable(sample)
        loop = asyncio.get_running_loop()
        waiter = self._queue.wait_for((sample,), patient=self.durability == "strict", loop=loop)
        if waiter is None:
            return True
        if self.durability == "strict":
            return await self._await(waiter)
        done = await self._await(waiter, self._late)
        if not done:
            self._queue.count_late()
        return done

    def flush_sync(self, *samples: int | str, timeout: float | None = None) -> bool:
        """Block as `flush` waits; False also when `timeout` seconds are over."""
        waiter = self._queue.wait_for(self._ordinals_of(samples))
        if waiter is None:
            return True
        try:
            return waiter.wait(timeout)
        finally:
            self._queue.forget(waiter)

    def durable(self, sample: int) -> int:
        """Return how many events of the sample are committed."""
        return self._queue.durable(sample)

    def rotate(self, least: int = 0) -> None:
        """Go on in a new segment, once what was appended so far is committed. Does not wait for it.

        With `least`, only where so many bytes were committed since this was last done.
        """
        if self.counters.bytes - self._rotated_at < least:
            return
        self._rotated_at = self.counters.bytes
        self._queue.rotate()

    def close(self) -> None:
        """Write what is left and let go of the directory, once every `open` has had its `close`.

        A writer that recorded nothing leaves no folder.
        """
        with _logs_lock:
            if self._queue.closed:
                return
            self._references -= 1
            if self._references > 0:
                return
            if _logs.get(self._name) is self:
                del _logs[self._name]
        self._stop()

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"the log {self.path} is open in this process alone: pass its path on, and open it there"
        )

    def __enter__(self) -> Log:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _warn_once(self, message: str, *args: object) -> None:
        if message not in self._said:
            self._said.add(message)
            _logger.warning(message, *args)

    def _ordinals_of(self, samples: Sequence[int | str]) -> list[int]:
        return [self._ordinal_of(name) if isinstance(name, str) else name for name in samples]

    def _ordinal_of(self, key: str) -> int:
        """Look a key up where events wait, then on disk: a process records more keys than it can hold."""
        ordinal = self._queue.opening(key)
        if ordinal is None:
            ordinal = self._committer.find(key)
        if ordinal is None:
            raise SampleNotFound(f"{self.path}: this process has recorded no sample {key!r}")
        return ordinal

    async def _await(self, waiter: Waiter, timeout: float | None = None) -> bool:
        if waiter.future is None:
            return False
        try:
            done, _ = await asyncio.wait((waiter.future,), timeout=timeout)
            return bool(done) and waiter.future.result()
        finally:
            self._queue.forget(waiter)

    # Beginning and end.

    def _start(self) -> None:
        """Make this process's folder now, so that `open` can say what is wrong."""
        if self._thread.is_begun:
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
        self._keeper.begin()

    def _stop(self) -> None:
        before_end()
        self._queue.close()
        self._thread.join()
        self._keeper.stop()
        self._committer.close()
        self._queue.abandon()


def _close_all() -> None:
    for log in list(_logs.values()):
        log._references = 1
        log.close()


def _flush_all() -> None:
    before_end()
    for log in list(_logs.values()):
        log.flush_sync(timeout=_PATIENCE_S)


def _after_fork_in_child() -> None:
    global _logs_lock
    _logs_lock = threading.Lock()
    for log in _logs.values():
        log._begin_again()


atexit.register(_close_all)
os.register_at_fork(after_in_child=_after_fork_in_child)
