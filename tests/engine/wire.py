"""What a test says to the engine and hears from it, without any of the package's own code.

Written by hand on purpose: it shows what the engine does today, and the package is compared with it.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import httpx

__all__ = [
    "GENERATE",
    "GREEDY",
    "PROMPT",
    "SAMPLED",
    "Answer",
    "ask",
    "ask_all",
    "body",
    "frames",
    "mixture",
    "read",
    "stream",
]

GENERATE = "/inference/v1/generate"
PROMPT = [8183, 525, 362, 1449, 198, 1560, 3384, 341, 945, 559, 26, 705, 707, 1247, 452, 329, 800, 855, 452]
"""`<|im_start|>user …`, 19 tokens."""

JSON = dict[str, Any]

SAMPLED: JSON = {"temperature": 1.0, "ignore_eos": True}
GREEDY: JSON = {"temperature": 0.0, "ignore_eos": True}
_KINDS: list[JSON] = [
    SAMPLED | {"max_tokens": 64},
    SAMPLED | {"max_tokens": 1},
    SAMPLED | {"max_tokens": 64, "logprobs": 5},
    SAMPLED | {"max_tokens": 64, "stream_interval": 8},
    SAMPLED | {"max_tokens": 32, "n": 2},
    GREEDY | {"max_tokens": 64},
    {"max_tokens": 300, "temperature": 1.0},
    {"max_tokens": 300, "temperature": 1.0, "stop_token_ids": [198]},
]


@dataclass
class Answer:
    """One choice of an answer, streamed or not."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    def add(self, choice: JSON) -> None:
        """Append what a choice of a frame, or of a whole answer, carries."""
        self.token_ids += choice["token_ids"]
        content = (choice["logprobs"] or {}).get("content") or []
        self.logprobs += [entry["logprob"] for entry in content]
        if choice["finish_reason"] is not None:
            self.finish_reason, self.stop_reason = choice["finish_reason"], choice["stop_reason"]


def body(*, prompt: list[int] = PROMPT, stream: bool = True, **sampling: Any) -> JSON:
    """Return a request; `logprobs` is 1 unless told."""
    params = {"logprobs": 1, **sampling}
    return {
        "model": "tiny",
        "token_ids": prompt,
        "sampling_params": params,
        "stream": stream,
        **({"stream_options": {"include_usage": True}} if stream else {}),
    }


def mixture(count: int) -> dict[str, JSON]:
    """Return requests of every kind, by key; prompts and seeds differ."""
    return {
        f"s{number}": body(prompt=PROMPT[: 3 + number % 16], seed=number, **_KINDS[number % len(_KINDS)])
        for number in range(count)
    }


def frames(response: httpx.Response) -> Iterator[JSON]:
    """Yield the frames of a stream; ends after `[DONE]`, which must be last."""
    rest = b""
    done = False
    for chunk in response.iter_raw():
        *whole, rest = (rest + chunk).split(b"\n\n")
        for frame in whole:
            assert frame.startswith(b"data: "), frame
            assert not done, frame
            if frame == b"data: [DONE]":
                done = True
            else:
                yield json.loads(frame[len(b"data: ") :])
    assert rest == b""
    assert done


def read(all_frames: Iterator[JSON] | list[JSON]) -> dict[int, Answer]:
    """Add frames up, by the index of the choice."""
    answers: dict[int, Answer] = defaultdict(Answer)
    for frame in all_frames:
        for choice in frame["choices"]:
            answers[choice["index"]].add(choice)
    return dict(answers)


def stream(http: httpx.Client, url: str, request: JSON) -> list[JSON]:
    """Return all frames of a streamed request."""
    with http.stream("POST", url + GENERATE, json=request) as response:
        assert response.status_code == 200
        return list(frames(response))


def ask(http: httpx.Client, url: str, request: JSON) -> dict[int, Answer]:
    """Return the answer to the same request, not streamed."""
    plain = {name: value for name, value in request.items() if name != "stream_options"} | {"stream": False}
    response = http.post(url + GENERATE, json=plain)
    assert response.status_code == 200, response.text
    return read([response.json()])


def ask_all(url: str, requests: list[JSON]) -> list[dict[int, Answer]]:
    """Return the answers to many requests, not streamed, asked all at once."""
    with (
        httpx.Client(timeout=300.0, limits=httpx.Limits(), trust_env=False) as http,
        ThreadPoolExecutor(len(requests)) as pool,
    ):
        return list(pool.map(lambda request: ask(http, url, request), requests))
