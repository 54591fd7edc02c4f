"""The answer that vLLM's servers give on all their endpoints: what it holds beside tokens and log-probs.

Streamed frames and whole bodies have one shape. Stock vLLM tells weight versions as spans on the last
frame of a choice, vime's fork as one `weight_version` on every frame; older servers tell speculative
decoding figures as `request_spec_decode_stats`, newer ones as `metrics.speculative_decoding`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import msgspec

from rollout_log.counting import several
from rollout_log.engines.frame import ChoiceDelta, Frame, VersionSpan
from rollout_log.engines.wire import Natural, TokenId, error_in

__all__ = ["Answer", "AnswerChoice", "Parts", "Span", "read_answer"]


class Span(msgspec.Struct, gc=False):
    """Weight version of the tokens [start, end) of this request's output."""

    version: str | int
    start: Natural
    end: Natural


class AnswerChoice(msgspec.Struct, gc=False):
    """What choices have on every endpoint."""

    index: Natural = 0
    token_ids: list[TokenId] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    weight_versions: list[Span] | None = None
    routed_experts: str | None = None
    sampling_mask: list[list[TokenId]] | None = None
    text: str | None = None
    prompt_token_ids: list[TokenId] | None = None


_Choice = TypeVar("_Choice", bound=AnswerChoice)
Parts = tuple["list[int] | None", "list[float | None] | None", "str | None"]
"""Token ids, log-probs and text of one choice."""


class Answer(msgspec.Struct, gc=False):
    """What answers have on every endpoint, beside `choices`."""

    request_id: str | None = None
    id: str | None = None
    usage: dict[str, Any] | None = None
    weight_version: str | int | None = None
    metrics: dict[str, Any] | None = None
    request_spec_decode_stats: dict[str, Any] | None = None
    prompt_token_ids: list[TokenId] | None = None
    error: Any = None
    object: str | None = None
    message: Any = None
    code: Any = None
    detail: Any = None


def read_answer(answer: Answer, choices: Sequence[_Choice] | None, read: Callable[[_Choice], Parts]) -> Frame:
    """Say what an answer means, with what `read` finds in each of its choices; None: it has no such field."""
    if choices is None:
        return _frame_of(answer, None)
    found = []
    mismatch = None
    for wire in choices:
        token_ids, logprobs, text = read(wire)
        if logprobs is not None and len(logprobs) > len(token_ids or ()):
            count = several(len(token_ids or ()), "token")
            mismatch = f"{several(len(logprobs), 'log-prob')} for {count} of choice {wire.index}"
        if wire.prompt_token_ids is not None and answer.prompt_token_ids is None:
            answer.prompt_token_ids = wire.prompt_token_ids
        found.append(_choice_of(wire, token_ids, logprobs, text))
    frame = _frame_of(answer, found)
    frame.length_mismatch = mismatch
    return frame


def _choice_of(
    wire: AnswerChoice, token_ids: list[int] | None, logprobs: list[float | None] | None, text: str | None
) -> ChoiceDelta:
    """Build one choice's delta. A null log-prob becomes NaN.

    More log-probs than tokens cannot be told apart, so then all are missing; fewer belong to the first
    tokens.
    """
    values: list[float] | None = None
    if logprobs is not None:
        if len(logprobs) > len(token_ids or ()):
            values = [math.nan] * len(token_ids or ())
        elif None in logprobs:
            values = [math.nan if value is None else value for value in logprobs]
        else:
            values = logprobs  # type: ignore[assignment]  # no None is in it
    spans = wire.weight_versions
    return ChoiceDelta(
        wire.index,
        token_ids or [],
        values,
        wire.finish_reason,
        wire.stop_reason,
        None if spans is None else [VersionSpan(str(span.version), span.start, span.end) for span in spans],
        wire.routed_experts,
        wire.sampling_mask,
        text,
    )


def _frame_of(answer: Answer, choices: list[ChoiceDelta] | None) -> Frame:
    """Build the frame; `choices` is None where the answer has no such field."""
    frame = Frame(choices or [], answer.usage, request_id=answer.request_id or answer.id)
    if answer.prompt_token_ids is not None:
        frame.prompt_token_ids = answer.prompt_token_ids
    if answer.weight_version is not None:
        frame.weight_version = str(answer.weight_version)
    if answer.metrics is not None:
        figures = answer.metrics.get("speculative_decoding")
        frame.metrics = figures if isinstance(figures, dict) else None
    elif answer.request_spec_decode_stats is not None:
        frame.metrics = answer.request_spec_decode_stats
    if choices is None or answer.error is not None:
        frame.error = error_in(answer.error, answer.object, answer.message, answer.code, answer.detail)
        if choices is None and frame.error is None and frame.usage is None and frame.metrics is None:
            return Frame(undecodable="no choices, usage or error in it")
    return frame
