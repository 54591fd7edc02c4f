"""An engine that answers every request from a script, one read per frame, with an await before each."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx

from trainer.sample_double import Sample
from trainer.trainer_double import TrainerDouble
from trainer.truth import Tokenizer, expected_logprob, prompt_text

__all__ = ["HOLD", "QUESTION", "Scripted", "delta", "generate", "new_sample", "result", "usage"]

QUESTION = prompt_text(1, tokens=10)
HOLD = "HOLD"
"""In the place of a frame: nothing more comes until the client leaves."""

Frame = dict[str, Any] | str
Answer = list[Frame] | tuple[int, dict[str, Any]] | Callable[[dict[str, Any]], "list[Frame]"]


class Scripted(httpx.AsyncBaseTransport):
    """Answers generate requests in order; the last answer serves all later ones. Other paths: 404."""

    def __init__(self, *answers: Answer, other: dict[str, Any] | None = None) -> None:
        self.answers = list(answers)
        self.other = other or {}
        """JSON by path, for what is not a generation."""
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.others: list[tuple[str, dict[str, Any]]] = []
        self.holding = 0

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        body = json.loads(await request.aread() or b"{}")
        if not request.url.path.endswith("/generate"):
            self.others.append((request.url.path, body))
            if request.url.path in self.other:
                return httpx.Response(200, json=self.other[request.url.path])
            return httpx.Response(404, json={"error": "Not Found"})
        answer = self.answers[min(len(self.bodies), len(self.answers) - 1)]
        self.bodies.append(body)
        self.headers.append(dict(request.headers))
        await asyncio.sleep(0)
        if isinstance(answer, tuple):
            return httpx.Response(answer[0], stream=httpx.ByteStream(json.dumps(answer[1]).encode()))
        frames = answer if isinstance(answer, list) else answer(body)
        headers = {"content-type": "text/event-stream"}
        return httpx.Response(200, headers=headers, stream=_Frames(self, frames))


class _Frames(httpx.AsyncByteStream):
    def __init__(self, engine: Scripted, frames: list[Frame]) -> None:
        self.engine, self.frames = engine, frames

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for frame in self.frames:
            await asyncio.sleep(0)
            if frame == HOLD:
                self.engine.holding += 1
                await asyncio.Event().wait()
            yield f"data: {frame if isinstance(frame, str) else json.dumps(frame)}\n\n".encode()

    async def aclose(self) -> None:
        await asyncio.sleep(0)


def delta(tokens: list[int], at: int = 0, finish: str | None = None, **more: Any) -> dict[str, Any]:
    """One vLLM frame with tokens from position `at`. `more`: of the choice; `top=`: of the frame."""
    prompt = Tokenizer().encode(QUESTION)
    content = [{"logprob": expected_logprob(prompt, place, "0")} for place in range(at, at + len(tokens))]
    top = more.pop("top", {})
    choice = {"index": 0, "token_ids": tokens, "finish_reason": finish, "logprobs": {"content": content}}
    return {"request_id": "r", "choices": [{**choice, **more}], **top}


def usage(prompt: int, completion: int, **more: Any) -> dict[str, Any]:
    """vLLM's last frame."""
    figures = {"prompt_tokens": prompt, "completion_tokens": completion}
    return {"choices": [], "usage": {**figures, "prompt_tokens_details": {"cached_tokens": 4}}, **more}


def result(tokens: list[int], finish: str | None = None, **meta: Any) -> dict[str, Any]:
    """One cumulative SGLang frame."""
    prompt = Tokenizer().encode(QUESTION)
    pairs = [[expected_logprob(prompt, at, "0"), token, None] for at, token in enumerate(tokens)]
    reason = None if finish is None else {"type": finish}
    return {
        "text": "",
        "meta_info": {
            "id": "r",
            "finish_reason": reason,
            "completion_tokens": len(tokens),
            "prompt_tokens": len(prompt),
            "cached_tokens": 3,
            "weight_version": "0",
            "output_token_logprobs": pairs,
            **meta,
        },
    }


def new_sample(**fields: Any) -> Sample:
    return Sample(**{"index": 0, "prompt": QUESTION, "session_id": uuid.uuid4().hex, **fields})


def generate(
    trainer: TrainerDouble,
    function: Any,
    engine: Scripted,
    sample: Sample,
    *,
    cancel: bool = False,
    **params: Any,
) -> Any:
    """Call a generate function for a sample on the trainer's loop. `cancel`: once the engine holds."""

    async def run() -> Any:
        client = trainer.http._http_client
        before, client._transport = client._transport, engine
        task = asyncio.ensure_future(function(trainer.args, sample, {**trainer.sampling_params, **params}))
        try:
            while cancel and not engine.holding and not task.done():  # noqa: ASYNC110 - no event to wait for
                await asyncio.sleep(0)
            if cancel:
                task.cancel()
            return await task
        except asyncio.CancelledError:
            return None
        finally:
            client._transport = before

    return trainer.run(run())
