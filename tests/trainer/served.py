"""One request to the stand-in engine, and what it gets."""

from __future__ import annotations

import asyncio
import zlib
from dataclasses import dataclass, field
from typing import Any

from trainer.faults import Fault
from trainer.truth import EOS, decode, ends_at, expected_tokens

__all__ = ["Served", "finish_of", "frame_size", "take"]


@dataclass
class Served:
    """One generate request. Positions are those of `truth`."""

    number: int
    path: str
    headers: dict[str, str]
    body: dict[str, Any]
    prompt: list[int]
    start: int
    """Response tokens that the request brought along."""
    max_tokens: int
    fault: Fault
    versions: list[str] = field(default_factory=list)
    """One per token that was generated."""
    finish: str | None = None
    """Finish reason that was sent, else `dropped` (the client left), or the fault's kind; None: running."""
    holding: bool = False
    lingering: bool = False
    stalling: bool = False
    aborted: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def end(self) -> int:
        return self.start + len(self.versions)

    @property
    def id(self) -> str:
        return f"generate-tokens-{self.number:016x}"


def take(served: Served, version: str, count: int) -> list[int]:
    """Generate up to `count` more tokens with the weights that are loaded now."""
    tokens = expected_tokens(served.prompt, served.end, count)
    served.versions += [version] * len(tokens)
    return tokens


def finish_of(served: Served, tokens: list[int], params: dict[str, Any]) -> tuple[str | None, Any]:
    """Cut off what comes after a stop, and say why it ends. A stop string sees this request's text."""
    first = len(served.versions) - len(tokens)
    for place in range(len(tokens)):
        stop = _stop(served, first + place, params)
        if stop is not None:
            del tokens[place + 1 :], served.versions[first + place + 1 :]
            return "stop", stop
    end = ends_at(served.prompt)
    if end is not None and served.end >= end:
        return "stop", None
    return ("length", None) if len(served.versions) >= served.max_tokens else (None, None)


def _stop(served: Served, place: int, params: dict[str, Any]) -> int | str | None:
    ids, strings = params.get("stop_token_ids") or (), params.get("stop") or ()
    if not ids and not strings:
        return None
    said = expected_tokens(served.prompt, served.start, place + 1)
    if said[-1] in ids and said[-1] != EOS:
        return said[-1]
    text = decode(said)
    return next(
        (each for each in ([strings] if isinstance(strings, str) else strings) if text.endswith(each)), None
    )


def frame_size(served: Served, most: int) -> int:
    return 1 + zlib.crc32(f"{served.number}:{served.end}".encode()) % most
