"""From a data frame to what it says: one module per engine dialect.

Wire formats move every month, so the log keeps bytes and this package interprets them late. A decoder
is pure: it gets the bytes of one frame (or of a whole non-streamed body) and says what they mean in
the terms of `frame`. It never raises on model output; what it cannot read is a `Frame` with `undecodable`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rollout_log.engines.frame import (
    AlikeFrames,
    ChoiceDelta,
    Dialect,
    EngineError,
    Frame,
    RequestInfo,
    Tokens,
    VersionSpan,
)
from rollout_log.engines.openai import OpenAI
from rollout_log.engines.sglang import SGLang
from rollout_log.engines.vllm import VLLM

__all__ = [
    "AlikeFrames",
    "ChoiceDelta",
    "Dialect",
    "EngineError",
    "Frame",
    "RequestInfo",
    "Tokens",
    "VersionSpan",
    "dialect_for",
    "dialect_named",
]

_DIALECTS: dict[str, Dialect] = {dialect.name: dialect for dialect in (VLLM(), SGLang(), OpenAI())}

# In this order: vLLM's path ends like SGLang's.
_PATHS = {
    "/inference/v1/generate": "vllm",
    "/generate": "sglang",
    "/v1/completions": "openai",
    "/v1/chat/completions": "openai",
}


def dialect_for(path: str) -> Dialect | None:
    """Return the dialect that answers on this URL path, or None where no tokens are generated.

    A prefix before the known path, a slash after it and a query do not matter.
    """
    path = path.partition("?")[0].rstrip("/")
    for suffix, name in _PATHS.items():
        if path.endswith(suffix):
            return _DIALECTS[name]
    return None


def dialect_named(name: str) -> Dialect:
    """Return a dialect by its recorded name; an unknown name gets one that decodes nothing."""
    return _DIALECTS.get(name) or _Unknown(name)


class _Unknown:
    """Stands in for a dialect that a later version recorded."""

    def __init__(self, name: str) -> None:
        self.name = name

    def read_request(self, body: bytes) -> RequestInfo:
        return RequestInfo()

    def decode_frame(self, data: bytes, so_far: Mapping[int, int]) -> Frame:
        return self.decode_body(data)

    def decode_tokens(self, frames: Sequence[bytes]) -> None:
        return None

    def read_alike(self, frames: AlikeFrames) -> None:
        return None

    def decode_body(self, data: bytes) -> Frame:
        return Frame(undecodable=f"no decoder for the dialect {self.name!r}")
