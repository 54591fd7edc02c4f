"""When things happened to a sample, on the wall clock: what traces draw."""

from __future__ import annotations

from collections.abc import Iterable

from rollout_log.fold import Rollout
from rollout_log.request import Request

__all__ = ["first_token_ns", "request_end_ns", "sample_span_ns", "version_starts_ns"]


def request_end_ns(rollout: Rollout, request: Request) -> int | None:
    """When a request ended or was left; None while it is open."""
    if rollout.ended_of(request) is None and request is rollout.request:
        return None
    return request.sent_unix_ns + 1000 * (request.last_time or 0)


def first_token_ns(request: Request) -> int | None:
    """When a request's first token came."""
    return None if request.first_time is None else request.sent_unix_ns + 1000 * request.first_time


def sample_span_ns(rollout: Rollout) -> tuple[int, int]:
    """When a sample began, and the last that is known to have happened to it."""
    opened, closed = rollout.opened, rollout.closed
    stamps = [opened.opened_unix_ns] if opened and opened.opened_unix_ns else []
    for request in rollout.requests:
        stamps += [request.sent_unix_ns, request.sent_unix_ns + 1000 * (request.last_time or 0)]
    stamps += [mark.marked_unix_ns for mark in rollout.marks if mark.marked_unix_ns]
    if closed and closed.closed_unix_ns:
        stamps.append(closed.closed_unix_ns)
    return (min(stamps), max(stamps)) if stamps else (0, 0)


def version_starts_ns(rollout: Rollout) -> Iterable[tuple[str, int]]:
    """Yield each weight version, and when the first request that got tokens of it was sent."""
    sent = {request.number: request.sent_unix_ns for request in rollout.requests}
    for choice in rollout.choices.values():
        for span in choice.weight_versions(rollout.dispatched):
            number = choice.request_at(span.start)
            if number in sent:
                yield span.version, sent[number]
