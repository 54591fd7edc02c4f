"""A plain generate function: stream and append, nothing recorded, nothing retried.

It shows that the loop and the engine double agree on clean runs. With a `bug` it makes one of the mistakes
that the checks exist for. Weight
versions come from the field on every frame, so that a cancel loses none.
"""

from __future__ import annotations

import asyncio
import importlib
import json
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

from trainer.truth import decode, expected_logprob, split_prompt

__all__ = ["BUGS", "reference"]

BUGS = {
    "lost token": "the engine said",
    "doubled token": "the engine said",
    "zero log-prob": "belongs to no version",
    "shifted log-probs": "belongs to no version",
    "another version's log-prob": "which the engine never sent there",
    "mask late": "while it was generated: loss_mask has",
    "log-probs late": "while it was generated: rollout_log_probs has",
    "tokens late": "while it was generated",
    "text of pieces": "its tokens say",
    "no version": "weight_versions is []",
    "always completed": "without an end",
    "truncated by an abort": "truncated at",
    "aborted at the end": "aborted, though its last token is EOS",
    "failed and trained": "it would be trained",
    "left pending": "came back pending",
    "old mask forgotten": "loss_mask is",
    "whole budget again": "max_tokens",
    "parameters changed": "sampling_params were changed",
    "another object": "another object came back",
    "span left open": "spans never closed",
    "stream left open": "still runs",
}
"""A mistake, and what the rig has to say about it."""


def reference(
    root: str = "vime", *, abort_mode: str | None = "request", bug: str = ""
) -> Callable[..., Awaitable[Any]]:
    """A function for `TrainerDouble(generate=…)`. The root "slime" speaks SGLang."""

    async def generate(args: Any, sample: Any, sampling_params: dict[str, Any]) -> Any:
        call = _stream(root, args, sample, sampling_params, bug)
        if bug != "stream left open":
            await call
        else:
            await asyncio.shield(asyncio.ensure_future(call))
        if bug == "parameters changed":
            sampling_params["max_new_tokens"] -= 1
        return replace(sample) if bug == "another object" else sample

    if abort_mode is not None:
        generate.abort_mode = abort_mode  # type: ignore[attr-defined]
    return generate


async def _stream(root: str, args: Any, sample: Any, params: dict[str, Any], bug: str) -> None:
    engine = "sglang" if root == "slime" else "vllm"
    state = importlib.import_module(f"{root}.rollout.{engine}_rollout").GenerateState(args)
    client = importlib.import_module(f"{root}.utils.http_utils")._http_client
    sample.tokens = sample.tokens or state.tokenizer.encode(sample.prompt, add_special_tokens=False)
    left = params["max_new_tokens"] - (0 if bug == "whole budget again" else sample.response_length)
    if left == 0:
        sample.status = sample.Status.TRUNCATED
        return
    if bug == "old mask forgotten":
        sample.loss_mask = [1] * sample.response_length
    host, port = getattr(args, f"{engine}_router_ip"), getattr(args, f"{engine}_router_port")
    path, body = _request(engine, sample.tokens, left, params)
    cancelled = None
    versions: list[str] = []
    with _trace_span(root)(sample, f"{engine}_generate"):
        try:
            async with client.stream("POST", f"http://{host}:{port}{path}", json=body) as response:
                response.raise_for_status()
                if state.aborted:  # on Python 3.10 a cancel during httpx's connect is lost
                    sample.status = sample.Status.ABORTED
                else:
                    await _consume(response, engine, sample, versions, bug)
        except asyncio.CancelledError as error:  # the real span would stay open
            if bug == "span left open":
                raise
            cancelled = error
    response_tokens = split_prompt(sample.tokens)[1]
    if bug != "text of pieces":
        sample.response = decode(response_tokens)
    if bug != "no version":
        sample.weight_versions += versions
    if cancelled is not None:
        raise cancelled


def _trace_span(root: str) -> Callable[..., Any]:
    for place in ("observability", "utils"):
        try:
            return importlib.import_module(f"{root}.{place}.trace_utils").trace_span  # type: ignore[no-any-return]
        except ImportError:
            continue
    raise ImportError(f"{root} has no trace_utils")


def _request(engine: str, tokens: list[int], left: int, params: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    if engine == "sglang":
        sampling = {**params, "max_new_tokens": left}
        return "/generate", {
            "input_ids": tokens,
            "sampling_params": sampling,
            "return_logprob": True,
            "stream": True,
        }
    sampling = {"max_tokens": left, "temperature": params["temperature"], "logprobs": 1}
    return "/inference/v1/generate", {
        "model": "tiny",
        "token_ids": tokens,
        "sampling_params": sampling,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


async def _consume(response: Any, engine: str, sample: Any, versions: list[str], bug: str) -> None:
    so_far, frames = 0, 0
    async for line in response.aiter_lines():
        if not line.startswith("data: {"):
            continue
        frame = json.loads(line.removeprefix("data: "))
        if frame.get("choices") == []:
            sample.prefix_cache_info.add(frame["usage"])
            continue
        tokens, logprobs, finish, version = _read(engine, frame, so_far)
        so_far += len(tokens)
        if tokens and version not in versions[-1:]:
            versions.append(version)
        if tokens:
            tokens, logprobs = _spoil(bug, frames, sample, tokens, logprobs)
            await _append(sample, tokens, logprobs, bug)
            frames += 1
        if finish is not None and bug != "left pending":
            sample.status = _status(sample.Status, finish, bug)


def _read(engine: str, frame: dict[str, Any], so_far: int) -> tuple[list[int], list[float], str | None, str]:
    if engine == "sglang":
        meta = frame["meta_info"]
        new = meta["completion_tokens"] - so_far
        pairs = meta["output_token_logprobs"][len(meta["output_token_logprobs"]) - new :]
        finish = (meta["finish_reason"] or {}).get("type")
        return (
            [token for _, token, _ in pairs],
            [each for each, _, _ in pairs],
            finish,
            meta["weight_version"],
        )
    choice = frame["choices"][0]
    logprobs = [entry["logprob"] for entry in choice["logprobs"]["content"]]
    return choice["token_ids"], logprobs, choice["finish_reason"], frame["weight_version"]


async def _append(sample: Any, tokens: list[int], logprobs: list[float], bug: str) -> None:
    mask = sample.loss_mask if sample.loss_mask is not None else [1] * sample.response_length
    later: dict[str, Any] = {
        "tokens": sample.tokens + tokens,
        "response_length": sample.response_length + len(tokens),
        "rollout_log_probs": (sample.rollout_log_probs or []) + logprobs,
        "loss_mask": mask + [1] * len(tokens),
    }
    late = {"mask late": "loss_mask", "log-probs late": "rollout_log_probs", "tokens late": "tokens"}.get(bug)
    if late is not None:
        sample.loss_mask = mask
        held = later.pop(late)
        vars(sample).update(later)
        await asyncio.sleep(0)
        later = {late: held}
    vars(sample).update(later)
    if bug == "text of pieces":
        sample.response += decode(tokens)


def _spoil(
    bug: str, frames: int, sample: Any, tokens: list[int], logprobs: list[float]
) -> tuple[list[int], list[float]]:
    match bug:
        case "lost token" if frames == 1:
            return tokens[1:], logprobs[1:]
        case "doubled token" if frames == 1:
            return [tokens[0], *tokens], [logprobs[0], *logprobs]
        case "zero log-prob" if frames == 1:
            return tokens, [0.0, *logprobs[1:]]
        case "shifted log-probs":
            return tokens, [*logprobs[1:], logprobs[0]]
        case "another version's log-prob":
            prompt = split_prompt(sample.tokens)[0]
            return tokens, [expected_logprob(prompt, sample.response_length, "1"), *logprobs[1:]]
    return tokens, logprobs


def _status(statuses: Any, finish: str, bug: str) -> Any:
    match bug:
        case "always completed":
            return statuses.COMPLETED
        case "truncated by an abort" if finish == "abort":
            return statuses.TRUNCATED
        case "aborted at the end":
            return statuses.ABORTED
        case "failed and trained":
            return statuses.FAILED
    return {"length": statuses.TRUNCATED, "abort": statuses.ABORTED}.get(finish, statuses.COMPLETED)
