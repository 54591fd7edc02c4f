"""What each step of the trainer came to: a line a step, from the samples' summaries alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import msgspec

from rollout_log.log.summary import Summary
from rollout_log.versions import version_order

__all__ = ["StepView", "by_step"]


class StepView(msgspec.Struct):
    """One step of one run. A sample counts in its latest step."""

    run: str
    step: int | None
    """null: the samples of no step."""
    evaluation: bool
    samples: int = 0
    completed: int = 0
    truncated: int = 0
    aborted: int = 0
    failed: int = 0
    pending: int = 0
    resumed_from: dict[str, int] = {}
    """Earlier step -> how many samples began there."""
    went_on: int = 0
    """Samples that began in this step and are counted in a later one."""
    requests: int = 0
    resumes: int = 0
    retries: dict[str, int] = {}
    """How the requests that were retried had ended, and how many of each."""
    tokens: int = 0
    """Of the responses, as they are now."""
    discarded: int = 0
    """Tokens that were generated and thrown away."""
    discarded_share: float | None = None
    """Of all tokens, from 0 to 1; null when there are none."""
    weight_versions: list[str] = []
    began_unix_ns: int = 0
    """When the first request was sent in this step, also of samples that went on; 0: unknown."""
    updated_unix_ns: int = 0
    """When the last of these ended, or a sample that is counted here was closed."""
    problems: dict[str, int] = {}
    """How often each problem code occurred."""
    errors: int = 0
    """Problems of severity error."""


class _Tally:
    """A step while its samples are being counted."""

    def __init__(self, run: str, step: int | None, *, evaluation: bool) -> None:
        self.view = StepView(run, step, evaluation)
        self.status: Counter[str] = Counter()
        self.resumed_from: Counter[str] = Counter()
        self.retries: Counter[str] = Counter()
        self.problems: Counter[str] = Counter()
        self.versions: set[str] = set()
        self.began_unix_ns: int | None = None

    def add(self, summary: Summary) -> None:
        view = self.view
        view.samples += 1
        self.status[summary.status] += 1
        view.requests += summary.requests
        view.resumes += summary.resumes
        view.tokens += summary.tokens
        view.discarded += summary.discarded
        view.errors += summary.errors
        self.versions.update(summary.versions)
        if summary.retries:
            self.retries.update(summary.retries)
        if summary.problems:
            self.problems.update(summary.problems)
        if summary.resumed_from is not None:
            self.resumed_from[str(summary.resumed_from)] += 1

    def last(self, began_unix_ns: int | None, ended_unix_ns: int) -> None:
        """Take in how long a sample was in the step."""
        if began_unix_ns is not None:
            self.began_unix_ns = min(self.began_unix_ns or began_unix_ns, began_unix_ns)
        self.view.updated_unix_ns = max(self.view.updated_unix_ns, ended_unix_ns)

    def close(self) -> StepView:
        view = self.view
        for status in ("completed", "truncated", "aborted", "failed", "pending"):
            setattr(view, status, self.status[status])
        view.resumed_from = dict(sorted(self.resumed_from.items(), key=lambda item: int(item[0])))
        view.retries = dict(self.retries.most_common())
        view.problems = dict(self.problems.most_common())
        view.weight_versions = sorted(self.versions, key=version_order)
        view.began_unix_ns = self.began_unix_ns or 0
        if generated := view.tokens + view.discarded:
            view.discarded_share = view.discarded / generated
        return view


def by_step(summaries: Iterable[Summary]) -> list[StepView]:
    """Tally samples by run, step and purpose, in order; training before evaluation, no step last."""
    tallies: dict[tuple[str, int | None, bool], _Tally] = {}
    left: Counter[tuple[str, int | None, bool]] = Counter()
    elsewhere: dict[tuple[str, int | None, bool], tuple[int, int]] = {}
    """When samples were in steps that they are not counted in."""
    for summary in summaries:
        key = (summary.run, summary.step, summary.evaluation)
        tally = tallies.get(key)
        if tally is None:
            tally = tallies[key] = _Tally(*key[:2], evaluation=key[2])
        tally.add(summary)
        began = summary.opened_unix_ns if summary.resumed_from is None else None
        for step, first, last in summary.spans:
            if step == summary.step:
                began = first
            else:
                place = (summary.run, step, summary.evaluation)
                known = elsewhere.get(place, (first, last))
                elsewhere[place] = min(known[0], first), max(known[1], last)
        tally.last(began, summary.updated_unix_ns)
        if summary.resumed_from is not None:
            left[summary.run, summary.resumed_from, summary.evaluation] += 1
    for key, count in left.items():
        if key not in tallies:
            tallies[key] = _Tally(*key[:2], evaluation=key[2])
        tallies[key].view.went_on = count
    for key, span in elsewhere.items():
        if key in tallies:  # a step that no sample began in or is counted in has no line
            tallies[key].last(*span)
    return [tallies[key].close() for key in sorted(tallies, key=_order)]


def _order(key: tuple[str, int | None, bool]) -> tuple[str, bool, int, bool]:
    run, step, evaluation = key
    return run, step is None, step or 0, evaluation
