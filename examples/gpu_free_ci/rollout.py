"""A generate function for vime: `--custom-generate-function-path rollout.generate`."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx

TRIES = 3
ENDS = {"stop": "COMPLETED", "length": "TRUNCATED", "abort": "ABORTED"}


async def generate(args: Any, sample: Any, sampling_params: dict[str, Any]) -> Any:
    """Generate a response, going on from the tokens that the sample has already.

    A connection that is lost is tried again. On a cancel the sample keeps what came, and is ABORTED.
    """
    if sample.loss_mask is None:
        sample.loss_mask, sample.rollout_log_probs = [], []
    url = f"http://{args.vllm_router_ip}:{args.vllm_router_port}/inference/v1/generate"
    async with httpx.AsyncClient(timeout=None, trust_env=False) as client:
        for _ in range(TRIES):
            try:
                await _stream(client, url, args, sample, sampling_params)
            except httpx.TransportError:
                continue
            except asyncio.CancelledError:
                sample.status = sample.Status.ABORTED
                raise
            return sample
    sample.status = sample.Status.FAILED
    sample.remove_sample = True
    return sample


generate.abort_mode = "request"  # type: ignore[attr-defined]  # vime cancels the task, not the engine


async def _stream(
    client: httpx.AsyncClient, url: str, args: Any, sample: Any, sampling_params: dict[str, Any]
) -> None:
    """Make one request, and take its tokens in as they come."""
    params = {name: value for name, value in sampling_params.items() if name != "max_new_tokens"}
    params |= {"max_tokens": sampling_params["max_new_tokens"] - sample.response_length, "logprobs": 1}
    body = {
        "model": args.hf_checkpoint,
        "token_ids": sample.tokens,
        "sampling_params": params,
        "stream": True,
    }
    headers = {"x-session-id": sample.session_id} if sample.session_id else None
    async with client.stream("POST", url, json=body, headers=headers) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                for choice in json.loads(line.removeprefix("data: "))["choices"]:
                    _take(sample, choice)


def _take(sample: Any, choice: dict[str, Any]) -> None:
    ids = choice["token_ids"]
    sample.tokens += ids
    sample.loss_mask += [1] * len(ids)
    sample.rollout_log_probs += [each["logprob"] for each in choice["logprobs"]["content"]]
    sample.response_length += len(ids)
    if choice["finish_reason"] is not None:
        sample.status = sample.Status[ENDS[choice["finish_reason"]]]
