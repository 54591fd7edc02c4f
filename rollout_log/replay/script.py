"""What a replayed response consists of: pieces, when they are due, where it may be held, how it ends.

`splice` makes them of recordings, `faults` spoil them, `playback` plays them.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import msgspec

from rollout_log.engines import Frame
from rollout_log.replay.recording import Ending, Read, RecordedExchange
from rollout_log.replay.rendering import abort_frames
from rollout_log.replay.versions import spans_of

__all__ = ["Mark", "Script", "aborts", "data_of", "finishes", "marks_of", "new_tokens"]

_ABORTS = frozenset({"abort", "cancelled"})


class Mark(msgspec.Struct, frozen=True, gc=False):
    """The end of a frame."""

    end: int
    """Bytes of the response up to here."""
    tokens: int
    """Of the first choice, up to here."""
    finished: bool
    """The response has its finish reason by now; an abort is none."""
    aborted: bool = False
    """The frame says that the response was aborted."""


@dataclass
class Script:
    """One response to be played."""

    exchange: RecordedExchange
    """The recorded one it is, or is made of."""
    status: int | None
    headers: list[tuple[str, str]]
    pieces: list[Read]
    marks: list[Mark] = field(default_factory=list)
    hold: int | None = None
    """Byte at which it waits for the client to abort or leave."""
    ending: Ending = "eof"
    error: str | None = None
    detail: str | None = None
    ended: int = 0
    responded: int = 0
    request_id: str | None = None
    streamed: bool = True
    numbers: tuple[int, ...] = ()
    """Of the recorded requests it is made of."""
    slow: float = 0.0
    """Seconds before each piece, on top of the recorded pace."""
    faulty: bool = False
    """It ends as a fault has it, not as it was recorded."""
    versions: list[str | None] = field(default_factory=list)
    """Weight version of each token of the first choice."""
    weight_version: str | None = None
    """Of tokens whose version was not recorded."""

    @property
    def size(self) -> int:
        return sum(len(piece.data) for piece in self.pieces)

    @property
    def body(self) -> bytes:
        return b"".join(piece.data for piece in self.pieces)

    def finished_at(self, sent: int) -> bool:
        """Whether the client has the finish once `sent` bytes are out."""
        if not self.streamed or not self.marks:
            return self.ending == "eof" and sent >= self.size and not self.faulty
        return any(mark.finished for mark in self.marks if mark.end <= sent)

    def until(self, end: int) -> list[Read]:
        """Return the pieces of the first `end` bytes."""
        found, at = list[Read](), 0
        for piece in self.pieces:
            if at >= end:
                break
            found.append(Read(piece.time, piece.data[: end - at]))
            at += len(piece.data)
        return found

    def tokens_at(self, sent: int) -> int:
        """Tokens of the frames that are whole once `sent` bytes are out."""
        return max((mark.tokens for mark in self.marks if mark.end <= sent), default=0)

    def aborted_at(self, sent: int) -> Script:
        """Return the script that ends, as an engine's abort does, after the frame that byte `sent` is in."""
        end = next((mark.end for mark in self.marks if mark.end >= sent), self.size) if sent else 0
        if self.hold == end and self.hold < self.size:
            return replace(self, hold=None)
        body = self.body
        tokens = self.tokens_at(end)
        whole = [mark for mark in self.marks if mark.end <= end]
        start = whole[-2].end if len(whole) > 1 else 0
        last = data_of(body[start : whole[-1].end]) if whole else None
        spans = spans_of(self.versions[:tokens], self.weight_version or "default")
        frames = abort_frames(self.exchange, last, tokens, spans)
        pieces = self.until(end)
        time = max((piece.time for piece in pieces), default=self.responded)
        pieces += (Read(time, frame) for frame in frames)
        return replace(self, pieces=pieces, marks=whole, hold=None, ending="eof", error=None, ended=time)


def marks_of(exchange: RecordedExchange) -> list[Mark]:
    """Return where the frames of a recorded response end, and what the client has by then."""
    marks: list[Mark] = []
    size = tokens = 0
    finished = False
    for recorded, frame in zip(exchange.frames, exchange.decoded, strict=False):
        size += len(recorded.wire)
        count, finish = new_tokens(frame)
        tokens += count
        aborted = False
        if finish is not None or len(frame.choices) != 1 or frame.choices[0].index:
            finished = finished or finishes(frame)
            aborted = aborts(frame)
        marks.append(Mark(size, tokens, finished, aborted))
    return marks


def finishes(frame: Frame) -> bool:
    """Whether a frame has a finish reason other than an abort."""
    return any(
        delta.finish_reason is not None and delta.finish_reason not in _ABORTS for delta in frame.choices
    )


def aborts(frame: Frame) -> bool:
    """Whether a frame says that the response was aborted."""
    return any(delta.finish_reason in _ABORTS for delta in frame.choices)


def new_tokens(frame: Frame) -> tuple[int, str | None]:
    """Return how many tokens a frame adds to the first choice, and its finish reason."""
    for delta in frame.choices:
        if delta.index == 0:
            return len(delta.token_ids), delta.finish_reason
    return 0, None


def data_of(wire: bytes) -> bytes:
    """Return the data of one frame of the usual form; of another, what stands after its last `data:`."""
    return wire[wire.rfind(b"data: ") + 6 :].strip()
