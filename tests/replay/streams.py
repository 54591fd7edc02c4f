"""Small streams to record: an engine's frames, made up token by token."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from replay.memory import MemoryLog, record
from rollout_log.events import End
from rollout_log.record.samples import Samples

VLLM = "/inference/v1/generate"
SGLANG = "/generate"
DONE = b"data: [DONE]\n\n"


def body(token_ids: Sequence[int], max_tokens: int = 8, **params: Any) -> dict[str, Any]:
    """A request to vLLM's endpoint."""
    return {
        "model": "tiny",
        "token_ids": list(token_ids),
        "sampling_params": {"max_tokens": max_tokens, "logprobs": 1, **params},
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def frame(
    tokens: Sequence[int],
    finish: str | None = None,
    *,
    spans: list[tuple[str, int, int]] | None = None,
    name: str = "generate-tokens-1",
) -> bytes:
    content = [{"token_id": token, "logprob": -token / 100} for token in tokens]
    versions = [{"version": v, "start": s, "end": e} for v, s, e in spans] if spans else None
    choice = {
        "index": 0,
        "finish_reason": finish,
        "stop_reason": None,
        "token_ids": list(tokens),
        "routed_experts": None,
        "sampling_mask": None,
        "weight_versions": versions,
        "logprobs": {"content": content},
    }
    return sse({"request_id": name, "usage": None, "output_mode": "tokens", "choices": [choice]})


def usage(prompt: int, completion: int, name: str = "generate-tokens-1") -> bytes:
    figures = {"prompt_tokens": prompt, "total_tokens": prompt + completion, "completion_tokens": completion}
    figures["prompt_tokens_details"] = {"cached_tokens": 0}  # type: ignore[assignment]
    return sse({"request_id": name, "usage": figures, "output_mode": "tokens", "choices": []})


def sse(value: Any) -> bytes:
    return b"data: " + json.dumps(value, separators=(",", ":")).encode() + b"\n\n"


def frames_of(stream: bytes) -> list[dict[str, Any]]:
    """The JSON of a stream's frames, without `[DONE]`."""
    blocks = [block[6:] for block in stream.split(b"\n\n") if block]
    return [json.loads(block) for block in blocks if block != b"[DONE]"]


def tokens_of(stream: bytes) -> list[int]:
    return [
        token for each in frames_of(stream) for choice in each["choices"] for token in choice["token_ids"]
    ]


def whole(tokens: Sequence[int], prompt: int = 3, *, name: str = "generate-tokens-1") -> list[bytes]:
    """A stream that finishes, one token a frame."""
    *most, last = tokens
    end = frame([last], "length", spans=[("v1", 0, len(tokens))], name=name)
    return [*(frame([each], name=name) for each in most), end, usage(prompt, len(tokens), name), DONE]


def aborted(tokens: Sequence[int], prompt: int = 3, *, name: str = "generate-tokens-1") -> list[bytes]:
    """A stream that the engine was told to abort."""
    end = frame([], "abort", spans=[("v1", 0, len(tokens))], name=name)
    return [*(frame([each], name=name) for each in tokens), end, usage(prompt, len(tokens), name), DONE]


def sample(
    log: MemoryLog,
    key: str,
    prompt: Sequence[int],
    tokens: Sequence[int],
    *,
    samples: Samples | None = None,
    chunks: list[bytes] | None = None,
    end: End = "eof",
    detail: str | None = None,
    max_tokens: int | None = None,
    **params: Any,
) -> Samples:
    """Record one request of a sample."""
    name = f"generate-tokens-{key}"
    request = body(prompt, len(tokens) if max_tokens is None else max_tokens, **params)
    chunks = whole(tokens, len(prompt), name=name) if chunks is None else chunks
    return record(
        log, key, VLLM, json.dumps(request).encode(), chunks, samples=samples, end=end, detail=detail
    )
