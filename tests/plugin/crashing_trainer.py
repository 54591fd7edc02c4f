"""A trainer in a process of its own, which a test kills: `python crashing_trainer.py ENGINE LOG CHECKPOINTS`.

Step 0 ends well and is saved, its two aborted groups wait in the buffer, which no checkpoint has. Step 1
begins once the test has given the engine new weights; it takes those groups and two new ones, and holds
until the process is killed.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

from trainer.layouts import NEW_VIME
from trainer.trainer_double import TrainerDouble
from trainer.truth import prompt_text

__all__ = ["QUESTIONS", "settings"]

QUESTIONS = [
    prompt_text(0, tokens=30),
    prompt_text(1, tokens=25),
    prompt_text(2, tokens=40, hold=20),
    prompt_text(3, tokens=50, hold=31),
    prompt_text(4, tokens=45, hold=12),
    prompt_text(5, tokens=9),
]


def settings(checkpoints: Path) -> dict[str, Any]:
    return {
        "generate": "rollout_log.vime.generate",
        "questions": QUESTIONS,
        "load": str(checkpoints),
        "save": str(checkpoints),
    }


def main(url: str, log: str, checkpoints: str) -> None:
    os.environ.update(ROLLOUT_LOG_DIR=log, ROLLOUT_LOG_WINDOW_MS="20")
    trainer = TrainerDouble(url, NEW_VIME, over_sampling=4, **settings(Path(checkpoints)))
    trainer.abort_when = lambda: Path(checkpoints, "four-hold").exists()
    with trainer:
        trainer.step(0)
        trainer.data_source.save(0)
        Path(checkpoints, "saved").touch()
        trainer.data_source.buffer.clear()  # so that the crash finds them where a checkpoint has them not
        trainer.args.over_sampling_batch_size = 2
        while not Path(checkpoints, "new-weights").exists():
            time.sleep(0.005)
        trainer.step(1)


if __name__ == "__main__":
    main(*sys.argv[1:])
