"""What is asked of the recorder for one sample."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from time import monotonic
from typing import Any

import msgspec

from rollout_log.events import Cause, Opened
from rollout_log.fold import Rollout

__all__ = ["Call"]


class Call(msgspec.Struct, kw_only=True):
    """What is asked of the recorder for one sample; everything but the first three has a default."""

    key: str
    url: str
    body: Mapping[str, Any]
    headers: Mapping[str, str] = {}
    base: int | None = None
    """Explicit length of the response this call goes on from; None: inferred from the body's ids."""
    cause: Cause | None = None
    opened: Opened | None = None
    """What else is known of the sample: step, group, index, metadata."""
    weight_version: Callable[[], str | None] | str | None = None
    """Weights loaded at dispatch; a function is asked before every request."""
    masks_offpolicy: bool = False
    """The trainer masks tokens of older weights, so a retry may go on across an update."""
    eos_token_ids: Collection[int] = ()
    decode: Callable[[list[int]], str] | None = None
    """Tokens to text, where stop strings have to be judged."""
    should_stop: Callable[[], bool] | None = None
    """Whether the run aborts: asked between reads and at least every second. Nothing is retried then.

    The live rollout may be behind what was read; see `on_read`.
    """
    stop_grace_s: float = 0.0
    """How long a stream may go on once the run aborts, so that the engine can say its last word."""
    on_chunk: Callable[[bytes], None] | None = None
    """Called with every read of a response at once, before `on_read` is."""
    on_read: Callable[[Rollout], None] | None = None
    """Called when a request begins, whenever some of its response was folded, and with everything before the
    call ends. What it raises ends the call.

    A response is folded 32 kB at a time (`record.exchange.FOLD_AT`; some eighty tokens with log-probs), and
    where nothing more came for a second.
    """

    def stopper(self) -> Callable[[], bool] | None:
        """Return what says that a stream has to stop: the run aborts, and its grace is over."""
        should_stop, grace = self.should_stop, self.stop_grace_s
        if should_stop is None or not grace:
            return should_stop
        since: list[float] = []

        def stops() -> bool:
            if not should_stop():
                return False
            if not since:
                since.append(monotonic())
            return monotonic() - since[0] >= grace

        return stops
