"""OpenAI's endpoints as vLLM serves them: `/v1/completions` and `/v1/chat/completions`.

Token ids are there when the request has `return_token_ids` (`token_ids` in a choice) or
`return_tokens_as_token_ids` (log-prob tokens of the form `token_id:17`); otherwise there is only text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from rollout_log.engines.answer import Answer, AnswerChoice, Parts, read_answer
from rollout_log.engines.frame import AlikeFrames, Frame, RequestInfo
from rollout_log.engines.wire import decode, named_id, object_in, request_info

__all__ = ["OpenAI"]

_NOT_SAMPLING = {"prompt", "messages", "stream", "stream_options", "model", "tools", "user", "request_id"}


class _Entry(msgspec.Struct, gc=False):
    token: str | None = None
    logprob: float | None = None


class _Logprobs(msgspec.Struct, gc=False):
    content: list[_Entry] | None = None  # of chat
    tokens: list[str | None] | None = None  # of completions
    token_logprobs: list[float | None] | None = None


class _Message(msgspec.Struct, gc=False):
    content: str | None = None


class _Choice(AnswerChoice, gc=False):
    logprobs: _Logprobs | None = None
    delta: _Message | None = None
    message: _Message | None = None


class _Answer(Answer, gc=False):
    choices: list[_Choice] | None = None


_decoder = msgspec.json.Decoder(_Answer)


class OpenAI:
    """Completions and chat, streamed and whole."""

    name = "openai"

    def read_request(self, body: bytes) -> RequestInfo:
        """Read a completions or a chat body; whatever is not input or delivery is a sampling parameter."""
        request = object_in(body)
        params = {name: value for name, value in request.items() if name not in _NOT_SAMPLING}
        limit = params.get("max_completion_tokens")
        limit = params.get("max_tokens") if limit is None else limit
        token_ids = None if "messages" in request else request.get("prompt")
        return request_info(request, token_ids, params, limit, params.get("logprobs"))

    def decode_frame(self, data: bytes, so_far: Mapping[int, int]) -> Frame:
        """Decode one frame. All its tokens are new, so `so_far` does not matter."""
        return decode(data, _decoder, _read)

    def decode_tokens(self, frames: Sequence[bytes]) -> None:
        """Leave it to `decode_frame`."""

    def read_alike(self, frames: AlikeFrames) -> None:
        """Leave it to `decode_frame`."""

    def decode_body(self, data: bytes) -> Frame:
        """Decode an answer that was not streamed, or an error object."""
        return decode(data, _decoder, _read)


def _read(answer: _Answer) -> Frame:
    return read_answer(answer, answer.choices, _parts)


def _parts(wire: _Choice) -> Parts:
    tokens, logprobs = _logprobs_of(wire)
    token_ids = wire.token_ids if wire.token_ids is not None else _named_ids(tokens)
    message = wire.delta or wire.message
    text = wire.text if message is None else message.content
    return token_ids, None if token_ids is None else logprobs, text  # log-probs of text belong to no id


def _logprobs_of(wire: _Choice) -> tuple[list[str | None] | None, list[float | None] | None]:
    """Return (tokens, log-probs) of either endpoint's shape."""
    if wire.logprobs is None:
        return None, None
    if wire.logprobs.content is not None:
        entries = wire.logprobs.content
        return [entry.token for entry in entries], [entry.logprob for entry in entries]
    return wire.logprobs.tokens, wire.logprobs.token_logprobs


def _named_ids(tokens: list[str | None] | None) -> list[int] | None:
    """Return the ids of tokens of the form `token_id:17`; None unless all have it."""
    found = [named_id(token) for token in tokens or ()]
    ids = [token_id for token_id in found if token_id is not None]
    return ids if ids and len(ids) == len(found) else None
