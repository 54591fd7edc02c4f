"""What one data frame says, and what a request asks for, in terms common to all dialects."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import msgspec

__all__ = [
    "AlikeFrames",
    "ChoiceDelta",
    "Dialect",
    "EngineError",
    "Frame",
    "RequestInfo",
    "Tokens",
    "VersionSpan",
]


class VersionSpan(msgspec.Struct, frozen=True, gc=False):
    """Weight version of the tokens [start, end) of one request's output."""

    version: str
    start: int
    end: int


class EngineError(msgspec.Struct, frozen=True, gc=False):
    """An error the engine put into a frame or a body."""

    message: str
    code: int | None = None
    """As if it were the HTTP status; None when the engine gave none."""


class ChoiceDelta(msgspec.Struct, gc=False):
    """What one frame adds to one choice."""

    index: int = 0
    token_ids: list[int] = []
    """New tokens only, whatever the wire repeats."""
    logprobs: list[float] | None = None
    """For the first `len(logprobs)` of `token_ids`; NaN where the wire has null or NaN; None: none sent."""
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    weight_versions: list[VersionSpan] | None = None
    """Relative to this request's output, and for all of it; None: the frame does not say."""
    routed_experts: str | None = None
    """base64 of a .npy, shape (prompt + response - 1, layers, top_k); opaque here."""
    sampling_mask: list[list[int]] | None = None
    """Token ids that sampling could choose from, one sorted list per token of this frame."""
    text: str | None = None
    routed_experts_start: int = 0
    """Row that `routed_experts` begins with; the rows before it were told earlier."""


class Frame(msgspec.Struct, gc=False):
    """What one data frame, or one non-streamed body, says."""

    choices: list[ChoiceDelta] = []
    usage: dict[str, Any] | None = None
    weight_version: str | None = None
    """Of this frame's tokens (vime's vLLM fork puts it on every frame)."""
    metrics: dict[str, Any] | None = None
    """Speculative decoding figures, as the engine gave them."""
    error: EngineError | None = None
    prompt_token_ids: list[int] | None = None
    """The prompt as the engine tokenized it, where it says so."""
    request_id: str | None = None
    done: bool = False
    """`[DONE]`."""
    undecodable: str | None = None
    """Why the bytes could not be read; everything else is then empty."""
    length_mismatch: str | None = None
    """The frame contradicts itself on how many tokens it has. It then adds only what is certain: no
    tokens, or tokens whose log-probs are all missing."""


class Tokens(msgspec.Struct, gc=False):
    """What frames in a row say that only add tokens to one choice, as nearly all frames of a stream do."""

    index: int
    token_ids: list[int]
    logprobs: list[float] | None
    """As many as `token_ids`; None: none sent."""
    weight_version: str | None
    request_id: str | None


class AlikeFrames(Protocol):
    """Data frames in a row that lie as columns (`rollout_log.columns.Alike`).

    They have the same forms and the same scalars, but for their numbers, for how many items their lists
    have (all some, or all none), and for the strings at the paths `strings`.
    """

    strings: frozenset[str]

    @property
    def first(self) -> bytes:
        """The first of them."""
        ...

    def numbers(self, path: str) -> list[int] | list[float] | None:
        """Return the numbers at a path, `choices[].token_ids[]`; None where there are none."""
        ...

    def counts(self, path: str) -> Sequence[int] | None:
        """Return how many values at a path each frame has; None where it is one each."""
        ...


class RequestInfo(msgspec.Struct, frozen=True, gc=False):
    """What a request body asks for, in terms common to all dialects."""

    token_ids: list[int] | None = None
    """Prompt (and response so far) as ids; None when the body has text or messages instead."""
    model: str | None = None
    n: int = 1
    stream: bool = False
    max_tokens: int | None = None
    wants_logprobs: bool = False
    sampling_params: dict[str, Any] = {}


class Dialect(Protocol):
    """One engine's wire format."""

    name: str

    def read_request(self, body: bytes) -> RequestInfo:
        """Read a request body; whatever cannot be read is left at its default."""
        ...

    def decode_frame(self, data: bytes, so_far: Mapping[int, int]) -> Frame:
        """Decode one SSE data frame. `so_far`: tokens of this request by choice, before this frame."""
        ...

    def decode_tokens(self, frames: Sequence[bytes]) -> Tokens | None:
        """Decode data frames in a row at once, at a lower cost; None where they are not just `Tokens`."""
        ...

    def read_alike(self, frames: AlikeFrames) -> Tokens | None:
        """Read data frames in a row by decoding one of them; None where they are not just `Tokens`."""
        ...

    def decode_body(self, data: bytes) -> Frame:
        """Decode a whole response that is not SSE: an answer, or an error object."""
        ...
