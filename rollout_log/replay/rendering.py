"""Frames that were never sent: a part of a recorded one, one that goes on from elsewhere, an abort.

Where a request does not start or end where a recorded one did, its frames are the recorded ones with the
counts of their request changed. What is not a count (ids, log-probs, versions, text) is left as it came.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from rollout_log.engines.wire import object_in
from rollout_log.replay.recording import RecordedExchange
from rollout_log.replay.versions import spans_of

__all__ = ["DONE", "Rebase", "abort_frames", "error_frame", "frame_of"]

DONE = b"data: [DONE]\n\n"
_LISTS = ("tokens", "token_logprobs", "top_logprobs", "text_offset", "content")


def frame_of(value: Any) -> bytes:
    """Return a value as one SSE frame."""
    return b"data: %b\n\n" % msgspec.json.encode(value)


def error_frame(message: str, code: int) -> bytes:
    """Return the frame an engine sends when it fails in mid-stream."""
    return frame_of(
        {"error": {"message": message, "type": "InternalServerError", "param": None, "code": code}}
    )


class Rebase:
    """Makes an exchange's frames those of a request that starts `skip` tokens later.

    A negative `skip` starts earlier: the exchange then goes on a stream that has sent `-skip` tokens, and
    the last of its cumulative frames was `carried`.
    """

    def __init__(
        self,
        exchange: RecordedExchange,
        skip: int,
        *,
        request_id: str | None = None,
        carried: bytes | None = None,
    ) -> None:
        self._exchange = exchange
        self._skip = skip
        self._request_id = request_id
        cumulative = _is_cumulative(exchange)
        self._carried = object_in(carried) if carried is not None and cumulative else {}

    def frame(
        self, data: bytes, drop: int, *, versions: Sequence[str | None] = (), unfinished: bool = False
    ) -> bytes:
        """Return a frame without its first `drop` tokens, or without its finish.

        `versions` are those of the tokens of the whole response up to here.
        """
        frame = object_in(data)
        if not frame or not (self._skip or drop or self._request_id or unfinished):
            return b"data: %b\n\n" % data
        for name in ("request_id", "id"):
            if self._request_id is not None and name in frame:
                frame[name] = self._request_id
        for choice in frame.get("choices") or []:
            _drop(choice, drop)
            if unfinished:
                choice["finish_reason"] = None
                for name in ("stop_reason", "weight_versions", "routed_experts"):
                    if name in choice:
                        choice[name] = None
            if choice.get("weight_versions"):
                choice["weight_versions"] = spans_of(versions, choice["weight_versions"][0]["version"])
        if isinstance(frame.get("usage"), dict):
            _shift(frame["usage"], self._skip)
        if isinstance(frame.get("meta_info"), dict):
            self._rebase_meta(frame, frame["meta_info"], unfinished=unfinished)
        return frame_of(frame)

    def _rebase_meta(self, frame: dict[str, Any], meta: dict[str, Any], *, unfinished: bool) -> None:
        _shift(meta, self._skip)
        if unfinished:
            meta["finish_reason"] = None
        if self._request_id is not None and "id" in meta:
            meta["id"] = self._request_id
        count = meta.get("completion_tokens", 0)
        before = self._carried.get("meta_info", {})
        for holder, earlier, name in (
            (meta, before, "output_token_logprobs"),
            (frame, self._carried, "output_ids"),
        ):
            if isinstance(holder.get(name), list):
                values = [*(earlier.get(name) or []), *holder[name]]
                holder[name] = values[-count:] if count else []
        if "output_token_logprobs_length" in meta:
            meta["output_token_logprobs_length"] = len(meta.get("output_token_logprobs") or [])
        if self._carried.get("text"):
            frame["text"] = self._carried["text"] + (frame.get("text") or "")


def abort_frames(
    exchange: RecordedExchange, last: bytes | None, tokens: int, spans: Sequence[dict[str, Any]]
) -> list[bytes]:
    """Return what an engine sends when it is told to abort, after `tokens` tokens of the request.

    `last` is the last frame that was sent; `spans` the weight versions of the tokens.
    """
    template = last or next((frame.data for frame in exchange.frames if _is_frame(frame.data)), b"{}")
    frame = object_in(template)
    if "meta_info" in frame or exchange.requested.dialect == "sglang":
        meta = frame.setdefault("meta_info", {})
        meta["finish_reason"] = {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
        if last is None:
            frame["text"] = ""
            meta.update(completion_tokens=0, output_token_logprobs=[])
            if "output_ids" in frame:
                frame["output_ids"] = []
        return [frame_of(frame), DONE]
    chat = exchange.requested.path.partition("?")[0].rstrip("/").endswith("/chat/completions")
    choices = frame.get("choices") or []
    indices = sorted({delta.index for decoded in exchange.decoded for delta in decoded.choices}) or [0]
    pattern = choices[0] if choices else {"index": 0, "finish_reason": None, "stop_reason": None}
    frame["choices"] = [_aborted(pattern, index, spans, chat=chat) for index in indices]
    frame["usage"] = None if "usage" in frame else frame.pop("usage", None)
    if frame["usage"] is None and exchange.requested.dialect == "openai":
        del frame["usage"]
    frames = [frame_of(frame)]
    request = object_in(exchange.body)
    options = request.get("stream_options")
    if isinstance(options, dict) and options.get("include_usage"):
        prompt = _prompt_tokens(exchange)
        usage: dict[str, Any] = {
            "prompt_tokens": prompt,
            "total_tokens": prompt + tokens,
            "completion_tokens": tokens,
        }
        if exchange.requested.dialect == "vllm":
            usage["prompt_tokens_details"] = {"cached_tokens": 0}
        frames.append(frame_of({**frame, "usage": usage, "choices": []}))
    return [*frames, DONE]


def _aborted(
    pattern: dict[str, Any], index: int, spans: Sequence[dict[str, Any]], *, chat: bool
) -> dict[str, Any]:
    choice = {**pattern, "index": index, "finish_reason": "abort", "stop_reason": None}
    for name in ("routed_experts", "sampling_mask", "prompt_token_ids"):
        if name in choice:
            choice[name] = None
    if "token_ids" in choice or not chat:
        choice["token_ids"] = []
    if "weight_versions" in choice:
        choice["weight_versions"] = list(spans)
    if "text" in choice:
        choice["text"] = ""
    if chat:
        choice["delta"] = {"content": ""}
    if isinstance(choice.get("logprobs"), dict):
        choice["logprobs"] = {
            name: [] if isinstance(value, list) else value for name, value in choice["logprobs"].items()
        }
    return choice


def _drop(choice: dict[str, Any], count: int) -> None:
    """Take the first tokens off a choice of vLLM's. Text cannot be told apart, and stays."""
    if not count:
        return
    for name in ("token_ids", "sampling_mask"):
        if isinstance(choice.get(name), list):
            choice[name] = choice[name][count:]
    logprobs = choice.get("logprobs")
    if isinstance(logprobs, dict):
        for name in _LISTS:
            if isinstance(logprobs.get(name), list):
                logprobs[name] = logprobs[name][count:]


def _shift(counts: dict[str, Any], skip: int) -> None:
    for name, sign in (("completion_tokens", -1), ("prompt_tokens", 1)):
        if isinstance(counts.get(name), int):
            counts[name] = max(counts[name] + sign * skip, 0)


def _prompt_tokens(exchange: RecordedExchange) -> int:
    for decoded in exchange.decoded:
        usage = decoded.usage or {}
        if isinstance(usage.get("prompt_tokens"), int):
            return int(usage["prompt_tokens"])
        if decoded.prompt_token_ids:
            return len(decoded.prompt_token_ids)
    return len(exchange.info.token_ids or ())


def _is_frame(data: bytes) -> bool:
    return data[:1] == b"{" and not data.startswith(b'{"error"')


def _is_cumulative(exchange: RecordedExchange) -> bool:
    """Whether the frames repeat what came before, as SGLang's do by default; one frame cannot tell."""
    metas = [meta for frame in exchange.frames if (meta := object_in(frame.data).get("meta_info"))]
    if len(metas) < 2:
        return True
    pairs = metas[-1].get("output_token_logprobs")
    return pairs is None or len(pairs) == metas[-1].get("completion_tokens")
