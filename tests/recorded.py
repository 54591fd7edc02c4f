"""Logs for tests: what a tap would see goes through the recorder into a log, without any HTTP."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, final

from rollout_log.events import End, Opened
from rollout_log.log import Log
from rollout_log.record.exchange import Exchange
from rollout_log.record.samples import Samples

PATH = "/inference/v1/generate"
SSE = [("content-type", "text/event-stream")]


def frame(
    *ids: int,
    logprob: float | None = -0.5,
    finish: str | None = None,
    version: str | None = None,
    choice: int = 0,
) -> bytes:
    """One frame as vLLM sends it."""
    content = [{"token": f"token_id:{i}", "logprob": logprob} for i in ids]
    delta = {
        "index": choice,
        "token_ids": list(ids),
        "logprobs": {"content": content},
        "finish_reason": finish,
    }
    body: dict[str, Any] = {"choices": [delta]}
    if version is not None:
        body["weight_version"] = version
    return b"data: " + json.dumps(body).encode() + b"\n\n"


@final
class Writer:
    """Records requests for samples into a log of its own making."""

    def __init__(self, path: Path, **settings: Any) -> None:
        self.log = Log.open(path, **settings)
        self.samples = Samples(self.log)

    def request(
        self,
        key: str,
        frames: Sequence[bytes] = (),
        *,
        prompt: Sequence[int] = (1, 2, 3),
        params: dict[str, Any] | None = None,
        step: int | None = None,
        opened: dict[str, Any] | None = None,
        how: End | None = "eof",
        detail: str | None = None,
        status: int | None = 200,
        body: bytes | None = None,
        **more: Any,
    ) -> Exchange:
        """One request; it goes on from the response so far. `how` None: open; `status` None: unanswered."""
        live = self.samples.get(key)
        so_far = live.rollout.choice_or_first().token_ids[: more.get("base")] if live else []
        asked = {
            "model": "m",
            "token_ids": [*prompt, *so_far],
            "sampling_params": {"logprobs": 1, **(params or {})},
            "stream": True,
        }
        exchange = self.samples.request(
            key,
            path=PATH,
            body=json.dumps(asked).encode(),
            opened=Opened(key=key, step=step, **(opened or {})),
            **more,
        )
        if status is not None:
            exchange.respond(status, SSE if body is None else [("content-type", "application/json")])
        for part in frames if body is None else [body]:
            exchange.feed(part)
        if how is not None:
            exchange.end(how, detail)
        return exchange

    def close(self) -> None:
        self.log.close()

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
