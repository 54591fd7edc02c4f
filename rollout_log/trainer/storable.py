"""Whatever a trainer keeps in its samples, as JSON has it."""

from __future__ import annotations

from typing import Any

import msgspec

__all__ = ["LEFT_OUT", "storable"]

LEFT_OUT = "$left_out"
"""Names the type, and `shape` the shape, where a value was too large or too odd to be stored."""

_LARGEST_ARRAY = 1 << 16
"""Elements; larger arrays are described, not stored."""
_DEEPEST = 32


def storable(value: Any) -> Any:
    """Return a value as JSON would have it; what JSON has no word for becomes its description."""
    try:
        plain = msgspec.to_builtins(value, str_keys=True, enc_hook=_plain)
        msgspec.msgpack.encode(plain)
    except (TypeError, ValueError, OverflowError, RecursionError):
        return _piecewise(value, _DEEPEST)
    return plain


def _piecewise(value: Any, depth: int) -> Any:
    """As far as it goes: one odd value in a dict does not take the others with it."""
    if depth == 0:
        return _described(value)
    if isinstance(value, dict):
        return {_text(str(name)): _piecewise(item, depth - 1) for name, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_piecewise(item, depth - 1) for item in value]
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, int):
        return value if -(2**63) <= value < 2**64 else str(value)
    try:
        plain = msgspec.to_builtins(value, str_keys=True, enc_hook=_plain)
        msgspec.msgpack.encode(plain)
    except (TypeError, ValueError, OverflowError, RecursionError):
        return _described(value)
    return plain


def _text(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode()


def _plain(value: Any) -> Any:
    """Arrays and array scalars of numpy and torch as lists and numbers."""
    if not hasattr(value, "tolist"):
        return _described(value)
    size = getattr(value, "size", 0)
    elements = value.numel() if hasattr(value, "numel") else size
    return value.tolist() if elements <= _LARGEST_ARRAY else _described(value)


def _described(value: Any) -> dict[str, Any]:
    described: dict[str, Any] = {LEFT_OUT: f"{type(value).__module__}.{type(value).__qualname__}"}
    shape = getattr(value, "shape", None)
    if isinstance(shape, tuple) and all(isinstance(length, int) for length in shape):
        described["shape"] = list(shape)
    return described
