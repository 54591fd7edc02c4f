"""vime's request to `/inference/v1/generate`."""

from __future__ import annotations

from typing import Any

from rollout_log.trainer.host import Host, Prepared
from rollout_log.trainer.prompt import has_media, put_prompt
from rollout_log.vime.centering import ask_for_heads
from rollout_log.vime.multimodal import render

__all__ = ["VIME", "prepare", "request_params"]

VIME = Host(
    name="vime",
    rollout="rollout.vllm_rollout",
    prefix="vllm",
    span="vllm_generate",
    meta_attrs="build_vllm_meta_trace_attrs",
    speculative="vllm_speculative_config",
    version_path="/weight_info",
)

_SAME = ("temperature", "top_p", "seed", "repetition_penalty")
_FLAGS = ("skip_special_tokens", "spaces_between_special_tokens")


def request_params(sampling_params: dict[str, Any], budget: int | None) -> dict[str, Any]:
    """Map the trainer's sampling parameters to the engine's; `sampling_params` is left alone."""
    given = {name: value for name, value in sampling_params.items() if value is not None}
    params: dict[str, Any] = {"logprobs": 1}
    if budget is not None:
        params["max_tokens"] = budget
    params.update({name: given[name] for name in _SAME if name in given})
    params.update({name: bool(given[name]) for name in _FLAGS if name in given})
    if "min_new_tokens" in given:
        params["min_tokens"] = given["min_new_tokens"]
    if given.get("top_k", 0) > 0 or given.get("top_k") == -1:
        params["top_k"] = given["top_k"]
    if given.get("stop"):
        params["stop"] = given["stop"]
        if given.get("no_stop_trim"):
            params["include_stop_str_in_output"] = True
    if given.get("stop_token_ids"):
        params["stop_token_ids"] = given["stop_token_ids"]
    return params


async def prepare(
    args: Any, sample: Any, sampling_params: dict[str, Any], state: Any, budget: int | None
) -> Prepared:
    """Make the request that goes on from what the sample has."""
    base = VIME.base_url(args)
    put_prompt(VIME, sample, state)
    params = request_params(sampling_params, budget)
    if sample.response_length and "min_tokens" in params:
        params["min_tokens"] = max(params["min_tokens"] - sample.response_length, 0)
    heads = None
    if getattr(args, "use_score_centering", False):
        heads = ask_for_heads(VIME, args, params)
    body: dict[str, Any] = {
        "model": getattr(args, "hf_checkpoint", None),
        "token_ids": list(sample.tokens),  # a copy: the sample grows
        "sampling_params": params,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    headers = {}
    if getattr(args, "router_policy", None) == "consistent_hash" and sample.session_id:
        headers["x-session-id"] = sample.session_id
    if has_media(sample):
        body = {**await render(VIME, args, sample, base, headers), **body}
    return Prepared(f"{base}/inference/v1/generate", body, headers, heads)
