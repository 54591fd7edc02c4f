"""slime's request to SGLang's `/generate`."""

from __future__ import annotations

from typing import Any

from rollout_log.trainer.host import Host, Prepared
from rollout_log.vime.multimodal import prompt_ids

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
    if not sample.tokens:
        sample.tokens = prompt_ids(sample, state)
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
    headers = {}
    if getattr(args, "router_policy", None) == "consistent_hashing" and sample.session_id:
        headers["X-SMG-Routing-Key"] = sample.session_id
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
    return Prepared(url=url, body=body, headers=headers)


def _encoded(host: Host, images: Any) -> list[Any]:
    processing = host.module("utils.processing_utils")
    encode = getattr(processing, "encode_image_for_rollout_engine", None)
    return [encode(image) if encode is not None else image for image in images]
