"""vime's rollout loop around a real engine; as a program, a trainer that is killed.

    python rollout_loop.py ROUTER LOG RESULT [KILL]

generates one greedy step of `KILLED` samples with recording and resuming on, and writes them to RESULT; or
ends by `kill -9`, once each sample has KILL tokens.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rollout_log.vime import generate
from trainer.sample_double import Sample
from trainer.trainer_double import NEW_VIME, Layout, TrainerDouble

__all__ = [
    "KILLED",
    "KILLED_TOKENS",
    "LENGTHS",
    "QUESTIONS",
    "RolloutLoop",
    "generate_to_length",
    "length_of",
]

QUESTIONS = [f"Question {number}: what is free?" for number in range(8)]
LENGTHS = [40, 300, 700, 50, 40, 500, 30, 30]
"""Of the responses to each; a step of two groups ends with its two shortest."""
KILLED = 16
KILLED_TOKENS = 1500


def length_of(sample: Sample) -> int:
    """Return how long a response is to be; groups that the loop dropped are followed by further ones."""
    return LENGTHS[(sample.group_index or 0) % len(LENGTHS)]


async def generate_to_length(
    args: Any, sample: Sample, sampling_params: dict[str, Any], evaluation: bool = False
) -> Any:
    """A generate function of somebody's own around the plug-in's."""
    length = length_of(sample)
    params = {**sampling_params, "max_new_tokens": length, "min_new_tokens": length}
    return await generate(args, sample, params, evaluation)


generate_to_length.abort_mode = "request"  # type: ignore[attr-defined]  # as the plug-in's own has it


class RolloutLoop(TrainerDouble):
    """The loop, greedy; what its samples have to be is asked of the engine instead of computed."""

    def __init__(self, url: str, layout: Layout = NEW_VIME, **settings: Any) -> None:
        super().__init__(url, layout, timeout=300.0, **settings)
        self.sampling_params["temperature"] = 0.0

    def _check(self, samples: Iterable[Sample]) -> None:
        self.problems += self.watch.problems
        self.watch.problems.clear()


def main(url: str, log: str, result: str, kill: str | None = None) -> None:
    os.environ.update(ROLLOUT_LOG_DIR=log, ROLLOUT_LOG_RESUME="continue")
    questions = [f"Question {number}: what is a kill?" for number in range(KILLED)]
    loop = RolloutLoop(
        url,
        generate="rollout_log.vime.generate",
        questions=questions,
        groups=KILLED,
        samples=1,
        max_tokens=KILLED_TOKENS,
    )
    loop.sampling_params["min_new_tokens"] = KILLED_TOKENS

    def look() -> None:
        loop.watch.look()
        lengths = [sample.response_length for sample in loop.watch.samples]
        if kill is not None and len(lengths) == KILLED and min(lengths) >= int(kill):
            os.kill(os.getpid(), signal.SIGKILL)

    with loop:
        loop.loop.on_tick = look
        samples = loop.step(0)
    told = {
        sample.metadata["rollout_log"]["key"]: [
            sample.tokens[: -sample.response_length],
            sample.tokens[-sample.response_length :],
            sample.rollout_log_probs,
        ]
        for sample in samples
    }
    Path(result).write_text(json.dumps([loop.problems, told]))


if __name__ == "__main__":
    main(*sys.argv[1:])
