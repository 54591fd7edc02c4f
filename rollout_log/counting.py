"""Numbers with what they count, for people."""

from __future__ import annotations

__all__ = ["several"]


def several(number: int, noun: str) -> str:
    """Show `1 sample`, `1,024 samples`."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"
