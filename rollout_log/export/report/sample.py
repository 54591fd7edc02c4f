"""A sample as the page has it: its lane in the timeline, and what a click shows.

Lanes are all read when the page opens; details stay packed until they are asked for. Times are
milliseconds since the page's origin, in lanes and details alike.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import msgspec

from rollout_log.ascii_json import to_json
from rollout_log.export.report.arrivals import Followed
from rollout_log.export.report.vocabulary import Vocabulary
from rollout_log.fold import Rollout
from rollout_log.log import Entry
from rollout_log.request import Request
from rollout_log.response import Choice
from rollout_log.times import request_end_ns, sample_span_ns
from rollout_log.versions import version_words
from rollout_log.words import Said

__all__ = ["Bar", "Detail", "Lane", "Mark", "Prompt", "Tokens", "detail_of", "lane_of", "unreadable"]

Clock = Callable[[int], float]
"""ns since 1970 -> ms since the origin."""


class Bar(msgspec.Struct):
    """One request."""

    number: int
    cause: str
    base: int
    step: int | None
    version: str | None
    sent: float
    first: float | None
    end: float
    ended: str
    """As the fold judges it, or `open`, or `superseded`."""
    status: int | None
    tokens: int
    detail: str | None


class Mark(msgspec.Struct):
    """Something that was noted of the sample."""

    name: str
    time: float
    fields: str


class Lane(msgspec.Struct):
    """One sample in the timeline."""

    name: str
    run: str
    status: str
    step: int | None
    evaluation: bool
    tokens: int
    discarded: int
    prompt_tokens: int
    problems: list[tuple[str, int | None, int | None, str]]
    """(code, request, position, message)."""
    bars: list[Bar] = []
    marks: list[Mark] = []
    life: int = 0
    parent: str | None = None
    trainer_status: str | None = None
    group: int | None = None
    index: int | None = None
    reward: str | None = None
    """JSON."""
    resumed_from: int | None = None
    began: float = 0.0
    mean: float | None = None
    """Log-prob of the generated tokens."""
    unreadable: str | None = None
    """Why there is no more than this."""
    detail: int | None = None
    """Its line among the packed ones; None: left out."""
    prompt: int | None = None


class Prompt(msgspec.Struct):
    """What was asked: tokens, words or both. Samples may share it."""

    ids: list[int]
    joined: dict[int, str]
    """As of `Tokens`."""
    words: list[Said]


class Tokens(msgspec.Struct):
    """One choice of the response."""

    index: int
    status: str
    finish: str | None
    ids: list[int]
    logprobs: list[float | None]
    times: list[float | None]
    runs: list[tuple[str, int | None, int, int]]
    """(origin, request, start, end)."""
    versions: list[tuple[str, int, int]]
    joined: dict[int, str]
    """Position -> text, where tokens make a character together."""
    text: str | None
    """What the engine sent where it sent no ids."""


class Detail(msgspec.Struct):
    """What a click shows beside the lane."""

    choices: list[Tokens]
    metadata: str
    """JSON."""


def lane_of(entry: Entry, rollout: Rollout, clock: Clock) -> Lane:
    """Return a sample's lane."""
    opened, closed, summary = rollout.opened, rollout.closed, entry.summary
    began, ended = sample_span_ns(rollout)
    known = [x for choice in rollout.choices.values() for x in choice.logprobs if not math.isnan(x)]
    return Lane(
        name=entry.name,
        run=entry.ref.run,
        status=rollout.status,
        step=rollout.step,
        evaluation=rollout.evaluation,
        tokens=sum(len(choice.token_ids) for choice in rollout.choices.values()),
        discarded=rollout.discarded,
        prompt_tokens=len(rollout.prompt_token_ids),
        problems=[(p.code, p.request, p.position, p.message) for p in rollout.problems],
        bars=[_bar(rollout, request, clock, ended) for request in rollout.requests],
        marks=[
            Mark(mark.name, clock(mark.marked_unix_ns), to_json(mark.fields))
            for mark in rollout.marks
            if mark.marked_unix_ns
        ],
        life=entry.ref.incarnation,
        parent=opened.parent if opened else None,
        trainer_status=closed.status if closed else None,
        group=opened.group_index if opened else None,
        index=opened.index if opened else None,
        reward=None if closed is None or closed.reward is None else to_json(closed.reward),
        resumed_from=summary.resumed_from,
        began=clock(began),
        mean=round(sum(known) / len(known), 4) if known else None,
    )


def _bar(rollout: Rollout, request: Request, clock: Clock, last_ns: int) -> Bar:
    end_ns = request_end_ns(rollout, request)
    return Bar(
        number=request.number,
        cause=request.cause,
        base=request.base,
        step=request.step,
        version=None if request.weight_version is None else version_words(request.weight_version),
        sent=clock(request.sent_unix_ns),
        first=None if request.first_time is None else clock(request.sent_unix_ns + 1000 * request.first_time),
        end=clock(last_ns if end_ns is None else end_ns),
        ended=rollout.end_in_a_word(request),
        status=request.http_status,
        tokens=request.tokens,
        detail=request.error or request.detail,
    )


def unreadable(entry: Entry, why: str, clock: Clock) -> Lane:
    """Return the lane of a sample that cannot be read: what its summary says."""
    summary = entry.summary
    return Lane(
        name=entry.name,
        run=entry.ref.run,
        status=summary.status,
        step=summary.step,
        evaluation=summary.evaluation,
        tokens=summary.tokens,
        discarded=summary.discarded,
        prompt_tokens=summary.prompt_tokens,
        problems=[],
        life=entry.ref.incarnation,
        began=clock(summary.opened_unix_ns),
        unreadable=why,
    )


def detail_of(followed: Followed, vocabulary: Vocabulary | None, clock: Clock) -> Detail:
    """Return what a click shows."""
    rollout = followed.rollout
    return Detail(
        choices=[
            _tokens(rollout, choice, followed.times[index], vocabulary, clock)
            for index, choice in sorted(rollout.choices.items())
        ],
        metadata=to_json(rollout.opened.metadata if rollout.opened else {}),
    )


def _tokens(
    rollout: Rollout, choice: Choice, times: list[int | None], vocabulary: Vocabulary | None, clock: Clock
) -> Tokens:
    versions = choice.weight_versions(rollout.dispatched)
    return Tokens(
        index=choice.index,
        status=rollout.status_of(choice),
        finish=choice.finish_reason or choice.inferred,
        ids=choice.token_ids,
        logprobs=[None if math.isnan(x) else round(x, 3) for x in choice.logprobs],
        times=[None if ns is None else clock(ns) for ns in times],
        runs=[(run.origin.value, run.request, run.start, run.end) for run in choice.runs],
        versions=[(version_words(span.version), span.start, span.end) for span in versions],
        joined=vocabulary.add(choice.token_ids) if vocabulary else {},
        text="".join(choice.wire_text) if choice.wire_text and not choice.token_ids else None,
    )
