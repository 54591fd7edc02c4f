"""What a sample is, as far as its events tell it: what is kept of them, and what follows from that."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from rollout_log.counting import several
from rollout_log.engines import Dialect, dialect_named
from rollout_log.events import Closed, Marked, Opened
from rollout_log.history import History
from rollout_log.problems import Problem, count_codes, problem
from rollout_log.request import Outcome, Request, Status
from rollout_log.response import Choice

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["State"]

# A whole sample of several choices is what its worst choice is.
_WORST_FIRST: tuple[Status, ...] = ("pending", "failed", "aborted", "truncated", "completed")


class State:
    """A sample at one moment."""

    def __init__(self) -> None:
        self.opened: Opened | None = None
        self.closed: Closed | None = None
        self.prompt_token_ids: list[int] = []
        self.choices: dict[int, Choice] = {0: Choice()}
        self.requests: list[Request] = []
        self.marks: list[Marked] = []
        self.events = 0
        """Events applied so far, which is the number of the next one."""
        self.unknown_events = 0
        self.discarded = 0
        """Tokens that were generated and thrown away by a later request's base."""
        self.history = History()
        self._so_far: dict[int, int] = {}
        self._dialect: Dialect = dialect_named("")

    # What the sample is

    @property
    def n(self) -> int:
        """Number of choices the latest request asked for."""
        return max(len(self.choices), 1)

    @property
    def request(self) -> Request | None:
        """The latest request; it decides the status."""
        return self.requests[-1] if self.requests else None

    @property
    def status(self) -> Status:
        """The sample's status; with several choices, that of the worst."""
        found = {self.status_of(choice) for choice in self.choices.values()}
        return next(status for status in _WORST_FIRST if status in found)

    @property
    def usage(self) -> dict[str, Any] | None:
        """The last usage the engine reported."""
        return next((request.usage for request in reversed(self.requests) if request.usage), None)

    @property
    def step(self) -> int | None:
        """The trainer's step: where it closed the sample, else of the latest request, else of the start."""
        if self.closed is not None and self.closed.step is not None:
            return self.closed.step
        if self.history.last_step is not None:
            return self.history.last_step
        return self.opened.step if self.opened else None

    @property
    def evaluation(self) -> bool:
        """Whether an evaluation asked for the sample, or consumed it."""
        asked = self.opened is not None and self.opened.evaluation
        return asked or (self.closed is not None and self.closed.evaluation)

    @property
    def length(self) -> int:
        """Response tokens so far, of the first choice."""
        return len(self.choice_or_first().token_ids)

    def choice(self, index: int = 0) -> Choice:
        """Return one choice of the response; raises KeyError where the requests never had it."""
        return self.choices[index]

    def status_of(self, choice: Choice) -> Status:
        """Return the status of one choice."""
        request = self.request
        return "pending" if request is None else request.status(choice)

    def ended_of(self, request: Request) -> Outcome | None:
        """Return how a request ended, None while it is open. Only the latest one still knows its choices."""
        if request is not self.request:
            return request.ended
        return request.outcome_of_all(self.choices.values())

    def end_in_a_word(self, request: Request) -> str:
        """Return how a request ended, for people: also `open`, `superseded`, or that it reached nobody."""
        ended = self.ended_of(request)
        if ended in {"reset", "timeout"} and request.is_unreached:
            return "unreachable"
        return ended or ("open" if request is self.request else "superseded")

    @property
    def problems(self) -> list[Problem]:
        """Everything that is wrong or noteworthy, in order of discovery; severities in `problems`."""
        found = self.history.problems.copy()
        for older in self.requests:
            if older.late_deltas:
                message = f"{several(older.late_deltas, 'frame')} came after a newer request"
                found.append(problem("late_delta", older.number, None, message))
        if self.request is not None:
            found += self.request.problems(self.choices.values())
        for choice in self.choices.values():
            found += choice.problems(self.history.wanting, self.dispatched)
        return found

    def count_problems(self) -> dict[str, int]:
        """Count the same by code, looking at what the latest request brought alone."""
        counts = self.history.counts.copy()
        if self.history.late:
            counts["late_delta"] = self.history.late
        if self.request is not None:
            count_codes(counts, self.request.problems(self.choices.values()))
        for choice in self.choices.values():
            for code, count in choice.count_problems(self.history.wanting, self.dispatched).items():
                counts[code] = counts.get(code, 0) + count
        return counts

    @property
    def dispatched(self) -> dict[int, str]:
        """Weight version known at dispatch, by request number."""
        return self.history.dispatched

    def choice_or_first(self) -> Choice:
        """Return choice 0, or the only one there is."""
        return self.choices.get(0) or next(iter(self.choices.values()))

    # Lives and copies

    def copy(self) -> Self:
        """Return a copy that moves on apart from this one."""
        twin = type(self)()
        twin.__dict__.update(self.__dict__)
        twin.choices = {index: choice.copy() for index, choice in self.choices.items()}
        twin.requests = [msgspec.structs.replace(request) for request in self.requests]
        twin.marks = self.marks.copy()
        twin.history = self.history.copy()
        twin._so_far = self._so_far.copy()
        return twin

    @classmethod
    def continue_from(cls, older: State, length: int) -> Self:
        """Return what a new life of a sample starts from: the first `length` tokens of an older one."""
        heir = cls()
        heir.prompt_token_ids = older.prompt_token_ids
        heir.choices = {0: older.choice_or_first().inherit(length, older.dispatched)}
        return heir
