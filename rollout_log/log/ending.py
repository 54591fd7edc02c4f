"""Before a log ends, those who hold events back for a moment are told, so that they hand them over."""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["before_end", "tell_before_end"]

_told: list[Callable[[], None]] = []


def tell_before_end(hand_over: Callable[[], None]) -> None:
    """Have `hand_over` called before a log is closed, or flushed as the process ends; from any thread.

    It must not raise, and not take long.
    """
    _told.append(hand_over)


def before_end() -> None:
    """Tell them."""
    for hand_over in _told:
        hand_over()
