"""vLLM's own endpoint, `/inference/v1/generate`: token ids in, token ids out.

Log-prob entries name their token as `"token": "token_id:17"`, as `"token_id": 17` or as text; only their
`logprob` is read, since `token_ids` says the rest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated

import msgspec

from rollout_log.engines.alike import read_tokens
from rollout_log.engines.answer import Answer, AnswerChoice, Parts, read_answer
from rollout_log.engines.frame import AlikeFrames, Frame, RequestInfo, Tokens
from rollout_log.engines.wire import Natural, TokenId, decode, object_in, request_info

__all__ = ["VLLM"]


class _Entry(msgspec.Struct, gc=False):
    logprob: float | None = None


class _Logprobs(msgspec.Struct, gc=False):
    content: list[_Entry] | None = None


class _Choice(AnswerChoice, gc=False):
    logprobs: _Logprobs | None = None


class _Answer(Answer, gc=False):
    choices: list[_Choice] | None = None


class _PlainEntry(msgspec.Struct, gc=False):
    logprob: float


class _PlainLogprobs(msgspec.Struct, gc=False):
    content: list[_PlainEntry]


class _PlainChoice(msgspec.Struct, gc=False):
    token_ids: Annotated[list[TokenId], msgspec.Meta(min_length=1)]
    index: Natural = 0
    logprobs: _PlainLogprobs | None = None
    finish_reason: None = None
    stop_reason: None = None
    weight_versions: None = None
    routed_experts: None = None
    sampling_mask: None = None
    text: None = None
    prompt_token_ids: None = None


class _PlainAnswer(msgspec.Struct, gc=False):
    """A frame that has tokens of one choice and nothing else, as nearly all have; others do not decode."""

    choices: tuple[_PlainChoice]
    request_id: str | None = None
    usage: None = None
    weight_version: str | int | None = None
    metrics: None = None
    request_spec_decode_stats: None = None
    prompt_token_ids: None = None
    error: None = None


_IDS = "choices[].token_ids[]"
_LOGPROBS = "choices[].logprobs.content[].logprob"
_UNREAD = {"choices[].logprobs.content[].token", "choices[].logprobs.content[].top_logprobs[].token"}
"""Strings that may differ, as nobody reads them."""

_decoder = msgspec.json.Decoder(_Answer)
_decode_plain = msgspec.json.Decoder(_PlainAnswer).decode


class VLLM:
    """Streamed and whole answers."""

    name = "vllm"

    def read_request(self, body: bytes) -> RequestInfo:
        """Read `token_ids`, `sampling_params`, `model` and `stream`."""
        request = object_in(body)
        params = request.get("sampling_params")
        params = params if isinstance(params, dict) else {}
        return request_info(
            request, request.get("token_ids"), params, params.get("max_tokens"), params.get("logprobs")
        )

    def decode_frame(self, data: bytes, so_far: Mapping[int, int]) -> Frame:
        """Decode one frame. All its tokens are new, so `so_far` does not matter."""
        return decode(data, _decoder, _read)

    def decode_tokens(self, frames: Sequence[bytes]) -> Tokens | None:
        """Decode frames of one choice and name, of the same weights, and with all log-probs or none."""
        try:
            answers = [_decode_plain(data) for data in frames]
        except (msgspec.MsgspecError, RecursionError):
            return None
        first = answers[0]
        index, version, told = first.choices[0].index, first.weight_version, first.choices[0].logprobs
        token_ids: list[int] = []
        logprobs: list[float] = []
        for answer in answers:
            choice = answer.choices[0]
            token_ids += choice.token_ids
            if choice.logprobs is not None:
                for entry in choice.logprobs.content:
                    logprobs.append(entry.logprob)  # noqa: PERF401 - mostly one, and then the quickest
            if len(logprobs) != (len(token_ids) if told else 0):
                return None
            if choice.index != index or answer.weight_version != version:
                return None
            if answer.request_id != first.request_id:
                return None
        return Tokens(
            index,
            token_ids,
            logprobs if told else None,
            None if version is None else str(version),
            first.request_id,
        )

    def read_alike(self, frames: AlikeFrames) -> Tokens | None:
        """Read frames of one choice as `decode_tokens` does."""
        first = self.decode_tokens([frames.first])
        if first is None or not frames.strings <= _UNREAD or frames.counts("choices[]") is not None:
            return None
        return read_tokens(frames, first, _IDS, _LOGPROBS, single=("choices[].index", "weight_version"))

    def decode_body(self, data: bytes) -> Frame:
        """Decode an answer that was not streamed, or an error object."""
        return decode(data, _decoder, _read)


def _read(answer: _Answer) -> Frame:
    return read_answer(answer, answer.choices, _parts)


def _parts(wire: _Choice) -> Parts:
    logprobs = None
    if wire.logprobs is not None and wire.logprobs.content is not None:
        logprobs = [entry.logprob for entry in wire.logprobs.content]
    return wire.token_ids, logprobs, wire.text
