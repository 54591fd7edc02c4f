"""Weight versions are whatever an engine says; most trainers count them, and then they have an order."""

from __future__ import annotations

__all__ = ["number_of", "version_order", "version_words"]

_NEVER_SET = "default"
"""What vLLM and SGLang say until somebody sets a version."""

_MOST_DIGITS = 18
"""Of a number that somebody counted up to; Python refuses to read thousands of them."""


def number_of(version: str) -> int | None:
    """Return a version as the number it is, None where it is another text."""
    return int(version) if len(version) <= _MOST_DIGITS and version.isdecimal() else None


def version_order(version: str) -> tuple[bool, int, str]:
    """Sort versions that are numbers as numbers, before the others."""
    number = number_of(version)
    return (True, 0, version) if number is None else (False, number, "")


def version_words(version: str) -> str:
    """Return a version as a person is told it."""
    return f"{version} (never set)" if version == _NEVER_SET else version
