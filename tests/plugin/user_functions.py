"""Generate functions as users write them: nothing of them knows that they are recorded."""

from __future__ import annotations

import asyncio
import importlib
from typing import Any

from trainer.truth import TOOL

ANSWER_LENGTH = 6
TOOL_OUTPUT = [TOOL + 1, TOOL + 2, TOOL + 3]


async def _ask(args: Any, sample: Any, sampling_params: dict[str, Any], budget: int) -> list[int]:
    """One turn, not streamed, through the trainer's own helper."""
    http = importlib.import_module("vime.utils.http_utils")
    url = f"http://{args.vllm_router_ip}:{args.vllm_router_port}/inference/v1/generate"
    params = {"max_tokens": budget, "temperature": sampling_params["temperature"], "logprobs": 1}
    body = {"model": "tiny", "token_ids": list(sample.tokens), "sampling_params": params}
    choice = (await http.post(url, body))["choices"][0]
    logprobs = [entry["logprob"] for entry in choice["logprobs"]["content"]]
    sample.append_response_tokens(args, tokens=choice["token_ids"], log_probs=logprobs)
    return choice["token_ids"]  # type: ignore[no-any-return]


async def two_turns(args: Any, sample: Any, sampling_params: dict[str, Any]) -> Any:
    """Ask, run a tool, ask again."""
    sample.tokens = args.tokenizer.encode(sample.prompt)
    await _ask(args, sample, sampling_params, ANSWER_LENGTH)
    sample.append_response_tokens(args, tokens=TOOL_OUTPUT, trainable=False)
    await _ask(args, sample, sampling_params, ANSWER_LENGTH)
    sample.status = sample.Status.COMPLETED
    return sample


two_turns.abort_mode = "request"  # type: ignore[attr-defined]


async def fan_out(args: Any, sample: Any, sampling_params: dict[str, Any], evaluation: bool = False) -> Any:
    """Two answers at once."""
    samples = [sample, type(sample)(index=sample.index, prompt=sample.prompt, rollout_id=1)]
    for each in samples:
        each.tokens = args.tokenizer.encode(each.prompt)
    await asyncio.gather(*(_ask(args, each, sampling_params, n + 5) for n, each in enumerate(samples)))
    for each in samples:
        each.status = sample.Status.COMPLETED
    return samples


async def with_a_judge(args: Any, sample: Any, sampling_params: dict[str, Any]) -> Any:
    """Ask, and let another model on another path have a say."""
    http = importlib.import_module("vime.utils.http_utils")
    sample.tokens = args.tokenizer.encode(sample.prompt)
    await _ask(args, sample, sampling_params, ANSWER_LENGTH)
    url = f"http://{args.vllm_router_ip}:{args.vllm_router_port}"
    await http.get(f"{url}/health")
    await http.post(f"{url}/v1/chat/completions/render", {"messages": [{"role": "user", "content": []}]})
    sample.status = sample.Status.COMPLETED
    return sample


async def by_itself(args: Any, sample: Any, sampling_params: dict[str, Any]) -> Any:
    """With a client of its own, which nobody sees."""
    sample.tokens = [5, 6]
    sample.append_response_tokens(args, tokens=[6], log_probs=[-1.0])
    sample.status = sample.Status.COMPLETED
    return sample


class NotAFunction:
    """What a path may name by mistake."""
