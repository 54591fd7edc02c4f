"""slime's request to SGLang's `/generate`."""

from __future__ import annotations

from typing import Any

from rollout_log.trainer.host import Host, Prepared
from rollout_log.trainer.prompt import put_prompt

__all__ = ["SLIME", "prepare"]

SLIME = Host(
    name="slime",
    rollout="rollout.sglang_rollout",
    prefix="sglang",
    span="sglang_generate",
    meta_attrs="build_sglang_meta_trace_attrs",
    speculative="sglang_speculative_algorithm",
)


async def prepare(
    args: Any, sample: Any, sampling_params: dict[str, Any], state: Any, budget: int | None
) -> Prepared:
    """Make the request that goes on from what the sample has."""
    base = SLIME.base_url(args)
    put_prompt(SLIME, sample, state)
    params = dict(sampling_params)
    if budget is not None:
        params["max_new_tokens"] = budget
    if sample.response_length and params.get("min_new_tokens"):
        params["min_new_tokens"] = max(params["min_new_tokens"] - sample.response_length, 0)
    body: dict[str, Any] = {
        "input_ids": list(sample.tokens),  # a copy: the sample grows
        "sampling_params": params,
        "return_logprob": True,
        "stream": True,
    }
    if getattr(args, "use_rollout_routing_replay", False):
        body["return_routed_experts"] = True
    if images := (getattr(sample, "multimodal_inputs", None) or {}).get("images"):
        body["image_data"] = _encoded(SLIME, images)
        if not sample.response_length:  # SGLang's own processor puts the images where the text has them
            body["text"] = sample.prompt
            del body["input_ids"]
    headers = {}
    if getattr(args, "router_policy", None) == "consistent_hashing" and sample.session_id:
        headers["X-SMG-Routing-Key"] = sample.session_id
    return Prepared(url=f"{base}/generate", body=body, headers=headers)


def _encoded(host: Host, images: Any) -> list[Any]:
    processing = host.module("utils.processing_utils")
    encode = getattr(processing, "encode_image_for_rollout_engine", None)
    return [encode(image) if encode is not None else image for image in images]
