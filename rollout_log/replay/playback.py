"""Plays a script in time: the next piece, a wait, or the end. Knows no IO; the drivers at the end do.

`abort`, `release` and the gate may be used from anywhere; whoever drives is woken and asks again.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Literal, NamedTuple

from rollout_log.replay.recording import Read
from rollout_log.replay.script import Script

__all__ = ["AtCut", "Gate", "Over", "Playback", "Wait", "play", "play_sync"]

AtCut = Literal["hold", "go", "end"]
"""What a response does where the recorded one was cut by its client: wait for this one's client to do it;
go on with what the next request got; end as it did."""

_TURN = 32
"""Pieces that are given out without a wait, before others have their turn."""
_AT_ONCE = 16 << 10
"""Bytes that are given out together: a client that reads 64 kB at most cuts no piece in two then."""


class Wait(NamedTuple):
    """Nothing to send for so long; None: until woken."""

    seconds: float | None


class Over(NamedTuple):
    """The response is over, as the script says it ends."""

    script: Script


class Gate:
    """Lets playbacks through while it is open."""

    def __init__(self, *, is_open: bool = True) -> None:
        self.open = is_open


class Playback:
    """One response on its way."""

    def __init__(
        self, script: Script, *, pace: float = 0.0, at_cut: AtCut = "hold", gate: Gate | None = None
    ) -> None:
        self.script = script
        self.sent = 0
        """Bytes of the body given out."""
        self.pace = pace
        self.at_cut = at_cut
        self.held = False
        """At a recorded cut, waiting for the client."""
        self.aborted = False
        self.moved = time.monotonic()
        """When something was last given out, or is due to be."""
        self.gate = gate or Gate()
        self.stalls = False
        """A recorded silence lasts until the client leaves; else the response is over when it was."""
        self.names: set[str] = set()
        """Request ids that the response goes by."""
        self.on_cut: Callable[[Playback], None] = lambda _: None
        """Called when it begins to be held."""
        self.on_held: Callable[[], float | None] = lambda: None
        """Called whenever it is held; returns the seconds until it is to be called again, None for never."""
        self._started = self.moved
        self._next = 0
        self._late = 0.0
        self._wakers: list[Callable[[], object]] = []

    @property
    def struck(self) -> bool:
        """Whether a fault has ended it."""
        return self.script.faulty and not self.aborted and self._next >= len(self.script.pieces)

    @property
    def finished(self) -> bool:
        """Whether the client has the response's finish."""
        return self.script.finished_at(self.sent)

    def step(self) -> bytes | Wait | Over:
        """Return the next piece, how long to wait for it, or the end."""
        script = self.script
        if not self.gate.open and not self.aborted:
            return Wait(None)
        if script.hold is not None and self.sent >= script.hold:
            return self._hold()
        if self._next >= len(script.pieces):
            return self._end(script)
        piece = script.pieces[self._next]
        if (wait := self._due(piece.time)) > 0:
            return self._until(wait)
        if script.hold is not None and self.sent + len(piece.data) > script.hold:
            self._split(self._next, script.hold - self.sent)
        data = script.pieces[self._next].data
        self._next += 1
        self._late += script.slow
        self.sent += len(data)
        self.moved = time.monotonic()
        return data

    def head_wait(self) -> float:
        """Return the seconds until the headers are due; where there were none, that is not waited for."""
        wait = max(self._due(self.script.responded), 0.0)
        self.moved = time.monotonic() + wait
        return wait

    def abort(self) -> None:
        """End as an engine does that is told to abort."""
        if self.aborted or self.finished:
            return
        self.aborted = True
        self.held = False
        self.pace = 0.0
        if self.script.streamed:
            rest = self.sent
            self.script = self.script.aborted_at(rest)
            self._seek(rest)
        else:
            self.script.hold = None
        self.wake()

    def wake(self) -> None:
        """Have the driver ask again."""
        for waker in self._wakers:
            waker()

    def on_wake(self, waker: Callable[[], object]) -> None:
        self._wakers.append(waker)

    def let_go(self, why: str) -> bool:
        """End a response that is held, as if its connection were lost; returns whether it was held."""
        if not self.held:
            return False
        self.held = False
        self.pace = 0.0
        self.script = replace(
            self.script,
            pieces=self.script.until(self.sent),
            hold=None,
            ending="cut",
            error=None,
            detail=why,
            faulty=False,
        )
        self._seek(self.sent)
        self.wake()
        return True

    def _until(self, seconds: float) -> Wait:
        """Wait for what is due by itself."""
        self.moved = time.monotonic() + seconds
        return Wait(seconds)

    def _hold(self) -> bytes | Wait | Over:
        """Wait for the client to do what the recorded one did."""
        if not self.held:
            self.held = True
            self.moved = time.monotonic()
            self.on_cut(self)
        wait = self.on_held()
        return Wait(wait) if self.held else self.step()

    def _end(self, script: Script) -> bytes | Wait | Over:
        if script.ending == "left" and self.at_cut == "hold" and not self.aborted:
            return self._hold()
        if script.ending == "stall" and self.stalls and not self.aborted:
            return Wait(None)
        wait = self._due(script.ended)
        return self._until(wait) if wait > 0 else Over(script)

    def _due(self, microseconds: int) -> float:
        """Seconds until a moment of the script."""
        return self._started + microseconds * self.pace / 1e6 + self._late - time.monotonic()

    def _seek(self, sent: int) -> None:
        """Go on in a new script after `sent` bytes."""
        at = 0
        for place, piece in enumerate(self.script.pieces):
            if at == sent:
                self._next = place
                return
            if at + len(piece.data) > sent:
                self._split(place, sent - at)
                self._next = place + 1
                return
            at += len(piece.data)
        self._next = len(self.script.pieces)

    def _split(self, place: int, size: int) -> None:
        """Make two pieces of one, the first of `size` bytes."""
        piece = self.script.pieces[place]
        halves = piece.data[:size], piece.data[size:]
        self.script.pieces[place : place + 1] = [Read(piece.time, data) for data in halves]


class play:  # noqa: N801 - used as a function
    """Iterate over the pieces when they are due.

    An object and not a generator, and without a task: a cancel inside a wait leaves nothing behind.
    """

    def __init__(self, playback: Playback) -> None:
        self._playback = playback
        self._loop = asyncio.get_running_loop()
        self._waiting: asyncio.Future[None] | None = None
        self._left = _TURN
        playback.on_wake(self._wake_from_anywhere)

    async def head(self) -> None:
        """Wait until the headers are due."""
        if (wait := self._playback.head_wait()) > 0:
            await asyncio.sleep(wait)

    def __aiter__(self) -> play:
        return self

    async def __anext__(self) -> bytes:
        if self._left <= 0:
            self._left = _TURN
            await asyncio.sleep(0)  # a cancellation lands here
        self._left -= 1
        while not isinstance(step := self._playback.step(), bytes):
            await self._wait(step)
        return step

    async def due(self) -> list[bytes]:
        """Return all pieces that are due, at least one and not too many. Raises `StopAsyncIteration`."""
        pieces = [await self.__anext__()]
        size = len(pieces[0])
        while self._left > 0 and size < _AT_ONCE and isinstance(step := self._playback.step(), bytes):
            self._left -= 1
            size += len(step)
            pieces.append(step)
        if size >= _AT_ONCE:
            self._left = 0
        return pieces

    async def _wait(self, step: Wait | Over) -> None:
        if isinstance(step, Over):
            raise StopAsyncIteration
        self._left = _TURN
        self._waiting = self._loop.create_future()
        timer = None if step.seconds is None else self._loop.call_later(step.seconds, self._wake)
        try:
            await self._waiting
        finally:
            self._waiting = None
            if timer is not None:
                timer.cancel()

    def _wake_from_anywhere(self) -> None:
        if not self._loop.is_closed():  # as where a client has forgotten a response
            self._loop.call_soon_threadsafe(self._wake)

    def _wake(self) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)


def play_sync(playback: Playback) -> Iterator[bytes]:
    """Yield the pieces when they are due, blocking in between."""
    woken = threading.Event()
    playback.on_wake(woken.set)
    while not isinstance(step := playback.step(), Over):
        if isinstance(step, bytes):
            yield step
            continue
        woken.wait(step.seconds)
        woken.clear()
