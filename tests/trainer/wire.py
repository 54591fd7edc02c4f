"""How a stand-in engine writes: frames of two dialects, and the reads they arrive in."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Iterable
from itertools import groupby
from typing import Any, Protocol

from rollout_log.http_server import Responder
from trainer.faults import Delivery
from trainer.served import Served
from trainer.truth import EOS, decode, expected_logprob

__all__ = ["Encoder", "SglangEncoder", "VllmEncoder", "Wire"]

Piece = tuple[list[int], "str | None", Any]


class Wire:
    """Sends SSE frames in the chunks that a `Delivery` asks for."""

    def __init__(self, responder: Responder, delivery: Delivery) -> None:
        self.responder = responder
        self._delivery = delivery
        self._held: list[bytes] = []
        self._random = random.Random(delivery.split)

    async def frame(self, data: str | dict[str, Any]) -> None:
        text = data if isinstance(data, str) else json.dumps(data, separators=(",", ":"))
        self._held.append(f"data: {text}\n\n".encode())
        if len(self._held) >= self._delivery.coalesce:
            await self.flush()

    async def flush(self) -> None:
        held, self._held = b"".join(self._held), []
        for piece in self._cut(held):
            self.responder.send(piece)
            await self.responder.drain()
            await asyncio.sleep(0)

    def _cut(self, held: bytes) -> list[bytes]:
        if self._delivery.drip:
            return [held[at : at + 1] for at in range(len(held))]
        if self._delivery.split is None or len(held) < 2:
            return [held]
        places = sorted(
            self._random.sample(range(1, len(held)), min(len(held) - 1, self._random.randint(1, 4)))
        )
        return [held[start:end] for start, end in zip([0, *places], [*places, len(held)], strict=True)]


class Encoder(Protocol):
    """One response's frames in one dialect."""

    def frame(self, tokens: list[int], finish: str | None, stop: Any) -> dict[str, Any]: ...

    def error(self, code: int) -> dict[str, Any]: ...

    def closing(self) -> Iterable[str | dict[str, Any]]:
        """What comes after the last frame with tokens."""
        ...

    def whole(self, pieces: list[Piece]) -> dict[str, Any]:
        """The answer to a request that does not stream."""
        ...


class VllmEncoder:
    def __init__(self, served: Served, version_style: str) -> None:
        self._served = served
        self._style = version_style
        self._sent = 0

    def frame(self, tokens: list[int], finish: str | None, stop: Any) -> dict[str, Any]:
        served, first = self._served, self._sent
        self._sent += len(tokens)
        content = []
        for place, token in enumerate(tokens, first):
            logprob = expected_logprob(served.prompt, served.start + place, served.versions[place])
            entry = {"token": f"token_id:{token}", "token_id": token, "logprob": logprob, "rank": 1}
            content.append({**entry, "top_logprobs": [entry]})
        spans = self._spans() if finish is not None and self._style == "spans" else None
        frame: dict[str, Any] = {
            "request_id": served.id,
            "usage": None,
            "output_mode": "tokens",
            "choices": [
                {
                    "index": 0,
                    "finish_reason": finish,
                    "stop_reason": stop,
                    "token_ids": tokens,
                    "routed_experts": None,
                    "sampling_mask": None,
                    "weight_versions": spans,
                    "logprobs": {"content": content},
                }
            ],
        }
        if self._style == "field":
            frame["weight_version"] = served.versions[-1] if served.versions else None
        return frame

    def _spans(self) -> list[dict[str, Any]]:
        spans: list[dict[str, Any]] = []
        for version, run in groupby(self._served.versions):
            start = spans[-1]["end"] if spans else 0
            spans.append({"version": version, "start": start, "end": start + len(list(run))})
        return spans

    def error(self, code: int) -> dict[str, Any]:
        kind = "BadRequestError" if code < 500 else "InternalServerError"
        return {"error": {"message": "an error on purpose", "type": kind, "param": None, "code": code}}

    def usage(self) -> dict[str, Any]:
        prompt = len(self._served.prompt) + self._served.start
        return {
            "prompt_tokens": prompt,
            "total_tokens": prompt + self._sent,
            "completion_tokens": self._sent,
            "prompt_tokens_details": {"cached_tokens": prompt // 2},
        }

    def closing(self) -> Iterable[str | dict[str, Any]]:
        if (self._served.body.get("stream_options") or {}).get("include_usage"):
            yield {
                "request_id": self._served.id,
                "usage": self.usage(),
                "output_mode": "tokens",
                "choices": [],
            }
        yield "[DONE]"

    def whole(self, pieces: list[Piece]) -> dict[str, Any]:
        tokens = [token for piece in pieces for token in piece[0]]
        answer = self.frame(tokens, pieces[-1][1], pieces[-1][2])
        self._served.finish = pieces[-1][1]
        return {**answer, "usage": self.usage()}


class SglangEncoder:
    def __init__(self, served: Served, *, incremental: bool) -> None:
        self._served = served
        self._incremental = incremental
        self._tokens: list[int] = []

    def frame(self, tokens: list[int], finish: str | None, stop: Any) -> dict[str, Any]:
        served = self._served
        self._tokens += tokens
        shown = tokens if self._incremental else self._tokens
        first = len(self._tokens) - len(shown)
        pairs = [
            [expected_logprob(served.prompt, served.start + place, served.versions[place]), token, None]
            for place, token in enumerate(shown, first)
        ]
        return {
            "text": decode(shown),
            "output_ids": shown,
            "meta_info": {
                "id": served.id,
                "finish_reason": self._finish(finish, stop),
                "prompt_tokens": len(served.prompt) + served.start,
                "weight_version": served.versions[-1] if served.versions else None,
                "completion_tokens": len(self._tokens),
                "cached_tokens": len(served.prompt) // 2,
                "output_token_logprobs": pairs,
                "output_token_logprobs_length": len(pairs),
            },
        }

    def _finish(self, finish: str | None, stop: Any) -> dict[str, Any] | None:
        match finish:
            case None:
                return None
            case "stop":
                return {"type": "stop", "matched": EOS if stop is None else stop}
            case "length":
                return {"type": "length", "length": len(self._tokens)}
            case _:
                return {
                    "type": finish,
                    "message": "Abort in waiting queue",
                    "status_code": None,
                    "err_type": None,
                }

    def error(self, code: int) -> dict[str, Any]:
        return {"error": {"message": "an error on purpose", "code": code}}

    def closing(self) -> Iterable[str | dict[str, Any]]:
        yield "[DONE]"

    def whole(self, pieces: list[Piece]) -> dict[str, Any]:
        self._served.finish = pieces[-1][1]
        return self.frame([token for piece in pieces for token in piece[0]], pieces[-1][1], pieces[-1][2])
