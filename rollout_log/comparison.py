"""Two samples side by side: where their tokens part, and how far their log-probs are from each other."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from rollout_log.view import RequestView, SampleView

__all__ = ["Comparison", "Difference", "Side", "compare", "first_difference"]


class Difference(msgspec.Struct):
    """The first place where two lists of tokens differ; null stands for the end of the shorter one."""

    position: int
    a: int | None
    b: int | None


class LogprobDifference(msgspec.Struct):
    """How the log-probs of the tokens that both have differ, where neither is missing."""

    compared: int
    differing: int
    missing: int
    """Tokens of which one side has no log-prob, and the other has."""
    largest: float
    """In absolute terms."""
    largest_at: int | None
    mean: float
    """Of the absolute differences."""


class Side(msgspec.Struct):
    """One of the two samples."""

    key: str
    incarnation: int
    run: str
    status: str
    finish_reason: str | None
    stop_reason: int | str | None
    prompt_tokens: int
    tokens: int
    weight_versions: list[str]
    requests: list[RequestView]
    problems: list[str]


class Comparison(msgspec.Struct):
    """How two samples compare. `same` is about tokens, log-probs, loss mask and status."""

    same: bool
    prompt: Difference | None
    """null: the prompts are the same."""
    response: Difference | None
    loss_mask: int | None
    """The first position at which the masks of the tokens that both have differ."""
    logprobs: LogprobDifference
    """Up to the first token that differs."""
    a: Side
    b: Side


def compare(a: SampleView, b: SampleView) -> Comparison:
    """Compare two samples, or two choices."""
    prompt = first_difference(a.prompt_token_ids, b.prompt_token_ids)
    response = first_difference(a.token_ids, b.token_ids)
    common = len(a.token_ids) if response is None else response.position
    logprobs = _compare_logprobs(a.logprobs[:common], b.logprobs[:common])
    mask = first_difference(a.loss_mask[:common], b.loss_mask[:common])
    alike = prompt is None and response is None and mask is None and a.status == b.status
    return Comparison(
        same=alike and not logprobs.differing and not logprobs.missing,
        prompt=prompt,
        response=response,
        loss_mask=None if mask is None else mask.position,
        logprobs=logprobs,
        a=_side(a),
        b=_side(b),
    )


def first_difference(a: Sequence[int], b: Sequence[int]) -> Difference | None:
    """Return where two lists part, None where they are the same."""
    for position, (ours, theirs) in enumerate(zip(a, b, strict=False)):
        if ours != theirs:
            return Difference(position, ours, theirs)
    if len(a) == len(b):
        return None
    end = min(len(a), len(b))
    return Difference(end, a[end] if end < len(a) else None, b[end] if end < len(b) else None)


def _compare_logprobs(a: Sequence[float | None], b: Sequence[float | None]) -> LogprobDifference:
    found = LogprobDifference(0, 0, 0, 0.0, None, 0.0)
    apart: list[float] = []
    for position, (ours, theirs) in enumerate(zip(a, b, strict=True)):
        if ours is None or theirs is None:
            found.missing += (ours is None) != (theirs is None)
            continue
        apart.append(0.0 if ours == theirs else abs(ours - theirs))  # infinite ones are equal as well
        if apart[-1] > 0:
            found.differing += 1
        if apart[-1] > found.largest:
            found.largest, found.largest_at = apart[-1], position
    found.compared = len(apart)
    found.mean = sum(apart) / len(apart) if apart else 0.0
    return found


def _side(view: SampleView) -> Side:
    return Side(
        key=view.key,
        incarnation=view.incarnation,
        run=view.run,
        status=view.status,
        finish_reason=view.finish_reason,
        stop_reason=view.stop_reason,
        prompt_tokens=len(view.prompt_token_ids),
        tokens=len(view.token_ids),
        weight_versions=[span.version for span in view.weight_versions],
        requests=view.requests,
        problems=sorted({problem.code for problem in view.problems}),
    )
