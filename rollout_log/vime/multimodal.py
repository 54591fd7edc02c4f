"""Prompts with images: tokenized by the trainer's own code, rendered by the engine.

Which helpers vime has differs between its versions; they are looked up when the first such sample comes,
and a version without them is refused with a clear error.
"""

from __future__ import annotations

import inspect
from typing import Any

from rollout_log.errors import RolloutLogError
from rollout_log.trainer.host import Host

__all__ = ["prompt_ids", "render"]


def prompt_ids(sample: Any, state: Any) -> list[int]:
    """Return the prompt's token ids; sets `multimodal_train_inputs` where the processor makes some."""
    processor = getattr(state, "processor", None)
    inputs = getattr(sample, "multimodal_inputs", None)
    if processor is not None and inputs:
        output = processor(text=sample.prompt, **inputs)
        sample.multimodal_train_inputs = {
            name: value for name, value in output.items() if name not in ("input_ids", "attention_mask")
        } or None
        return [int(token) for token in output["input_ids"][0]]
    tokenizer = getattr(state, "tokenizer", None)
    if tokenizer is None:
        raise RolloutLogError("the trainer's state has no tokenizer, and the sample no tokens")
    if not isinstance(sample.prompt, str):
        return [int(t) for t in tokenizer.apply_chat_template(sample.prompt, add_generation_prompt=True)]
    return list(tokenizer.encode(sample.prompt, add_special_tokens=False))


async def render(host: Host, args: Any, sample: Any, base_url: str) -> dict[str, Any]:
    """Let the engine render prompt and images; returns the fields that a generate request needs."""
    rollout = host.module(host.rollout)
    processing = host.module("utils.processing_utils")
    http_utils = host.module("utils.http_utils")
    build = getattr(processing, "build_multimodal_messages", None)
    to_body = getattr(rollout, "_mm_render_response_to_generate_body", None)
    align = getattr(rollout, "_align_mm_feature_placeholders_to_tokens", None)
    if build is None or to_body is None or http_utils is None:
        raise RolloutLogError(
            f"this version of {host.name} cannot render multimodal prompts for rollout-log: "
            "remove multimodal inputs, or use its own generate function for them"
        )
    messages = build(sample.prompt, sample.multimodal_inputs)
    prime = getattr(rollout, "prime_encoder", None)
    if prime is not None and getattr(args, "vllm_model_encoder_endpoints", None):
        await _maybe(prime(args, messages))
    model = getattr(args, "hf_checkpoint", None)
    rendered = await http_utils.post(
        f"{base_url}/v1/chat/completions/render", {"model": model, "messages": messages}
    )
    body: dict[str, Any] = to_body(rendered, model)
    if align is not None:
        align(body, sample.tokens)
    return body


async def _maybe(value: Any) -> Any:
    return await value if inspect.isawaitable(value) else value
