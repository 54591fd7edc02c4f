"""Numbers and the texts that engines print them as.

Only a text that is printed the same way again may be kept as a number.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["STYLES", "find_floats", "find_ints", "find_number", "print_floats", "print_ints"]

STYLES = (0, 1)
"""How floats are printed: as Python does; or with `1e-7` for `1e-07` and no exponent above that of 1e-6."""
_INT = re.compile(rb"(?:0|-?[1-9][0-9]{0,17})\Z").match
_FLOAT = re.compile(rb"-?[0-9]{1,30}\.?[0-9]{0,30}(?:[eE][-+]?[0-9]{1,4})?\Z").match


def find_ints(texts: Iterable[bytes]) -> dict[bytes, int]:
    """Return the numbers of those texts that are integers of up to 18 digits, as `print_ints` prints them."""
    return {text: int(text) for text in texts if _INT(text)}


def find_floats(texts: Iterable[bytes], style: int) -> dict[bytes, float]:
    """Return the numbers of those texts that `print_floats` prints the same way."""
    candidates = list(filter(_FLOAT, texts))
    values = list(map(float, candidates))
    printed = print_floats(values, style)
    return {
        text: value for text, value, ours in zip(candidates, values, printed, strict=True) if text == ours
    }


def find_number(text: bytes) -> int | float | None:
    return int(text) if _INT(text) else float(text) if _FLOAT(text) else None


def _short(text: str) -> str:
    """Turn Python's `1.5e-05` into `0.000015` and `1e-07` into `1e-7`, as Rust's and C++'s printers write."""
    digits, _, exponent = text.partition("e-")
    if not exponent:
        return text
    if exponent != "05":
        return f"{digits}e-{int(exponent)}"
    sign, digits = ("-", digits[1:]) if digits[0] == "-" else ("", digits)
    return f"{sign}0.0000{digits.replace('.', '')}"


def print_floats(values: Iterable[float], style: int) -> list[bytes]:
    texts = list(map(repr, values))
    if style == 1:
        texts = [_short(text) if "e" in text else text for text in texts]
    return "\n".join(texts).encode().split(b"\n") if texts else []


def print_ints(values: Iterable[int]) -> list[bytes]:
    text = ",".join(map(str, values))
    return text.encode().split(b",") if text else []
