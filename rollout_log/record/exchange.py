"""One request made for a sample, from the tap's point of view: headers, reads and an end go in.

Sans-IO: a tap calls `respond`, `put` for every network read (`feed` where there is no event loop), `end`, and
passes the bytes on itself. What was put waits, first for the log and then for the fold, until there is enough
of it for one more to cost little. Whatever goes wrong in here stays in here, unless the log is strict:
recording never kills a run.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from time import monotonic_ns, time_ns
from typing import TYPE_CHECKING, Any

from rollout_log.errors import RecordingFailed
from rollout_log.events import Body, Delta, End, Ended, Event, Marked, Reads, Responded, Tail
from rollout_log.record.elision import LARGE, elide, size_of
from rollout_log.record.headers import safe_headers
from rollout_log.record.pulse import pulse
from rollout_log.sse import FrameSplitter

if TYPE_CHECKING:
    from rollout_log.fold import Rollout
    from rollout_log.record.live import LiveSample

__all__ = ["FOLD_AT", "Exchange"]

_logger = logging.getLogger("rollout_log")
FOLD_AT = 32 << 10
"""Bytes of a response that may wait to be folded. A stream that takes its turn among hundreds finds nothing
in the caches; so it is folded some eighty tokens at a time."""
_READS_PER_EVENT = 512
"""Read sizes and times are written in stretches, so that a killed process loses only the last one."""


class Exchange:
    """One HTTP exchange of a sample."""

    def __init__(self, sample: LiveSample, number: int, *, recording: bool) -> None:
        self.sample = sample
        self.number = number
        self.ended = False
        self.broken: Exception | None = None
        """What stopped the recording of this request, if anything did."""
        self._recording = recording
        self._splitter: FrameSplitter | None = None
        self._body: list[bytes] = []
        self._started_ns = monotonic_ns()
        self._waiting: list[Any] = []
        """Reads that the log has not got, each followed by when it came: ns of the clock that never goes
        back. A tuple for each would set the garbage collector going."""
        self._last_ns: int | None = None
        """When the last one came that the log has got."""
        self._unfolded: list[Delta] = []
        self._size = 0
        """Bytes of what waits and what is not folded."""
        self._beats = False
        """Whether a beat is to come."""
        self._refused: RecordingFailed | None = None
        """What a strict log said in a beat, until somebody can be told."""
        self._sizes: list[int] = []
        self._times: list[int] = []

    @property
    def key(self) -> str:
        """Key of the sample the request went to: the one asked for, or a child's."""
        return self.sample.key

    @property
    def rollout(self) -> Rollout:
        """The sample as folded so far; live."""
        return self.sample.rollout

    def respond(
        self, status: int, headers: Iterable[tuple[str, str]], http_version: str = "HTTP/1.1"
    ) -> None:
        """Status and headers arrived."""
        headers = safe_headers(headers)
        kinds = dict(headers)
        encoding = kinds.get("content-encoding", "identity").strip().lower()
        plain = encoding in ("", "identity")
        # A router calls everything an event stream; an error is a body whatever it is called.
        if status < 400 and plain and kinds.get("content-type", "").lower().startswith("text/event-stream"):
            self._splitter = FrameSplitter()
        events: list[Event] = [Responded(self.number, status, headers, self._now(), http_version)]
        if not plain:
            events.append(Marked("encoded_body", {"request": self.number, "encoding": encoding}, time_ns()))
        self._add(events)

    def feed(self, chunk: bytes) -> None:
        """One network read of the body arrived; it is recorded and folded at once."""
        if chunk and not self.ended:
            self._waiting.extend((chunk, monotonic_ns()))
            self.take()

    def put(self, chunk: bytes) -> bool:
        """One network read of the body arrived, in an event loop. Returns whether all there is is folded now.

        The log gets it within a part of its window (`Log.hold_back_s`).
        """
        if not chunk or self.ended:
            return False
        self._waiting.extend((chunk, monotonic_ns()))
        self._size += len(chunk)
        if self._size >= FOLD_AT or self._refused is not None:
            self.take()
            return True
        if self._recording and not self._beats:
            try:
                pulse(self.sample.hold_back_s).soon(self._beat)
            except RuntimeError:  # an event loop of another kind than asyncio's
                self.take()
                return True
            self._beats = True
        return False

    def last_read(self) -> float | None:
        """When a read came last, by `time.monotonic`; None where none came yet."""
        last_ns = self._waiting[-1] if self._waiting else self._last_ns
        return None if last_ns is None else last_ns / 1e9

    def take(self) -> None:
        """Record and fold what was put, each read as of when it came."""
        try:
            self._hand_over()
        finally:
            self._fold_deltas()
        if self._refused is not None:
            refused, self._refused = self._refused, None
            raise refused

    def _beat(self) -> None:
        self._beats = False
        try:
            self._hand_over()
        except RecordingFailed as error:
            self._refused = error

    def _hand_over(self) -> None:
        """Give the log what waits for it."""
        if not self._waiting:
            return
        waiting, self._waiting = self._waiting, []
        since, started_ns = waiting[1] / 1e9, self._started_ns
        last = ((self._last_ns or started_ns) - started_ns) // 1000
        self._last_ns = waiting[-1]
        splitter, number = self._splitter, self.number
        deltas: list[Delta] = []
        reads = iter(waiting)
        for chunk, came_ns in zip(reads, reads, strict=True):
            now = (came_ns - started_ns) // 1000
            self._sizes.append(len(chunk))
            self._times.append(now - last)
            last = now
            if splitter is None:
                self._body.append(chunk)
                continue
            data = splitter.only_frame(chunk)
            if data is not None and len(data) <= LARGE:
                deltas.append(Delta(number, data, now))
                continue
            frames = splitter.feed(chunk)
            deltas += [Delta(number, frame.data, now, frame.raw) for frame in frames]
            if frames and (len(chunk) > LARGE or len(frames[0].data) > LARGE):
                self._add_deltas(deltas, since)  # at once: what is elided is taken from the last reads
                deltas = []
        if deltas:
            self._add_deltas(deltas, since)
        while splitter is not None and len(self._sizes) >= _READS_PER_EVENT:
            self._add([self._reads()])

    def end(self, how: End, detail: str | None = None) -> None:
        """The response is over; only the first call counts."""
        if self.ended:
            return
        try:
            self.take()
        finally:  # also where a strict log refuses that
            self.ended = True
            self._end(how, detail)

    async def settle(self) -> bool:
        """Wait for the disk, as the log's durability says; True when everything is on it."""
        return await self.sample.settle()

    def mark(self, name: str, **fields: object) -> None:
        """Write down something else that happened."""
        self.take()
        self._conclude([Marked(name, {"request": self.number, **fields}, time_ns())])

    def _end(self, how: End, detail: str | None) -> None:
        now = self._now()
        if self._splitter is not None:
            if tail := self._splitter.tail():
                self._add([Tail(self.number, tail)])
        elif self._body:
            self._add([Body(self.number, b"".join(self._body), now)])
            self._body = []
        events: list[Event] = []
        while self._sizes:
            events.append(self._reads())
        events.append(Ended(self.number, how, detail, now))
        self._conclude(events)

    def _reads(self) -> Reads:
        sizes, self._sizes = self._sizes[:_READS_PER_EVENT], self._sizes[_READS_PER_EVENT:]
        times, self._times = self._times[:_READS_PER_EVENT], self._times[_READS_PER_EVENT:]
        return Reads(self.number, sizes, times)

    def _add(self, events: Sequence[Event]) -> None:
        """Hand events to the log and fold them; in this order, so that a refusal knows what was there."""
        self._fold_deltas()
        if self._recording:
            self._write(events)
        self._fold(events)

    def _add_deltas(self, deltas: list[Delta], since: float) -> None:
        """As `_add`, but that they are folded later. `since` is when the first of them came."""
        try:
            if self._recording:
                self._write(deltas, since=since)
        finally:
            self._unfolded += deltas

    def _fold_deltas(self) -> None:
        self._size = 0
        if not self._unfolded:
            return
        deltas, self._unfolded = self._unfolded, []
        try:
            self.sample.rollout.apply_deltas(deltas)
        except Exception as error:
            self._break(error)

    def _conclude(self, events: Sequence[Event]) -> None:
        """Fold events, then hand them to the log with a summary of what the sample is now."""
        length = self.sample.rollout.length
        self._fold(events)
        if self._recording:
            self._write(events, length)

    def _fold(self, events: Sequence[Event]) -> None:
        try:
            self.sample.rollout.apply_all(events)
        except Exception as error:
            self._break(error)

    def _break(self, error: Exception) -> None:
        self.broken = self.broken or error
        self._stop("folding", error)

    def _write(
        self, events: Sequence[Event], summarized_at: int | None = None, since: float | None = None
    ) -> None:
        """Hand events to the log. What it does not take from the response's length on is missing there."""
        sample = self.sample
        try:
            if sample.write(self._elide(events), summarized=summarized_at is not None, since=since):
                return
            self._recording = False
        except RecordingFailed:
            self._recording = False
            raise  # strict: the caller asked for it
        except Exception as error:
            self._stop("recording", error)
        self._fold_deltas()  # those before
        sample.miss(sample.rollout.length if summarized_at is None else summarized_at)

    def _elide(self, events: Sequence[Event]) -> Sequence[Event]:
        """Leave out what the log does not keep, and take the bytes that go from the reads they came in."""
        kept = elide(events, self.sample.kept)
        if kept is not events:
            gone = sum(map(size_of, events)) - sum(map(size_of, kept))
            for i in range(len(self._sizes) - 1, -1, -1):
                taken = min(gone, self._sizes[i])
                self._sizes[i] -= taken
                gone -= taken
        return kept

    def _stop(self, what: str, error: Exception) -> None:
        """Recording never kills a run."""
        self._recording = False
        _logger.warning(
            "%s of request %d of %r stopped: %s: %s", what, self.number, self.key, type(error).__name__, error
        )

    def _now(self) -> int:
        return (monotonic_ns() - self._started_ns) // 1000
