"""What the package makes of a stream, in the terms of `wire`."""

from __future__ import annotations

from engine.wire import Answer
from rollout_log.fold import Rollout

__all__ = ["told"]


def told(rollout: Rollout) -> dict[int, Answer]:
    """What a rollout says, by the index of the choice."""
    return {
        index: Answer(list(choice.token_ids), list(choice.logprobs), choice.finish_reason, choice.stop_reason)
        for index, choice in rollout.choices.items()
    }
