"""What all dialects share: JSON that may be broken, errors, and the numbers of a request.

An answer is decoded typed, skipping what nobody asks for. Where that fails it is parsed the slow way
(bare NaN and Infinity, lone surrogates, bytes that are not UTF-8, numbers out of range) and converted to
the same types, with numbers in strings taken as numbers. Token ids are never guessed: where one is not
a natural number below 2**63, the whole frame is undecodable.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Annotated, Any, TypeVar

import msgspec

from rollout_log.engines.frame import EngineError, Frame, RequestInfo

__all__ = [
    "Natural",
    "TokenId",
    "decode",
    "error_in",
    "integer",
    "named_id",
    "object_in",
    "request_info",
    "token_ids_in",
]

Natural = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
TokenId = Natural

_T = TypeVar("_T")
_NAMED_ID = re.compile(r"token_id:([0-9]{1,18})")


def decode(data: bytes, decoder: msgspec.json.Decoder[_T], read: Callable[[_T], Frame]) -> Frame:
    """Decode `data` to the decoder's type and let `read` say what it means. Never raises."""
    try:
        answer = decoder.decode(data)
    except (msgspec.MsgspecError, RecursionError):
        return _decode_leniently(data, decoder, read)
    return read(answer)


def _decode_leniently(data: bytes, decoder: msgspec.json.Decoder[_T], read: Callable[[_T], Frame]) -> Frame:
    if data.strip() == b"[DONE]":
        return Frame(done=True)
    try:
        return read(msgspec.convert(_parse(data), decoder.type, strict=False))
    except msgspec.ValidationError as problem:
        return Frame(undecodable=str(problem))
    except RecursionError:
        return Frame(undecodable="nested too deeply")
    except ValueError as problem:
        return Frame(undecodable=f"not JSON: {problem}")


def object_in(data: bytes) -> dict[str, Any]:
    """Return the JSON object in `data`; an empty one where there is none."""
    try:
        try:
            value = msgspec.json.decode(data)
        except (msgspec.MsgspecError, RecursionError):
            value = _parse(data)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def request_info(
    request: dict[str, Any],
    token_ids: Any,
    params: dict[str, Any],
    max_tokens: Any,
    logprobs: Any,
) -> RequestInfo:
    """Build the request's description from what the dialect found in it, reading the numbers."""
    model = request.get("model")
    return RequestInfo(
        token_ids=token_ids_in(token_ids),
        model=model if isinstance(model, str) else None,
        n=max(integer(params.get("n")) or 1, 1),
        stream=request.get("stream") is True,
        max_tokens=integer(max_tokens),
        # A number asks for that many beside the sampled token's, so 0 asks as well.
        wants_logprobs=logprobs is not None and logprobs is not False,
        sampling_params=params,
    )


def error_in(
    error: Any = None,
    kind: Any = None,
    message: Any = None,
    code: Any = None,
    detail: Any = None,
) -> EngineError | None:
    """Return the error that an answer's fields of these names (`kind` is `object`) amount to.

    Three shapes: `{"error": {"message", "code"}}` or `{"error": "text"}`; older vLLM's
    `{"object": "error", "message", "code"}`; FastAPI's `{"detail": …}`.
    """
    if isinstance(error, dict):
        text = next((error[name] for name in ("message", "detail", "type") if error.get(name)), error)
        return EngineError(_text(text), _code(error.get("code")))
    if error is not None and error is not False and error != "":
        return EngineError(_text(error), _code(code))
    if detail is not None:
        return EngineError(_text(detail), _code(code))
    if message is not None and (kind == "error" or code is not None):
        return EngineError(_text(message), _code(code))
    return None


def integer(value: Any) -> int | None:
    """Read a JSON number, or a string of digits, as an integer."""
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < 19:
        return int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def named_id(token: str | None) -> int | None:
    """Return the id of a token of the form `token_id:17`; None for any other text."""
    found = _NAMED_ID.fullmatch(token or "")
    return int(found[1]) if found else None


def token_ids_in(value: Any) -> list[int] | None:
    """Return a JSON array of token ids; None for anything else."""
    try:
        return msgspec.convert(value, list[TokenId])
    except msgspec.ValidationError:
        return None


def _parse(data: bytes) -> Any:
    """Parse JSON as forgivingly as Python does; raises ValueError or RecursionError."""
    text = data.decode("utf-8", "replace").lstrip("\ufeff")
    return _mended(json.loads(text, parse_int=_parse_int))


def _parse_int(digits: str) -> int | float:
    # Python refuses to make very long integers; as a float they are out of every range here, too.
    return int(digits) if len(digits) < 400 else float(digits)


def _mended(value: Any) -> Any:
    """Return the value without lone surrogates, which no later encoder would take."""
    if isinstance(value, str):
        if value.isascii():
            return value
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, list):
        return [_mended(item) for item in value]
    if isinstance(value, dict):
        return {_mended(name): _mended(item) for name, item in value.items()}
    return value


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _code(value: Any) -> int | None:
    code = integer(value)
    return code if code is not None and 0 <= code < 1000 else None
