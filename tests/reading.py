"""An independent reading of captured responses: plain `json`, line by line, nothing of the package."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from captures import Capture


@dataclass
class Reading:
    """What one choice of a response says."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: Any = None
    versions: list[tuple[str, int, int]] = field(default_factory=list)


@dataclass
class Read:
    """What a whole response says."""

    choices: dict[int, Reading] = field(default_factory=dict)
    usage: dict[str, Any] | None = None
    error: str | None = None
    frames: int = 0
    """Data frames, without `[DONE]`."""
    ends: list[tuple[int, int]] = field(default_factory=list)
    """(byte offset of a frame's end, tokens of choice 0 so far)."""


def read(capture: Capture) -> Read:
    """Read a stream or a body."""
    found = Read()
    if not capture.is_sse:
        if capture.body[:1] == b"{":
            _take(json.loads(capture.body), found)
        return found
    offset = 0
    *blocks, _rest = capture.body.split(b"\n\n")
    for block in blocks:
        offset += len(block) + 2
        data = [line[6:] for line in block.split(b"\n") if line.startswith(b"data: ")]
        if data and data[0] != b"[DONE]":
            found.frames += 1
            _take(json.loads(data[0]), found)
        first = found.choices.get(0)
        found.ends.append((offset, len(first.token_ids) if first else 0))
    return found


def _take(frame: dict[str, Any], found: Read) -> None:
    if "error" in frame:
        found.error = frame["error"]["message"]
    if frame.get("usage"):
        found.usage = frame["usage"]
    for choice in frame.get("choices") or []:
        reading = found.choices.setdefault(choice["index"], Reading())
        reading.token_ids += choice.get("token_ids") or []
        logprobs = choice.get("logprobs") or {}
        if "token_logprobs" in logprobs:
            reading.logprobs += logprobs["token_logprobs"]
        else:
            reading.logprobs += [entry["logprob"] for entry in logprobs.get("content") or []]
        reading.finish_reason = choice.get("finish_reason") or reading.finish_reason
        if choice.get("stop_reason") is not None:
            reading.stop_reason = choice["stop_reason"]
        for span in choice.get("weight_versions") or []:
            reading.versions.append((span["version"], span["start"], span["end"]))
