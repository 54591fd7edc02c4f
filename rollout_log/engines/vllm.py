"""vLLM's own endpoint, `/inference/v1/generate`: token ids in, token ids out.

Log-prob entries name their token as `"token": "token_id:17"`, as `"token_id": 17` or as text; only their
`logprob` is read, since `token_ids` says the rest.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from rollout_log.engines.answer import Answer, AnswerChoice, choice_of, frame_of
from rollout_log.engines.frame import Frame, RequestInfo, Tokens
from rollout_log.engines.wire import decode, object_in, request_info

__all__ = ["VLLM"]


class _Entry(msgspec.Struct, gc=False):
    logprob: float | None = None


class _Logprobs(msgspec.Struct, gc=False):
    content: list[_Entry] | None = None


class _Choice(AnswerChoice, gc=False):
    logprobs: _Logprobs | None = None


class _Answer(Answer, gc=False):
    choices: list[_Choice] | None = None


_decoder = msgspec.json.Decoder(_Answer)
_decode = _decoder.decode


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

    def decode_frame(self, data: bytes, so_far: Mapping[int, int]) -> Frame | Tokens:
        """Decode one frame. All its tokens are new, so `so_far` does not matter."""
        try:
            answer = _decode(data)
        except (msgspec.MsgspecError, RecursionError):
            return decode(data, _decoder, _read)
        choices = answer.choices
        if choices is not None and len(choices) == 1 and answer.usage is None and answer.error is None:
            wire = choices[0]
            if wire.finish_reason is None and answer.metrics is None:
                tokens = _tokens(answer, wire)
                if tokens is not None:
                    return tokens
        return _read(answer)

    def decode_body(self, data: bytes) -> Frame:
        """Decode an answer that was not streamed, or an error object."""
        return decode(data, _decoder, _read)


def _tokens(answer: _Answer, wire: _Choice) -> Tokens | None:
    """Return a frame that has nothing but tokens of one choice as such; None for any other."""
    token_ids = wire.token_ids
    if (
        not token_ids
        or wire.sampling_mask is not None
        or wire.weight_versions is not None
        or wire.text is not None
        or wire.stop_reason is not None
        or wire.routed_experts is not None
        or wire.prompt_token_ids is not None
        or answer.prompt_token_ids is not None
        or answer.request_spec_decode_stats is not None
    ):
        return None
    logprobs = None
    if wire.logprobs is not None and (content := wire.logprobs.content) is not None:
        logprobs = [entry.logprob for entry in content]
        if len(logprobs) > len(token_ids) or None in logprobs:
            return None
    version = answer.weight_version
    return Tokens(
        wire.index,
        token_ids,
        logprobs,  # type: ignore[arg-type]  # no None is in it
        version if version is None or type(version) is str else str(version),
        answer.request_id,
    )


def _read(answer: _Answer) -> Frame:
    if answer.choices is None:
        return frame_of(answer, None)
    choices = []
    mismatch = None
    for wire in answer.choices:
        token_ids, logprobs = wire.token_ids, None
        if wire.logprobs is not None and wire.logprobs.content is not None:
            logprobs = [entry.logprob for entry in wire.logprobs.content]
            if len(logprobs) > len(token_ids or ()):
                mismatch = (
                    f"{len(logprobs)} log-probs for {len(token_ids or ())} tokens of choice {wire.index}"
                )
        if wire.prompt_token_ids is not None and answer.prompt_token_ids is None:
            answer.prompt_token_ids = wire.prompt_token_ids
        choices.append(choice_of(wire, token_ids, logprobs, wire.text))
    frame = frame_of(answer, choices)
    if mismatch is not None:
        frame.length_mismatch = mismatch
    return frame
