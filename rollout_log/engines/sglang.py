"""SGLang's `/generate`, cumulative (the default), incremental and whole.

One rule serves all three: `meta_info.completion_tokens` says how many tokens the choice has by now, so
the new ones are the last `completion_tokens - so_far` of those in the frame. A chunk that repeats what
was said, as an abort chunk does, adds nothing.
"""

from __future__ import annotations

import base64
import math
import struct
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import msgspec

from rollout_log.engines.frame import AlikeFrames, ChoiceDelta, Frame, RequestInfo
from rollout_log.engines.wire import Natural, TokenId, decode, error_in, object_in, request_info

__all__ = ["SGLang"]


class _Pair(msgspec.Struct, array_like=True, gc=False):
    """Followed by the token's text, which is not read."""

    logprob: float | None
    token_id: TokenId


class _Finish(msgspec.Struct, gc=False):
    type: str | None = None
    matched: int | str | None = None


class _Meta(msgspec.Struct, gc=False):
    id: str | None = None
    finish_reason: _Finish | str | None = None
    completion_tokens: Natural | None = None
    prompt_tokens: Natural | None = None
    cached_tokens: Natural | None = None
    output_token_logprobs: list[_Pair] | None = None
    weight_version: str | int | None = None
    routed_experts: str | None = None
    routed_experts_start_len: Natural | None = None
    top_p_token_ids: str | list[TokenId] | None = None
    top_p_token_offsets: str | list[Natural] | None = None
    top_p_kept_token_ids: str | list[TokenId] | None = None
    top_p_kept_token_offsets: str | list[Natural] | None = None
    spec_verify_ct: float | None = None
    spec_accept_token_num: float | None = None
    spec_draft_token_num: float | None = None
    spec_accept_rate: float | None = None
    spec_accept_length: float | None = None


class _Result(msgspec.Struct, gc=False):
    meta_info: _Meta | None = None
    output_ids: list[TokenId] | None = None
    index: Natural | None = None
    error: Any = None
    object: str | None = None
    message: Any = None
    code: Any = None
    detail: Any = None


_SPECULATION = tuple(name for name in _Meta.__struct_fields__ if name.startswith("spec_"))
_USAGE = ("prompt_tokens", "completion_tokens", "cached_tokens")

_decoder = msgspec.json.Decoder(_Result)
_body_decoder = msgspec.json.Decoder(_Result | list[_Result])


class SGLang:
    """A frame is one result; a whole answer is one, or a list of them when n > 1."""

    name = "sglang"

    def read_request(self, body: bytes) -> RequestInfo:
        """Read `input_ids`, `sampling_params`, `return_logprob` and `stream`."""
        request = object_in(body)
        params = request.get("sampling_params")
        params = params if isinstance(params, dict) else {}
        return request_info(
            request,
            request.get("input_ids"),
            params,
            params.get("max_new_tokens"),
            request.get("return_logprob"),
        )

    def decode_frame(self, data: bytes, so_far: Mapping[int, int]) -> Frame:
        """Decode one frame; `so_far` tells its new tokens from those it repeats."""
        return decode(data, _decoder, lambda result: _read([result], so_far))

    def decode_tokens(self, frames: Sequence[bytes]) -> None:
        """Leave it to `decode_frame`."""

    def read_alike(self, frames: AlikeFrames) -> None:
        """Leave it to `decode_frame`."""

    def decode_body(self, data: bytes) -> Frame:
        """Decode a whole answer; the results of a list are its choices, in order."""
        return decode(data, _body_decoder, lambda body: _read(body if isinstance(body, list) else [body], {}))


def _read(results: list[_Result], so_far: Mapping[int, int]) -> Frame:
    frame = Frame()
    for place, result in enumerate(results):
        meta = result.meta_info
        frame.error = frame.error or error_in(
            result.error, result.object, result.message, result.code, result.detail
        )
        if meta is None:
            if frame.error is None:
                return Frame(undecodable="no meta_info or error in it")
            continue
        choice = ChoiceDelta(place if result.index is None else result.index)
        frame.length_mismatch = (
            _add_tokens(choice, result, meta, so_far.get(choice.index, 0)) or frame.length_mismatch
        )
        finish = meta.finish_reason
        if isinstance(finish, _Finish):
            choice.finish_reason, choice.stop_reason = finish.type, finish.matched
        else:
            choice.finish_reason = finish
        choice.routed_experts = meta.routed_experts
        choice.routed_experts_start = meta.routed_experts_start_len or 0
        if choice.token_ids:
            choice.sampling_mask = _sampling_sets(meta, len(choice.token_ids))
        # No text: a cumulative frame repeats it, and nothing in an incremental one says that it does not.
        frame.choices.append(choice)
        frame.request_id = frame.request_id or meta.id
        if meta.weight_version is not None:
            frame.weight_version = str(meta.weight_version)
    _add_figures(frame, results)
    return frame


def _add_tokens(choice: ChoiceDelta, result: _Result, meta: _Meta, so_far: int) -> str | None:
    """Add the new tokens; returns what is wrong when the frame has fewer than it counts."""
    pairs = meta.output_token_logprobs or []
    ids = result.output_ids or []
    if meta.completion_tokens is None:
        if pairs or ids:
            return f"choice {choice.index} has tokens and no meta_info.completion_tokens to tell new ones by"
        return None
    new = meta.completion_tokens - so_far
    if new <= 0:
        return None
    if new > len(pairs or ids):
        return f"choice {choice.index} counts {new} new tokens and carries {len(pairs or ids)}"
    if pairs:
        pairs = pairs[-new:]
        choice.token_ids = [pair.token_id for pair in pairs]
        choice.logprobs = [math.nan if pair.logprob is None else pair.logprob for pair in pairs]
    else:
        choice.token_ids = ids[-new:]
    return None


def _sampling_sets(meta: _Meta, new: int) -> list[list[int]] | None:
    """Return the top-p sets of the last `new` tokens: all ids in a row, and where each token's begin."""
    ids = meta.top_p_token_ids if meta.top_p_token_ids is not None else meta.top_p_kept_token_ids
    offsets = (
        meta.top_p_token_offsets if meta.top_p_token_offsets is not None else meta.top_p_kept_token_offsets
    )
    if ids is None or offsets is None:
        return None
    ids, offsets = _integers(ids), _integers(offsets)
    if len(offsets) <= new or offsets[-1] != len(ids) or offsets[0] != 0:
        return None
    places = offsets[len(offsets) - new - 1 :]
    return [ids[start:end] for start, end in pairwise(places)]


def _integers(values: str | list[int]) -> list[int]:
    """An array of int32 as JSON or as base64 of its bytes; empty where it is neither."""
    if isinstance(values, list):
        return values
    try:
        data = base64.b64decode(values, validate=True)
    except ValueError:
        return []
    return [] if len(data) % 4 else list(struct.unpack(f"<{len(data) // 4}i", data))


def _add_figures(frame: Frame, results: list[_Result]) -> None:
    """Add usage and speculative decoding figures, which a result has of its own choice alone."""
    metas = [result.meta_info for result in results if result.meta_info is not None]
    if len(results) == 1 and results[0].index is not None:
        return  # One choice of several: its counts are not the request's.
    if len(metas) == 1:
        frame.usage = _figures(metas[0], _USAGE)
        frame.metrics = _figures(metas[0], _SPECULATION)
    elif metas and all(meta.completion_tokens is not None for meta in metas):
        frame.usage = _figures(metas[0], _USAGE)
        if frame.usage is not None:
            frame.usage["completion_tokens"] = sum(meta.completion_tokens or 0 for meta in metas)


def _figures(meta: _Meta, names: tuple[str, ...]) -> dict[str, Any] | None:
    figures = {name: getattr(meta, name) for name in names}
    return {name: value for name, value in figures.items() if value is not None} or None
