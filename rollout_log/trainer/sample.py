"""How a rollout grows into the trainer's sample: in place, and even at every await."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from rollout_log.fold import Rollout
from rollout_log.request import Request
from rollout_log.trainer.arrays import int32, routed_experts
from rollout_log.trainer.host import Heads

__all__ = ["SampleWriter", "speculation"]


class SampleWriter:
    """Writes what one call generates into the sample it was given.

    The trainer keeps the very object when it cancels the task, and looks at it between any two awaits:
    `tokens`, `loss_mask`, `rollout_log_probs` and the top-p offsets always fit `response_length`.
    """

    def __init__(self, sample: Any, *, masks_offpolicy: bool = False) -> None:
        self.sample = sample
        self.start = sample.response_length
        """Response tokens the sample had before this call."""
        self.rollout: Rollout | None = None
        self.first: int | None = None
        """Number of this call's first request."""
        self._request: int | None = None
        self.heads: Heads | None = None
        self._masks_offpolicy = masks_offpolicy
        # Own lists, so that extending them in place changes no sibling's.
        sample.tokens = list(sample.tokens or ())
        old = [math.nan] * self.start if sample.rollout_log_probs is None else sample.rollout_log_probs
        sample.rollout_log_probs = list(old)
        sample.loss_mask = [1] * self.start if sample.loss_mask is None else list(sample.loss_mask)

    @property
    def requests(self) -> list[Request]:
        """The requests of this call."""
        if self.rollout is None or self.first is None:
            return []
        return [request for request in self.rollout.requests if request.number >= self.first]

    def update(self, rollout: Rollout) -> None:
        """Take over what came since the last call; nothing is awaited."""
        request = rollout.requests[-1]
        if request.number != self._request:
            self._begin(rollout, request)
        sample, choice = self.sample, rollout.choice()
        have = sample.response_length
        new = choice.token_ids[have:]
        if not new:
            return
        sample.tokens += new
        sample.rollout_log_probs += choice.logprobs[have:]
        sample.loss_mask += [1] * len(new)
        if choice.sampling_mask or sample_has_top_p(sample):
            self._extend_top_p(choice.sampling_mask[have:], len(new), have)
        sample.response_length = have + len(new)
        if self.heads is not None:
            self.heads.extend(sample, len(new), self.start)

    def _begin(self, rollout: Rollout, request: Request) -> None:
        """A request begins; one that starts again throws away what came before."""
        if self._request is None:
            self.first = request.number
        self._request = request.number
        self.rollout = rollout
        base, sample = max(request.base, self.start), self.sample
        gone = sample.response_length - base
        if self.heads is not None:
            self.heads.begin(sample, base, self.start)
        if gone > 0:
            for values in (sample.tokens, sample.rollout_log_probs, sample.loss_mask):
                del values[len(values) - gone :]
            if sample_has_top_p(sample):
                offsets = sample.rollout_top_p_token_offsets
                del sample.rollout_top_p_token_ids[offsets[base] :]
                del offsets[base + 1 :]
            sample.response_length = base
        if self._masks_offpolicy and request.weight_version is not None:
            self._mask_older(rollout, request.weight_version, base)

    def _mask_older(self, rollout: Rollout, version: str, base: int) -> None:
        for span in rollout.choice().weight_versions(rollout.dispatched):
            start, end = max(span.start, self.start), min(span.end, base)
            if span.version != version and start < end:
                self.sample.loss_mask[start:end] = [0] * (end - start)

    def _extend_top_p(self, masks: list[list[int] | None], count: int, have: int) -> None:
        sample = self.sample
        if not isinstance(sample.rollout_top_p_token_offsets, list):
            offsets, ids = sample.rollout_top_p_token_offsets, sample.rollout_top_p_token_ids
            sample.rollout_top_p_token_offsets = (
                [0] * (have + 1) if offsets is None else [int(x) for x in offsets]
            )
            sample.rollout_top_p_token_ids = [] if ids is None else [int(x) for x in ids]
        ids, offsets = sample.rollout_top_p_token_ids, sample.rollout_top_p_token_offsets
        for mask in [*masks, *[None] * (count - len(masks))]:
            if mask:
                ids += mask
            offsets.append(len(ids))

    # The end

    def missing_logprobs(self) -> list[int]:
        """Return the positions of this call's tokens whose log-prob is missing."""
        logprobs = self.sample.rollout_log_probs
        return [i for i in range(self.start, len(logprobs)) if math.isnan(logprobs[i])]

    def take_routed_experts(self, layers: int, top_k: int) -> bool:
        """Take over the engine's routing of all tokens; False where this call brought none.

        Raises `RolloutLogError` where it does not fit the tokens.
        """
        choice = self.rollout.choice() if self.rollout is not None else None
        if choice is None or choice.routed_experts is None:
            return False
        sample = self.sample
        sample.rollout_routed_experts = routed_experts(
            choice.routed_experts,
            len(sample.tokens) - 1,
            layers,
            top_k,
            before=sample.rollout_routed_experts,
            start=choice.routed_experts_start,
        )
        choice.routed_experts = None  # as large as all the rest, and nobody asks the fold for it again
        return True

    def finish(self, decode: Callable[[list[int]], str] | None, *, speculative: bool = False) -> None:
        """Write what is known only at the end: text, weight versions, usage and speculative decoding."""
        sample, rollout = self.sample, self.rollout
        length = sample.response_length
        if decode is not None:
            sample.response = decode(sample.tokens[len(sample.tokens) - length :]) if length else ""
        if rollout is None:
            return
        choice = rollout.choice()
        if decode is None and choice.wire_text and length == len(choice.token_ids):
            sample.response = "".join(choice.wire_text)
        told = [span.version for span in choice.weight_versions(rollout.dispatched) if span.end > self.start]
        sample.weight_versions = [*(sample.weight_versions or ()), *told]
        for request in self.requests:
            if request.usage is not None:
                sample.prefix_cache_info.add(_prefix_cache(request.usage))
            if speculative and request.metrics is not None:
                sample.spec_info.add(speculation(request.metrics, request.tokens))
        if isinstance(sample.rollout_top_p_token_offsets, list):
            sample.rollout_top_p_token_ids = int32(sample.rollout_top_p_token_ids)
            sample.rollout_top_p_token_offsets = int32(sample.rollout_top_p_token_offsets)


def sample_has_top_p(sample: Any) -> bool:
    """Whether a sample carries top-p sets; older trainers have no such fields."""
    return getattr(sample, "rollout_top_p_token_offsets", None) is not None


def speculation(metrics: dict[str, Any], completion_tokens: int) -> dict[str, Any]:
    """Return an engine's speculative decoding figures under the names that `Sample.spec_info.add` reads."""

    def first(*names: str) -> float:
        return next((_number(metrics[name]) for name in names if metrics.get(name) is not None), 0)

    return {
        "spec_accept_token_num": first(
            "num_accepted_draft_tokens", "num_accepted_tokens", "spec_accept_token_num"
        ),
        "spec_draft_token_num": first("num_draft_tokens", "spec_draft_token_num"),
        "spec_verify_ct": first("num_spec_steps", "num_verify_steps", "spec_verify_ct"),
        "completion_tokens": completion_tokens,
    }


def _prefix_cache(usage: dict[str, Any]) -> dict[str, float]:
    details = usage.get("prompt_tokens_details")
    cached = details.get("cached_tokens") if isinstance(details, dict) else usage.get("cached_tokens")
    return {"cached_tokens": _number(cached), "prompt_tokens": _number(usage.get("prompt_tokens"))}


def _number(figure: Any) -> float:
    """Return a figure of the engine's, 0 for what is none: the trainer adds them up."""
    return figure if isinstance(figure, (int, float)) else 0
