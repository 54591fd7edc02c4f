"""The plug-in for slime.

--custom-generate-function-path rollout_log.slime.generate
--custom-rollout-log-function-path rollout_log.slime.log_metrics
--custom-eval-rollout-log-function-path rollout_log.slime.log_eval_metrics
"""

from __future__ import annotations

from typing import Any

from rollout_log.slime.request import SLIME, prepare
from rollout_log.trainer.generate import generate as _generate
from rollout_log.trainer.metrics import log_eval_metrics, log_metrics
from rollout_log.trainer.recorded import recorded_by
from rollout_log.trainer.resuming import generate_rollout as _generate_rollout

__all__ = ["generate", "generate_rollout", "log_eval_metrics", "log_metrics", "recorded"]

recorded = recorded_by(SLIME)
"""Decorator: records what a generate function posts through the trainer's shared HTTP client."""


async def generate(
    args: Any,
    sample: Any,
    sampling_params: dict[str, Any],
    evaluation: bool = False,
) -> Any:
    """Generate for one slime sample, every delta recorded; see `docs/vime.md`."""
    return await _generate(SLIME, prepare, args, sample, sampling_params, evaluation=evaluation)


generate.abort_mode = "request"  # type: ignore[attr-defined]  # for the versions of slime that know it


def generate_rollout(args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> Any:
    """slime's own rollout function; before its first step, groups that a crash left go back to the buffer.

    For `--rollout-function-path`, with the setting `rollout_log_resume: continue`.
    """
    return _generate_rollout(SLIME, args, rollout_id, data_source, evaluation=evaluation)
