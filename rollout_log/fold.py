"""The fold: from a sample's events to the sample.

    rollout = fold(log_reader.events(ref))
    rollout.choice().token_ids

One rule carries everything: each `Requested`, `Observed` and `Unrecorded` states its `base`, a length of
the response. Folding one truncates the response to `base`; what follows is appended. Retry from scratch,
retry that goes on, partial rollout in a later step, the next turn of an agent: the same rule with another
base. The recorder folds with this very code as it records, so the live sample and the recorded one cannot
differ.

Pure: no IO, no clock, no knowledge of where events come from.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any

from rollout_log.counting import several
from rollout_log.engines import Frame, RequestInfo, Tokens, dialect_named
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
    Unrecorded,
)
from rollout_log.problems import problem
from rollout_log.request import Request
from rollout_log.response import Choice, Origin
from rollout_log.state import State
from rollout_log.stretch import Stretch

__all__ = ["Rollout", "fold"]

_AT_ONCE = 64
"""Deltas that are decoded together."""
_FORESEEN = 1024
"""Choices that are there before the engine names them; a client may ask for any number."""


class Rollout(State):
    """A sample as far as its events tell it. `apply` moves it on by one event."""

    def apply(self, event: Event) -> None:
        """Fold the next event in. Never raises on anything an engine or a client sent."""
        kind = type(event)
        if kind is Delta:
            self.apply_deltas((event,))  # type: ignore[arg-type]  # `kind is` does not narrow
            return
        self.events += 1
        apply = _APPLY.get(kind)
        if apply is None:
            self.unknown_events += kind.__name__ == "Unknown"
        else:
            apply(self, event)

    def apply_all(self, events: Iterable[Event]) -> None:
        """Fold the next events in, as `apply` would one by one."""
        for number, together in groupby(events, _number_of_delta):
            if number is None:
                for event in together:
                    self.apply(event)
            else:
                self.apply_deltas([*together])  # type: ignore[list-item]  # the key says what they are

    def apply_deltas(self, deltas: Sequence[Delta]) -> None:
        """Fold the next deltas in, all of one request."""
        count = len(deltas)
        if count > _AT_ONCE:
            for start in range(0, count, _AT_ONCE):
                self.apply_deltas(deltas[start : start + _AT_ONCE])
            return
        request = self.requests[-1] if self.requests else None
        first = deltas[0]
        if request is None or request.number != first.number:
            self.events += count
            self._late(first.number, count)
            return
        frames = [delta.data for delta in deltas]
        tokens = self._dialect.decode_tokens(frames)
        if tokens is not None and tokens.index in self.choices:
            self.events += count
            request.deltas += count
            request.bytes += sum(map(len, frames))
            self._apply_tokens(request, tokens, first.time, deltas[-1].time)
        elif count > 1:
            for delta in deltas:
                self.apply_deltas((delta,))
        else:
            self.events += 1
            request.bytes += len(first.data)
            frame = self._dialect.decode_frame(first.data, self._so_far)
            if not frame.done:
                request.deltas += 1
                self._apply_frame(request, frame, first.time)

    def apply_stretch(self, stretch: Stretch) -> None:
        """Fold Deltas in a row in, rendering those that do not just add tokens."""
        request = self.requests[-1] if self.requests else None
        if request is None or request.number != stretch.request:
            self.events += stretch.events
            if stretch.count:
                self._late(stretch.request, stretch.count)
            return
        events, size = self.events + stretch.events, request.bytes + stretch.bytes
        for part in stretch.parts():
            tokens = self._dialect.read_alike(part.frames) if part.frames is not None else None
            if tokens is not None and tokens.index in self.choices:
                request.deltas += part.count
                self._apply_tokens(request, tokens, part.first_time, part.last_time)
            else:
                self.apply_deltas(part.deltas())
        self.events, request.bytes = events, size

    def apply_piece(self, first: int, events: Sequence[Event] | Stretch) -> None:
        """Fold in what a log has from event `first` on; what is missing before it is a `log_gap`."""
        if first > self.events:
            self.skip_to(first)
        if isinstance(events, Sequence):
            self.apply_all(events)
        else:
            self.apply_stretch(events)

    def _apply_tokens(self, request: Request, tokens: Tokens, first_time: int, last_time: int) -> None:
        """What `_apply_frame` would do, frame by frame."""
        choice = self.choices[tokens.index]
        count = len(tokens.token_ids)
        choice.extend(tokens.token_ids, tokens.logprobs, Origin.GENERATED, request.number)
        if tokens.weight_version is not None:
            choice.tell_version(tokens.weight_version, len(choice.token_ids) - count)
        self._so_far[tokens.index] += count
        request.tokens += count
        request.last_time = last_time
        if request.first_time is None:
            request.first_time = first_time
        if tokens.request_id is not None:
            request.request_id = tokens.request_id

    def _apply_opened(self, event: Opened) -> None:
        self.opened = event
        if event.prompt_token_ids:
            self.prompt_token_ids = event.prompt_token_ids

    def _apply_requested(self, event: Requested) -> None:
        dialect = dialect_named(event.dialect)
        info = dialect.read_request(event.body)
        before = self.request
        if before is not None:
            self._settle(before)
        length = self.length
        if event.base > length:
            self._note(
                "log_gap", event.number, length, f"request {event.number} goes on from token {event.base}"
            )
        if before is not None and event.cause in ("retry", "resume"):
            self._check_budget(before, event, info)
        self._truncate(event.base)
        wanted = min(max(info.n, 1), _FORESEEN)
        first = self.choice_or_first()  # what the request repeats, so what all its choices begin with
        first.settle(self.history.wanting, self.dispatched)
        self.choices = {i: first if i == first.index else first.branch(i) for i in range(wanted)}
        for choice in self.choices.values():
            choice.begin()
        self._so_far = dict.fromkeys(self.choices, 0)
        self._dialect = dialect
        request = Request(
            number=event.number,
            base=event.base,
            cause=event.cause,
            dialect=event.dialect,
            path=event.path,
            step=event.step,
            weight_version=event.weight_version,
            sent_unix_ns=event.sent_unix_ns,
            max_tokens=info.max_tokens,
            n=wanted,
            wants_logprobs=info.wants_logprobs,
        )
        self.history.begin(request, before)
        self.requests.append(request)

    def _apply_responded(self, event: Responded) -> None:
        if (request := self._find(event.number)) is not None:
            request.http_status = event.status

    def _apply_body(self, event: Body) -> None:
        request = self.requests[-1] if self.requests else None
        if request is None or request.number != event.number:
            self._late(event.number)
            return
        request.bytes += len(event.data)
        if not request.dialect or not event.data:
            return
        frame = self._dialect.decode_body(event.data)
        if request.http_status is not None and request.http_status >= 400:
            # Whatever an error body says, it is no output.
            request.error = frame.error.message if frame.error else _text(event.data)
            request.error_code = frame.error.code if frame.error else None
            return
        self._apply_frame(request, frame, event.time)

    def _apply_frame(self, request: Request, frame: Frame, time: int) -> None:
        number = request.number
        so_far = self._so_far
        for delta in frame.choices:
            choice = self.choices.get(delta.index)
            if choice is None:
                choice = self.choices[delta.index] = Choice(index=delta.index)
                choice.begin()
                so_far[delta.index] = 0
            ids = delta.token_ids
            if ids:
                count = len(ids)
                choice.extend(ids, delta.logprobs, Origin.GENERATED, number)
                so_far[delta.index] += count
                request.tokens += count
                request.last_time = time
                if request.first_time is None:
                    request.first_time = time
                if frame.weight_version is not None:
                    choice.tell_version(frame.weight_version, len(choice.token_ids) - count)
                if delta.sampling_mask is not None:
                    choice.extend_sampling_mask(delta.sampling_mask, count)
            if delta.finish_reason is not None:
                choice.finish_reason = delta.finish_reason
                choice.stop_reason = delta.stop_reason
            elif delta.stop_reason is not None:
                choice.stop_reason = delta.stop_reason
            if delta.weight_versions:
                choice.tell_spans(delta.weight_versions, request.base)
            if delta.routed_experts is not None:
                choice.routed_experts = delta.routed_experts
                choice.routed_experts_start = delta.routed_experts_start
            if delta.text:
                choice.wire_text.append(delta.text)
        if frame.usage is not None:
            request.usage = frame.usage
        if frame.request_id is not None:
            request.request_id = frame.request_id
        if frame.metrics is not None:
            request.metrics = frame.metrics
        if frame.prompt_token_ids is not None and not self.prompt_token_ids:
            self.prompt_token_ids = frame.prompt_token_ids
        if frame.error is not None:
            request.error = frame.error.message
            request.error_code = frame.error.code
        if frame.undecodable is not None:
            request.undecodable += 1
            request.detail = request.detail or frame.undecodable
        if frame.length_mismatch is not None:
            self._note("length_mismatch", number, self.length, frame.length_mismatch)

    def _apply_tail(self, event: Tail) -> None:
        if (request := self._find(event.number)) is not None:
            request.tail_bytes += len(event.data.lstrip(b"\r\n"))

    def _apply_observed(self, event: Observed) -> None:
        self._add(event.base, event.token_ids, Origin.OBSERVED)

    def _apply_unrecorded(self, event: Unrecorded) -> None:
        position = min(event.base, self.length)
        count = several(len(event.token_ids), "token")
        self._note("log_gap", None, position, f"{count} came while recording was off")
        self._add(event.base, event.token_ids, Origin.UNRECORDED)

    def _apply_ended(self, event: Ended) -> None:
        request = self._find(event.number)
        if request is None or request.how is not None:
            return
        request.how = event.how
        request.detail = event.detail or request.detail
        if request.last_time is None or event.time > request.last_time:
            request.last_time = event.time

    def _apply_closed(self, event: Closed) -> None:
        self.closed = event

    def _apply_marked(self, event: Marked) -> None:
        self.marks.append(event)
        if event.name == "finish_inferred":
            self.choice_or_first().inferred = str(event.fields.get("finish_reason"))
        elif event.name == "called_off":
            if self.request is not None and event.fields.get("request") == self.request.number:
                self.request.called_off = True
        elif event.name == "concurrent_request":
            child = event.fields.get("child")
            number = self.request.number if self.request else None
            self._note(
                "concurrent_request", number, None, f"recorded as {child}, while this request was open"
            )

    def skip_to(self, number: int) -> None:
        """Events up to `number` are lost."""
        message = f"events {self.events} to {number - 1} are missing"
        self._note("log_gap", None, self.length, message)
        self.events = number

    # Parts

    def _add(self, base: int, token_ids: list[int], origin: Origin) -> None:
        choice = self.choice_or_first()
        length = len(choice.token_ids)
        if base > length:
            self._note("log_gap", None, length, f"tokens {length} to {base} are missing")
        elif base < length and origin is Origin.OBSERVED:
            request = self.request
            finished = self.status_of(choice) in ("completed", "truncated")
            if finished and request is not None and base >= request.base:
                cut = several(length - base, "token")
                self._note("response_trimmed", request.number, base, f"{cut} cut off its end")
            else:
                self._note("prompt_mismatch", None, base, f"the next request differs from token {base} on")
        self._truncate(base)
        choice.extend(token_ids, None, origin, None)

    def _truncate(self, base: int) -> None:
        self.discarded += sum(choice.truncate(base) for choice in self.choices.values())

    def _find(self, number: int) -> Request | None:
        return next((request for request in reversed(self.requests) if request.number == number), None)

    def _late(self, number: int, count: int = 1) -> None:
        if (request := self._find(number)) is not None:
            self.history.late += not request.late_deltas
            request.late_deltas += count

    def _note(self, code: str, request: int | None, position: int | None, message: str) -> None:
        self.history.note(problem(code, request, position, message))

    def _settle(self, request: Request) -> None:
        """Freeze what the latest request's problems and end are, before another one takes its place."""
        for each in request.problems(self.choices.values()):
            self.history.note(each)
        request.ended = self.ended_of(request)

    def _check_budget(self, before: Request, event: Requested, info: RequestInfo) -> None:
        kept = event.base - before.base
        if before.max_tokens is None or info.max_tokens is None or kept <= 0:
            return
        if info.max_tokens > before.max_tokens - kept:
            message = f"max_tokens {info.max_tokens} after {kept} of {before.max_tokens} were used"
            self._note("budget_not_reduced", event.number, event.base, message)


def fold(events: Iterable[tuple[int, Event]], state: Rollout | None = None) -> Rollout:
    """Fold numbered events into a sample.

    Order and repetition do not matter: events are taken by number, each once. With `state`, goes on from
    it (the state itself is left alone), so folding parts one after the other equals one fold. A number
    that is missing is a `log_gap`.
    """
    rollout = Rollout() if state is None else state.copy()
    following: list[Event] = []
    for number, event in sorted(events, key=lambda numbered: numbered[0]):
        expected = rollout.events + len(following)
        if number < expected:
            continue
        if number > expected:
            rollout.apply_all(following)
            following.clear()
            rollout.skip_to(number)
        following.append(event)
    rollout.apply_all(following)
    return rollout


def _number_of_delta(event: Event) -> int | None:
    return event.number if type(event) is Delta else None


def _text(data: bytes) -> str:
    return data[:500].decode("utf-8", "replace")


_APPLY: dict[type[Event], Any] = {
    Opened: Rollout._apply_opened,
    Requested: Rollout._apply_requested,
    Responded: Rollout._apply_responded,
    Body: Rollout._apply_body,
    Tail: Rollout._apply_tail,
    Observed: Rollout._apply_observed,
    Unrecorded: Rollout._apply_unrecorded,
    Ended: Rollout._apply_ended,
    Closed: Rollout._apply_closed,
    Marked: Rollout._apply_marked,
}
