"""What a replayed response consists of: pieces, when they are due, where it may be held, how it ends.

A request that falls on a recorded one gets its bytes as they were. Any other gets the recorded frames from
its position on, and where a recorded end has happened already, the frames of the request that went on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from rollout_log.engines import Frame
from rollout_log.replay.matching import Match
from rollout_log.replay.recording import Ending, Read, RecordedExchange
from rollout_log.replay.rendering import DONE, Rebase, abort_frames

__all__ = ["Mark", "Script", "script_of"]

_ABORTS = frozenset({"abort", "cancelled"})


class Mark(NamedTuple):
    """The end of a frame."""

    end: int
    """Bytes of the response up to here."""
    tokens: int
    """Of the first choice, up to here."""
    finished: bool
    """The response has its finish reason by now; an abort is none."""


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
    slow: float = 0.0
    """Seconds before each piece, on top of the recorded pace."""
    faulty: bool = False
    """It ends as a fault has it, not as it was recorded."""
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
        last = _data(body[start : whole[-1].end]) if whole else None
        frames = abort_frames(self.exchange, last, tokens, self._spans(tokens))
        pieces = self.until(end)
        time = max((piece.time for piece in pieces), default=self.responded)
        pieces += (Read(time, frame) for frame in frames)
        return replace(self, pieces=pieces, hold=None, ending="eof", error=None, ended=time)

    def _spans(self, tokens: int) -> list[dict[str, Any]]:
        told = [
            span
            for frame in self.exchange.decoded
            for delta in frame.choices
            for span in delta.weight_versions or ()
        ]
        spans = [
            {"version": span.version, "start": span.start, "end": min(span.end, tokens)}
            for span in told
            if span.start < tokens
        ]
        if spans:
            spans[-1]["end"] = tokens
        elif tokens:
            version = self.exchange.requested.weight_version or self.weight_version or "default"
            spans = [{"version": version, "start": 0, "end": tokens}]
        return spans


def script_of(match: Match, *, hold: bool, go: bool) -> Script:
    """Return what to play for a match.

    `hold`: wait where the recorded response was aborted, until the client does it. `go`: do not, and go
    on with what the next recorded request got.
    """
    exchange = match.exchange
    on = _goes_on(match.recording.exchanges, exchange) if go or match.again else None
    if match.offset or on is not None:
        return _made(match, on, hold=hold, go=go)
    marks = _marks(exchange)
    script = Script(
        exchange,
        exchange.status,
        exchange.headers,
        list(exchange.reads),
        marks,
        ending=exchange.ending,
        error=exchange.error,
        detail=exchange.detail,
        ended=exchange.ended,
        responded=exchange.responded,
        request_id=_request_id(exchange),
        streamed=exchange.whole is None,
    )
    if hold:
        script.hold = _hold_at(exchange, marks)
    return script


def _made(match: Match, on: RecordedExchange | None, *, hold: bool, go: bool) -> Script:
    """Make a response of recorded frames, from a position on and through the requests that went on."""
    exchange = match.exchange
    chain = [exchange]
    while on is not None and on not in chain:
        chain.append(on)
        on = _goes_on(match.recording.exchanges, on) if go or on.number in match.recording.served else None
    request_id = _request_id(exchange)
    pieces: list[Read] = []
    marks: list[Mark] = []
    skip, sent, clock, size = match.offset, 0, exchange.responded, 0
    carried: bytes | None = None
    for place, each in enumerate(chain):
        following = chain[place + 1] if place + 1 < len(chain) else None
        limit = _tokens_kept(each, following)
        rebase = Rebase(each, skip - sent, request_id=request_id if place else None, carried=carried)
        seen, before = 0, each.responded
        for recorded, frame in zip(each.frames, each.decoded, strict=True):
            count, finish = _first_choice(frame)
            ends = bool(frame.choices) and finish is not None
            if limit is not None and (seen >= limit or ends or not count):
                if seen >= limit or ends:
                    break
                continue
            seen += count
            if skip and seen <= skip and not ends:
                before = recorded.time
                continue  # the client has it
            drop = max(count - (seen - skip), 0) if count else 0
            data = DONE if frame.done else rebase.frame(recorded.data, drop)
            clock += max(recorded.time - before, 0)
            before = recorded.time
            size += len(data)
            sent += count - drop
            pieces.append(Read(clock, data))
            marks.append(Mark(size, sent, _finishes(frame) or bool(marks and marks[-1].finished)))
            carried = _data(data) if count else carried
        skip = 0
    last = chain[-1]
    script = Script(
        exchange,
        exchange.status,
        exchange.headers,
        pieces,
        marks,
        ending=last.ending,
        error=last.error,
        detail=last.detail,
        ended=clock,
        responded=exchange.responded,
        request_id=request_id,
    )
    served = match.recording.served
    if hold and last.number not in served - {exchange.number}:
        script.hold = _hold_in(pieces, marks, last)
    served.update(each.number for each in chain)
    return script


def _goes_on(exchanges: Sequence[RecordedExchange], exchange: RecordedExchange) -> RecordedExchange | None:
    """Return the request that went on from an exchange's tokens, where they were cut short."""
    start = exchange.info.token_ids
    if start is None or exchange.info.n != 1 or exchange.whole is not None or _is_finished(exchange):
        return None
    for each in exchanges:
        ids = each.info.token_ids
        if each.number <= exchange.number or ids is None or each.requested.cause == "turn":
            continue
        more = ids[len(start) :]
        fits = ids[: len(start)] == start and exchange.generated[: len(more)] == more
        whole_frames = len(more) in {0, *(mark.tokens for mark in _marks(exchange))}
        return each if fits and whole_frames and each.status == 200 and each.whole is None else None
    return None


def _tokens_kept(exchange: RecordedExchange, following: RecordedExchange | None) -> int | None:
    if following is None:
        return None
    return len(following.info.token_ids or ()) - len(exchange.info.token_ids or ())


def _is_finished(exchange: RecordedExchange) -> bool:
    return any(_finishes(frame) for frame in exchange.decoded)


def _finishes(frame: Frame) -> bool:
    return any(
        delta.finish_reason is not None and delta.finish_reason not in _ABORTS for delta in frame.choices
    )


def _aborts(frame: Frame) -> bool:
    return any(delta.finish_reason in _ABORTS for delta in frame.choices)


def _first_choice(frame: Frame) -> tuple[int, str | None]:
    for delta in frame.choices:
        if delta.index == 0:
            return len(delta.token_ids), delta.finish_reason
    return 0, None


def _marks(exchange: RecordedExchange) -> list[Mark]:
    marks: list[Mark] = []
    size = tokens = 0
    finished = False
    for recorded, frame in zip(exchange.frames, exchange.decoded, strict=False):
        size += len(recorded.wire)
        tokens += _first_choice(frame)[0]
        finished = finished or _finishes(frame)
        marks.append(Mark(size, tokens, finished))
    return marks


def _hold_at(exchange: RecordedExchange, marks: list[Mark]) -> int | None:
    """Where the recorded response stood when it was aborted; None when it was not."""
    if exchange.whole is not None:
        body_aborts = any(_aborts(frame) for frame in exchange.decoded)
        return 0 if body_aborts else None
    start = 0
    for mark, frame in zip(marks, exchange.decoded, strict=True):
        if _aborts(frame):
            return start
        start = mark.end
    return None


def _hold_in(pieces: list[Read], marks: list[Mark], last: RecordedExchange) -> int | None:
    if last.ending == "left" or not any(_aborts(frame) for frame in last.decoded):
        return None
    start = 0
    for piece, mark in zip(pieces, marks, strict=True):
        if last.dialect is not None and _aborts(last.dialect.decode_frame(_data(piece.data), {})):
            return start
        start = mark.end
    return None


def _request_id(exchange: RecordedExchange) -> str | None:
    return next((frame.request_id for frame in exchange.decoded if frame.request_id), None)


def _data(wire: bytes) -> bytes:
    """Return the data of one frame of the usual form; of another, what stands after its last `data:`."""
    return wire[wire.rfind(b"data: ") + 6 :].strip()
