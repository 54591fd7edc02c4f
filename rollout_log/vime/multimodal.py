"""Prompts with images, sound or video: rendered by the engine, with the trainer's own helpers.

Which helpers vime has differs between its versions; they are looked up when the first such sample comes,
and a version without them is refused with a clear error.
"""

from __future__ import annotations

from typing import Any

from rollout_log.errors import RolloutLogError
from rollout_log.trainer.host import Host, Unsupported

__all__ = ["render"]


async def render(
    host: Host, args: Any, sample: Any, base_url: str, headers: dict[str, str]
) -> dict[str, Any]:
    """Let the engine render the prompt; returns what a generate request needs beside ids and parameters.

    The engine's placeholders are moved to where the sample's own ids have them. Empty where there is
    nothing but text.
    """
    messages = _messages(host, sample)
    if not messages:
        return {}
    rollout = host.module(host.rollout)
    prime = getattr(rollout, "prime_encoder", None)
    if getattr(args, "vllm_model_encoder_endpoints", None):
        if prime is None:
            raise Unsupported("encoders apart from the engine", "this vime has no prime_encoder; update it")
        await prime(args, messages)
    to_body = _helper(host, rollout, "_mm_render_response_to_generate_body")
    align = _helper(host, rollout, "_align_mm_feature_placeholders_to_tokens")
    post = _helper(host, host.module("utils.http_utils"), "post")
    model = getattr(args, "hf_checkpoint", None)
    payload = {"model": model, "messages": messages}
    rendered = await post(f"{base_url}/v1/chat/completions/render", payload, headers=headers or None)
    try:
        body: dict[str, Any] = to_body(rendered, model)
        align(body, list(sample.tokens))
    except ValueError as error:
        message = f"sample {sample.index}: the engine's rendering does not fit the prompt's tokens: {error}"
        raise RolloutLogError(message) from error
    return body


def _messages(host: Host, sample: Any) -> list[dict[str, Any]] | None:
    processing = host.module("utils.processing_utils")
    inputs = {name: value for name, value in sample.multimodal_inputs.items() if value is not None}
    build = getattr(processing, "build_multimodal_messages", None)
    if build is not None:
        return build(sample.prompt, inputs)  # type: ignore[no-any-return]
    images = inputs.pop("images", None)
    if any(inputs.values()):
        raise Unsupported(f"multimodal inputs of kind {sorted(inputs)}", "this vime renders images only")
    if not images:
        return None
    encode = _helper(host, processing, "encode_image_for_rollout_engine")
    parts = [{"type": "image_url", "image_url": {"url": encode(image)}} for image in images]
    return [{"role": "user", "content": [{"type": "text", "text": sample.prompt}, *parts]}]


def _helper(host: Host, module: Any, name: str) -> Any:
    found = getattr(module, name, None)
    if found is None:
        remedy = f"this {host.name} has no {name}; use its own generate function for them"
        raise Unsupported("multimodal prompts", remedy)
    return found
