"""What a recorded generation can end in; both are httpx errors too, so a client's handlers see them."""

from __future__ import annotations

import httpx

from rollout_log.errors import RolloutLogError
from rollout_log.fold import Rollout

__all__ = ["GenerationFailed", "GenerationRefused"]


class GenerationFailed(RolloutLogError, httpx.HTTPError):
    """A sample could not be finished, retries included. `rollout` is what there is of it."""

    def __init__(self, message: str, rollout: Rollout) -> None:
        httpx.HTTPError.__init__(self, message)
        self.rollout = rollout

    def __reduce__(self) -> tuple[type[GenerationFailed], tuple[str, Rollout]]:
        """Travel between processes, as an actor's error does."""
        return type(self), (str(self), self.rollout)


class GenerationRefused(GenerationFailed):
    """The engine will not serve this request, now or later; trying again would not help."""
