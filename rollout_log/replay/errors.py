"""What a replay can fail in."""

from __future__ import annotations

import httpx

from rollout_log.errors import RolloutLogError

__all__ = ["ReplayMiss"]


class ReplayMiss(RolloutLogError, httpx.TransportError):
    """A request that was not recorded, or was made more often than recorded.

    The message names the nearest recording and the first difference.
    """

    def __init__(self, message: str, *, nearest: str | None = None, busy: bool = False) -> None:
        httpx.TransportError.__init__(self, message)
        self.nearest = nearest
        """Name of the sample that comes nearest, where there is one."""
        self.busy = busy
        """The recording is there, and being served: asking again when that is over may succeed."""
