"""Where in a sample a request goes on from: the inference of `base`.

Pure: token ids in, a `Start` out. An explicit base goes before inference; what the engine saw goes before
both, so ids that differ from the folded response are observed, never assumed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from rollout_log.events import Cause
from rollout_log.fold import Rollout

__all__ = ["Start", "common_prefix", "start_of"]


class Start(NamedTuple):
    """How a request joins its sample: truncate to `keep`, observe `observed`, go on at `base`."""

    keep: int
    observed: list[int]
    cause: Cause

    @property
    def base(self) -> int:
        """Length of the response the request starts from."""
        return self.keep + len(self.observed)


def common_prefix(left: Sequence[int], right: Sequence[int]) -> int:
    """Return the length of the longest common prefix."""
    limit = min(len(left), len(right))
    if left[:limit] == right[:limit]:
        return limit
    low, high = 0, limit  # comparing slices is C speed, so bisect instead of walking
    while high - low > 1:
        middle = (low + high) // 2
        if left[low:middle] == right[low:middle]:
            low = middle
        else:
            high = middle
    return low


def start_of(rollout: Rollout, token_ids: Sequence[int] | None, base: int | None = None) -> Start:
    """Infer where a request starts.

    `token_ids` are the request's, prompt included and known to begin with the sample's prompt; None when
    it has text instead, which only the first request of a sample may. `base` is the caller's own word.
    """
    response = rollout.choice_or_first().token_ids
    ids = list(token_ids[len(rollout.prompt_token_ids) :]) if token_ids is not None else []
    keep = common_prefix(ids, response)
    if base is not None:
        keep = max(min(keep, base), 0)
    observed = ids[keep:]
    return Start(keep, observed, _cause(rollout, keep, observed))


def _cause(rollout: Rollout, keep: int, observed: Sequence[int]) -> Cause:
    request = rollout.request
    if request is None:
        return "resume" if keep else "first"
    if observed:
        return "turn"
    return "resume" if rollout.ended_of(request) in ("aborted", "cancelled") else "retry"
