"""What has no date: the samples of a fixture, whose clock always begins at the same moment."""

from __future__ import annotations

__all__ = ["EPOCH_NS", "since_epoch_ns"]

EPOCH_NS = 10**18
"""When the earliest sample of a fixture began, for its reader: in 2001, before anything was recorded."""
_LONGEST_NS = 10**17
"""Of a fixture: three years."""


def since_epoch_ns(unix_ns: int) -> int | None:
    """Return how long after its fixture's earliest sample a stamp is, in ns; None for one that is a date."""
    return unix_ns - EPOCH_NS if 0 <= unix_ns - EPOCH_NS < _LONGEST_NS else None
