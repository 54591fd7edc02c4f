"""Whether a request that did not finish is made again, and after how long. Pure."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import NamedTuple

from rollout_log.fold import Rollout
from rollout_log.request import Request

__all__ = ["Backoff", "Verdict", "judge"]

_PASSING = frozenset({408, 425, 429})
"""Statuses below 500 that say nothing about the request itself."""


class Verdict(NamedTuple):
    """What comes after a request: `retry`, or `final` (an answer or an abort), or `refused`."""

    kind: str
    reason: str


class Backoff(NamedTuple):
    """Delays between tries, in seconds: `first`, doubling up to `longest`, each with jitter."""

    first: float = 1.0
    longest: float = 30.0
    tries: int = 60

    def delay(self, attempt: int, jitter: Callable[[], float] = random.random) -> float:
        """Return how long to wait before the retry number `attempt`, counted from 0."""
        full: float = min(self.first * 2.0 ** min(attempt, 30), self.longest)
        return full * (0.5 + jitter() / 2)


def judge(rollout: Rollout, request: Request, *, retry_without_terminal: bool = True) -> Verdict:
    """Say what an ended request calls for. Error frames count by their code, as if it were the status."""
    status = rollout.status
    ended = rollout.ended_of(request)
    if status in ("completed", "truncated") or ended == "aborted":
        return Verdict("final", ended or "finished")
    if ended == "cancelled":
        return Verdict("final", "cancelled")
    if request.http_status is not None and 300 <= request.http_status < 400:
        return Verdict("refused", f"HTTP {request.http_status}: a redirect; give the final URL")
    if ended == "http_error":
        code = request.http_status or 500
        return _by_code(code, f"HTTP {code}: {request.error or request.detail or 'no message'}")
    if ended == "engine_error":
        code = request.error_code if request.error_code is not None else 500
        return _by_code(code, f"error frame of code {code}: {request.error}")
    if ended == "no_terminal" and (encoding := _encoding_of(rollout, request)):
        return Verdict("refused", f"the answer came compressed ({encoding}), though identity was asked for")
    if ended == "no_terminal":
        return Verdict("retry" if retry_without_terminal else "final", "no_terminal")
    return Verdict("retry", f"{ended}: {request.detail or 'no detail'}")


def _encoding_of(rollout: Rollout, request: Request) -> object:
    marks = (mark.fields for mark in rollout.marks if mark.name == "encoded_body")
    return next((fields.get("encoding") for fields in marks if fields.get("request") == request.number), None)


def _by_code(code: int, reason: str) -> Verdict:
    return Verdict("retry" if code >= 500 or code in _PASSING else "refused", reason)
