"""What a sample's requests have come to, kept up as they come: nothing here looks at old ones again."""

from __future__ import annotations

import msgspec

from rollout_log.problems import Problem, count_codes
from rollout_log.request import Request

__all__ = ["History"]


class History(msgspec.Struct):
    """Sums over the requests of a sample, and the problems that stay whatever comes."""

    resumes: int = 0
    retries: dict[str, int] = {}
    """How the requests that were retried had ended, and how many of each."""
    bytes: int = 0
    """Of the requests before the latest one."""
    late: int = 0
    """Requests of which frames came after a newer one."""
    first_step: int | None = None
    last_step: int | None = None
    steps_differ: bool = False
    spans: dict[int, tuple[int, int]] = {}
    """By step, when its first request was sent and when its last one that is over ended, in ns since 1970."""
    wanting: set[int] = set()
    """Numbers of the requests that asked for log-probs."""
    dispatched: dict[int, str] = {}
    """Weight version known at dispatch, by request number."""
    problems: list[Problem] = []
    counts: dict[str, int] = {}
    """Of the problems, by code."""

    def begin(self, request: Request, before: Request | None) -> None:
        """Count a request in. `before` has its `ended` by now."""
        self.resumes += request.cause == "resume"
        if before is not None:
            self.bytes += before.bytes
            self._end(before)
            if request.cause == "retry":
                ended = before.ended or "superseded"
                self.retries[ended] = self.retries.get(ended, 0) + 1
        if request.step is not None:
            if self.first_step is None:
                self.first_step = request.step
            self.steps_differ |= request.step != self.first_step
            self.last_step = request.step
            if request.sent_unix_ns:
                self.spans.setdefault(request.step, (request.sent_unix_ns, request.sent_unix_ns))
        if request.wants_logprobs:
            self.wanting.add(request.number)
        if request.weight_version:
            self.dispatched[request.number] = request.weight_version

    def _end(self, request: Request) -> None:
        if request.step is not None and (span := self.spans.get(request.step)) is not None:
            ended = request.sent_unix_ns + 1000 * (request.last_time or 0)
            self.spans[request.step] = span[0], max(span[1], ended)

    def note(self, found: Problem) -> None:
        """Keep a problem for good."""
        self.problems.append(found)
        count_codes(self.counts, (found,))

    def copy(self) -> History:
        """Return a copy that moves on apart from this one."""
        return msgspec.structs.replace(
            self,
            retries=self.retries.copy(),
            spans=self.spans.copy(),
            wanting=self.wanting.copy(),
            dispatched=self.dispatched.copy(),
            problems=self.problems.copy(),
            counts=self.counts.copy(),
        )
