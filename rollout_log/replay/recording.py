"""A sample's events as the HTTP exchanges they came from, byte for byte.

    for exchange in read_exchanges(source, ref):
        exchange.body, exchange.response, exchange.reads, exchange.ending

Pure but for reading the source, which is anything that lists samples and yields their events: a log, a
fixture, or a list in memory.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from functools import cached_property
from typing import Any, Literal, Protocol

import msgspec

from rollout_log.engines import Frame, RequestInfo, dialect_named
from rollout_log.events import (
    Body,
    Delta,
    Ended,
    Event,
    Marked,
    Opened,
    Reads,
    Requested,
    Responded,
    Tail,
    restore_body,
)
from rollout_log.fold import Rollout
from rollout_log.log.summary import Summary

__all__ = [
    "Ending",
    "Listed",
    "Read",
    "RecordedExchange",
    "RecordedFrame",
    "Source",
    "read_exchanges",
]

Ending = Literal["eof", "cut", "reset", "stall", "left"]
"""How a response ended: well; without its last chunk (FIN); by RST; with silence; with the consumer gone."""

# About one connection or one copy of the body, so a recorded one is not repeated.
_STALE = frozenset(
    {"content-length", "transfer-encoding", "content-encoding", "connection", "keep-alive", "date"}
)


_exception = re.compile(r"\w+(?:Error|Timeout)\b").match


class Listed(Protocol):
    """What a source tells of a sample without reading it."""

    @property
    def summary(self) -> Summary: ...

    @property
    def name(self) -> str: ...

    @property
    def ref(self) -> Any: ...


class Source(Protocol):
    """Where recordings come from: what `rollout_log.log.LogReader` has of it."""

    def samples(self) -> Iterable[Listed]: ...

    def find(self, name: str) -> Any: ...

    def events(self, ref: Any) -> Iterator[tuple[int, Event]]: ...

    def rollout(self, ref: Any) -> Rollout: ...


class Read(msgspec.Struct, frozen=True, gc=False):
    """One network read."""

    time: int
    """Microseconds since the request."""
    data: bytes


class RecordedFrame(msgspec.Struct, frozen=True, gc=False):
    """One SSE frame; `wire` are its bytes with everything since the frame before."""

    time: int
    data: bytes
    wire: bytes


class RecordedExchange:
    """One request and what came back, as far as it was recorded."""

    def __init__(self, sample: str, requested: Requested, body: bytes) -> None:
        self.sample = sample
        """Name of the sample in its source."""
        self.requested = requested
        self.body = body
        """Of the request, as it was sent."""
        self.dialect = dialect_named(requested.dialect) if requested.dialect else None
        self.info: RequestInfo = self.dialect.read_request(body) if self.dialect else RequestInfo()
        self.status: int | None = None
        """None: no response came."""
        self.headers: list[tuple[str, str]] = []
        """Of the response, without those that spoke of its connection or its framing."""
        self.responded = 0
        """When the headers came."""
        self.frames: list[RecordedFrame] = []
        self.whole: bytes | None = None
        """The body of a response that was not SSE."""
        self.tail = b""
        self.ending: Ending = "left"
        self.error: str | None = None
        """Name of the exception that the recording client got."""
        self.detail: str | None = None
        self.ended = 0
        """When it ended, or when the recording did."""
        self._sizes: list[tuple[int, int]] = []

    @property
    def number(self) -> int:
        """Number of the request within its sample."""
        return self.requested.number

    @property
    def name(self) -> str:
        """What messages call it."""
        return f"{self.sample!r} request {self.number}"

    @cached_property
    def response(self) -> bytes:
        """The body of the response."""
        if self.whole is not None:
            return self.whole
        return b"".join([*(frame.wire for frame in self.frames), self.tail])

    @cached_property
    def reads(self) -> list[Read]:
        """The response as it arrived; where reads were not recorded, one for each frame."""
        body, reads, at, time = self.response, list[Read](), 0, 0
        for time, size in self._sizes:
            if piece := body[at : at + size]:
                reads.append(Read(time, piece))
            at += size
        end = 0
        for frame in self.frames:
            end += len(frame.wire)
            if end > at:
                time = max(time, frame.time)
                reads.append(Read(time, body[at:end]))
                at = end
        if at < len(body):
            reads.append(Read(max(time, self.ended), body[at:]))
        return reads

    @cached_property
    def decoded(self) -> list[Frame]:
        """What each frame says; of a response that was not SSE, what the whole says."""
        if self.dialect is None or self.status is None or self.status >= 400:
            return [Frame() for _ in self.frames]
        if self.whole is not None:
            return [self.dialect.decode_body(self.whole)]
        so_far: dict[int, int] = {}
        found = list[Frame]()
        for frame in self.frames:
            decoded = self.dialect.decode_frame(frame.data, so_far)
            for delta in decoded.choices:
                so_far[delta.index] = so_far.get(delta.index, 0) + len(delta.token_ids)
            found.append(decoded)
        return found

    @cached_property
    def generated(self) -> list[int]:
        """Token ids that this request generated, of the first choice."""
        return [
            token
            for frame in self.decoded
            for delta in frame.choices
            if delta.index == 0
            for token in delta.token_ids
        ]

    def take_delta(self, delta: Delta) -> None:
        """Add a frame of the response."""
        wire = b"data: %b\n\n" % delta.data if delta.raw is None else delta.raw
        self.frames.append(RecordedFrame(delta.time, delta.data, wire))
        self.ended = max(self.ended, delta.time)

    def take(self, event: Event) -> None:
        """Add another event of this request."""
        if isinstance(event, Responded):
            self.status, self.responded = event.status, event.time
            self.headers = [(name, value) for name, value in event.headers if name not in _STALE]
        elif isinstance(event, Body):
            self.whole, self.ended = event.data, event.time
        elif isinstance(event, Tail):
            self.tail = event.data
        elif isinstance(event, Reads):
            time = self._sizes[-1][0] if self._sizes else 0
            for size, gap in zip(event.sizes, event.times, strict=False):
                time += gap
                self._sizes.append((time, size))
        elif isinstance(event, Ended):
            self._end(event)
        elif isinstance(event, Marked) and event.name == "encoded_body":
            # The bytes are as encoded as they were, so the header is not stale.
            self.headers.append(("content-encoding", str(event.fields.get("encoding"))))

    def _end(self, event: Ended) -> None:
        self.ended, self.detail = event.time, event.detail
        name = _exception(event.detail or "")
        self.error = name[0] if name else None
        if event.how == "eof":
            self.ending = "eof"
        elif event.how == "timeout":
            self.ending = "stall"
        elif event.how == "reset":
            self.ending = "cut" if self.error in (None, "RemoteProtocolError") else "reset"


def read_exchanges(source: Source, ref: Any, name: str) -> list[RecordedExchange]:
    """Return a sample's exchanges in the order they were made. `name` is the sample's in its source."""
    rollout = Rollout()
    unfolded: list[Event] = []
    found: dict[int, RecordedExchange] = {}
    for _, event in source.events(ref):
        unfolded.append(event)
        if isinstance(event, Delta):  # nearly all
            if (exchange := found.get(event.number)) is not None:
                exchange.take_delta(event)
        elif isinstance(event, Opened):
            if event.continues is not None:
                rollout = _older(source, event.key, event.continues)
        elif isinstance(event, Requested):
            # Folding it truncates the response to its base: what is left is what the body named.
            rollout.apply_all(unfolded)
            unfolded.clear()
            ids = rollout.prompt_token_ids + rollout.choice_or_first().token_ids
            found[event.number] = RecordedExchange(name, event, restore_body(event, ids))
        elif isinstance(event, Marked):
            number = event.fields.get("request")
            if isinstance(number, int) and number in found:
                found[number].take(event)
        elif (exchange := found.get(getattr(event, "number", -1))) is not None:
            exchange.take(event)
    return list(found.values())


def _older(source: Source, key: str, continues: tuple[int, int]) -> Rollout:
    incarnation, length = continues
    older = source.rollout(source.find(f"{key}@{incarnation}"))
    return Rollout.continue_from(older, length)
