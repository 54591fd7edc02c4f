"""JSON that any program can read: ASCII, without NaN and infinities, whatever an engine sent."""

from __future__ import annotations

import json
import math
from typing import Any

import msgspec

__all__ = ["to_json"]


def to_json(value: Any) -> str:
    """Write one value as ASCII JSON without line breaks; NaN and infinities become null.

    Takes structs, dataclasses, paths and bytes (base64) as well.
    """
    plain = _finite(msgspec.to_builtins(value, str_keys=True, enc_hook=str))
    return json.dumps(plain, ensure_ascii=True, allow_nan=False, separators=(",", ":"))


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value
