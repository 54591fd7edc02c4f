"""Prompts in order, so that those a request begins with are found by bisection."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence

from rollout_log.record.base import common_prefix

__all__ = ["Prompts"]

Tokens = tuple[int, ...]


class Prompts:
    """A set of token sequences; a look-up costs a bisection for each prefix found, however many there are."""

    def __init__(self, prompts: Sequence[Tokens]) -> None:
        self._sorted = sorted(set(prompts))

    def prefixes_of(self, token_ids: Sequence[int]) -> Iterator[Tokens]:
        """Yield the prompts that `token_ids` begins with, longest first."""
        ids = tuple(token_ids)
        limit = ids
        while (place := bisect_right(self._sorted, limit)) > 0:
            found = self._sorted[place - 1]
            shared = common_prefix(found, ids)
            if shared == len(found):
                yield found
                if not found:
                    return
                shared -= 1
            # What is shorter and still a prefix sorts at or before this.
            limit = ids[:shared]

    def nearest(self, token_ids: Sequence[int]) -> tuple[Tokens, int] | None:
        """Return the prompt that shares the longest prefix, and that prefix's length."""
        ids = tuple(token_ids)
        place = bisect_right(self._sorted, ids)
        near = self._sorted[max(place - 1, 0) : place + 1]
        if not near:
            return None
        return max(((found, common_prefix(found, ids)) for found in near), key=lambda pair: pair[1])
