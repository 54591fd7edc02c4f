"""A sample told in order: what was asked, what came and when, where it was cut and by what, what was
kept, how it went on.

    for line in narrate(reader.events(ref)):
        print(line.clock_ns, line.what)

Pure. Frames that came close together are one line, unless `each_frame` asks for every one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec

from rollout_log.counting import several
from rollout_log.events import (
    Body,
    Closed,
    Delta,
    Ended,
    Event,
    Marked,
    Observed,
    Opened,
    Requested,
    Responded,
    Tail,
    Unknown,
    Unrecorded,
)
from rollout_log.fold import Rollout
from rollout_log.request import Request
from rollout_log.versions import version_words

__all__ = ["Line", "clock_of", "narrate", "until"]

_PAUSE_US = 1_000_000
"""Frames further apart than this are told apart, and the silence is told too."""


class Line(msgspec.Struct):
    """One thing that happened."""

    event: int
    """Number of the last event it is about."""
    clock_ns: int
    """Wall-clock time, 0 where unknown."""
    request: int | None
    time: int | None
    """Microseconds since that request was sent."""
    what: str
    token_ids: list[int] = []
    """Tokens that came or were added, of all choices."""


def clock_of(event: Event, sent_ns: int) -> int | None:
    """When an event happened on the wall clock, where it says so; `sent_ns` is its request's stamp."""
    if isinstance(event, Opened):
        return event.opened_unix_ns or None
    if isinstance(event, Requested):
        return event.sent_unix_ns or None
    if isinstance(event, (Responded, Delta, Body, Ended)):
        return sent_ns + 1000 * event.time
    if isinstance(event, Closed):
        return event.closed_unix_ns or None
    if isinstance(event, Marked):
        return event.marked_unix_ns or None
    return None


def until(
    events: Iterable[tuple[int, Event]], *, last: int | None = None, clock_ns: int | None = None
) -> Iterator[tuple[int, Event]]:
    """Yield events up to number `last`, or up to a wall-clock time; both inclusive."""
    sent = 0
    for number, event in events:
        if isinstance(event, Requested):
            sent = event.sent_unix_ns
        at = clock_of(event, sent)
        if (last is not None and number > last) or (
            clock_ns is not None and at is not None and at > clock_ns
        ):
            return
        yield number, event


def narrate(
    events: Iterable[tuple[int, Event]], state: Rollout | None = None, *, each_frame: bool = False
) -> Iterator[Line]:
    """Tell a sample; `state` is what it goes on from, as for `fold`."""
    teller = _Teller(state or Rollout(), each_frame=each_frame)
    for number, event in events:
        yield from teller.tell(number, event)
    yield from teller.close()


class _Teller:
    def __init__(self, rollout: Rollout, *, each_frame: bool) -> None:
        self._rollout = rollout
        self._each = each_frame
        self._clock = 0
        self._sent = 0
        self._number = 0
        self._group: Line | None = None
        self._frames = 0
        self._group_end = 0
        self._last = 0
        """When the last frame came."""
        self._kept = False
        """It was told what the latest request leaves behind."""

    def tell(self, number: int, event: Event) -> Iterator[Line]:
        self._number = number
        before = self._lengths()
        if isinstance(event, (Requested, Observed, Unrecorded)):
            yield from self._flush()
            if isinstance(event, Requested):
                self._sent, self._last = event.sent_unix_ns, 0
            self._clock = clock_of(event, self._sent) or self._clock
            yield from self._cut_to(event.base)
        clock = clock_of(event, self._sent)
        if clock is not None:
            self._clock = clock
        request = self._rollout.request
        seen = (request.usage, request.error) if request else (None, None)
        texts = self._texts()
        finishes = {index: choice.finish_reason for index, choice in self._rollout.choices.items()}
        self._rollout.apply(event)
        if isinstance(event, Requested):
            self._kept = False
        if isinstance(event, Delta):
            yield from self._frame(event, before, finishes, seen, texts)
            return
        lines = self._other(event)
        if lines:
            yield from self._flush()
            yield from lines

    def close(self) -> Iterator[Line]:
        yield from self._flush()
        rollout, request = self._rollout, self._rollout.request
        tokens = sum(len(choice.token_ids) for choice in rollout.choices.values())
        what = f"the sample is {rollout.status}, with {_tokens(tokens)}"
        if rollout.discarded:
            what += f"; thrown away on the way: {_tokens(rollout.discarded)}"
        if request is not None and rollout.ended_of(request) is None:
            what += f"; request {request.number} is still open"
        yield Line(self._number, self._clock, None, None, what)

    # Frames

    def _frame(
        self,
        event: Delta,
        before: dict[int, int],
        finishes: dict[int, str | None],
        seen: tuple[object, object],
        texts: int,
    ) -> Iterator[Line]:
        rollout, request = self._rollout, self._rollout.request
        if request is None or request.number != event.number:
            yield from self._flush()
            yield self._line(event.number, event.time, "a frame of an older request, which nobody waits for")
            return
        ids = [
            token
            for index, choice in sorted(rollout.choices.items())
            for token in choice.token_ids[before.get(index, 0) :]
        ]
        if event.time - self._last > _PAUSE_US:
            yield from self._flush()
            silence = (event.time - self._last) / 1e6
            yield self._line(event.number, event.time, f"nothing came for {silence:.1f} s, then")
        self._last = event.time
        if ids or self._texts() > texts:
            if self._group is None:
                self._group = self._line(event.number, event.time, "")
                self._frames = 0
            self._group.token_ids = self._group.token_ids + ids
            self._group.event, self._group_end = self._number, event.time
            self._frames += 1
        told = []
        for index, choice in sorted(rollout.choices.items()):
            if choice.finish_reason != finishes.get(index) and choice.finish_reason is not None:
                which = f" of choice {index}" if len(rollout.choices) > 1 else ""
                stop = f" ({choice.stop_reason!r})" if choice.stop_reason is not None else ""
                told.append(f"finish reason{which}: {choice.finish_reason}{stop}")
        if request.error is not None and request.error != seen[1]:
            told.append(f"error frame: {_coded(request)}")
        if request.usage is not None and seen[0] is None:
            told.append("the engine's count of tokens")
        if event.data == b"[DONE]":
            told.append("[DONE]")
        if told or self._each:
            yield from self._flush()
        for what in told:
            yield self._line(event.number, event.time, what)

    def _flush(self) -> Iterator[Line]:
        group, self._group = self._group, None
        if group is not None:
            took = (self._group_end - (group.time or 0)) / 1e6
            span = f" within {took:.2f} s" if took >= 0.01 else ""
            frames = f" in {several(self._frames, 'frame')}" if self._frames > 1 else ""
            what = _tokens(len(group.token_ids)) if group.token_ids else "text without tokens"
            group.what = f"{what}{frames}{span}"
            yield group

    # Everything else

    def _other(self, event: Event) -> list[Line]:
        rollout, request = self._rollout, self._rollout.request
        if isinstance(event, Opened):
            return [self._line(None, None, _opened(event))]
        if isinstance(event, Requested) and request is not None:
            asked = f"asks {event.method} {event.path}, from token {event.base}"
            limits = f", for at most {_tokens(request.max_tokens)}" if request.max_tokens is not None else ""
            version = event.weight_version
            weights = f"; weights {version_words(version)}" if version is not None else ""
            step = f"; step {event.step}" if event.step is not None else ""
            return [self._line(event.number, 0, f"{event.cause}: {asked}{limits}{weights}{step}")]
        if isinstance(event, Responded):
            kind = dict(event.headers).get("content-type", "no content type")
            return [self._line(event.number, event.time, f"HTTP {event.status}, {kind}")]
        if isinstance(event, Body):
            ids = rollout.choice_or_first().token_ids[request.base if request else 0 :]
            line = self._line(event.number, event.time, f"a body of {several(len(event.data), 'byte')}")
            line.token_ids = ids
            return [line]
        if isinstance(event, Tail) and event.data.strip(b"\r\n"):
            size = several(len(event.data), "byte")
            return [self._line(event.number, None, f"{size} of a frame that was cut")]
        if isinstance(event, (Observed, Unrecorded)):
            who = "the environment adds" if isinstance(event, Observed) else "while recording was off came"
            line = self._line(None, None, f"{who} {_tokens(len(event.token_ids))}")
            line.token_ids = event.token_ids
            return [line] if event.token_ids else []
        if isinstance(event, Ended):
            return [self._line(event.number, event.time, self._end(event))]
        if isinstance(event, Closed):
            step = f" in step {event.step}" if event.step is not None else ""
            return [self._line(None, None, f"the trainer takes it as {event.status}{step}")]
        if isinstance(event, Marked):
            return [self._line(None, None, _marked(event))]
        if isinstance(event, Unknown):
            return [
                self._line(None, None, f"an event of kind {event.kind}, which this version does not know")
            ]
        return []

    def _end(self, event: Ended) -> str:
        rollout, request = self._rollout, self._rollout.request
        if request is None or request.number != event.number:
            return f"the older request {event.number} ends: {event.detail or event.how}"
        outcome = rollout.ended_of(request)
        place = f"after token {rollout.length}" if len(rollout.choices) == 1 else "here"
        because = f": {event.detail}" if event.detail else ""
        if rollout.end_in_a_word(request) == "unreachable":
            return f"reaches nobody: no connection could be made{because}"
        told = {
            "finished": "the response is whole",
            "aborted": f"cut {place} by the engine, which was told to abort",
            "engine_error": f"cut {place} by an error of the engine: {_coded(request)}",
            "http_error": f"refused with HTTP {request.http_status}: {request.error or 'no message'}",
            "cancelled": f"cut {place} by the client, which left{because}",
            "reset": f"cut {place} by the connection, which broke{because}",
            "timeout": f"cut {place} by silence{because}",
            "no_terminal": f"ends {place} without a finish reason, as if it were whole",
        }
        return told.get(outcome or "", f"ends{because}")

    def _cut_to(self, base: int) -> Iterator[Line]:
        """Tell what the next request keeps."""
        length = self._rollout.length
        if base == length and (self._rollout.request is None or self._kept):
            return
        self._kept = True
        kept = min(base, length)
        if kept == length:
            what = f"kept: all {_tokens(length)}" if length else "kept: nothing, for there is nothing"
        else:
            what = f"kept: {kept} of {_tokens(length)}; thrown away: {length - kept}"
        yield self._line(None, None, what)

    def _line(self, request: int | None, time: int | None, what: str) -> Line:
        return Line(self._number, self._clock, request, time, what)

    def _texts(self) -> int:
        """How many frames with text came, of the latest request."""
        return sum(len(choice.wire_text) for choice in self._rollout.choices.values())

    def _lengths(self) -> dict[int, int]:
        return {index: len(choice.token_ids) for index, choice in self._rollout.choices.items()}


def _opened(event: Opened) -> str:
    parts = [f"begins with a prompt of {_tokens(len(event.prompt_token_ids))}"]
    if event.step is not None:
        parts.append(f"in step {event.step}")
    if event.evaluation:
        parts.append("for evaluation")
    if event.parent is not None:
        parts.append(f"as a child of {event.parent}")
    if event.continues is not None:
        parts.append(f"going on from life {event.continues[0]} after {_tokens(event.continues[1])}")
    return ", ".join(parts)


def _marked(event: Marked) -> str:
    if event.name == "finish_inferred":
        reason, evidence = event.fields.get("finish_reason"), event.fields.get("evidence")
        return f"taken as finished ({reason}): {evidence or 'no evidence'}"
    if event.name == "called_off":
        return f"not made again: {event.fields.get('reason') or 'no reason'}"
    if event.name == "concurrent_request":
        return f"another request came meanwhile; it is sample {event.fields.get('child')}"
    fields = ", ".join(f"{name} {value}" for name, value in event.fields.items())
    return f"{event.name.replace('_', ' ')}{': ' + fields if fields else ''}"


def _coded(request: Request) -> str:
    code = f"code {request.error_code}: " if request.error_code is not None else ""
    return f"{code}{request.error}"


def _tokens(count: int) -> str:
    return several(count, "token")
