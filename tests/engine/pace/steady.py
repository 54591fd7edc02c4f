"""Loaded by the engine under test: a step of the tiny model takes as long as one of a small real model.

Without it the process that computes is thousands of tokens ahead of the one that serves HTTP, and there is
nothing left to abort.
"""

from __future__ import annotations

import time
from typing import Any

from vllm.v1.sample.logits_processor import LogitsProcessor

STEP_S = 0.004


class Steady(LogitsProcessor):
    """Changes no logit."""

    def __init__(self, vllm_config: Any, device: Any, is_pin_memory: bool) -> None:
        pass

    def is_argmax_invariant(self) -> bool:
        """Else it would be left out of greedy steps."""
        return False

    def update_state(self, batch_update: Any) -> None:
        pass

    def apply(self, logits: Any) -> Any:
        time.sleep(STEP_S)
        return logits
