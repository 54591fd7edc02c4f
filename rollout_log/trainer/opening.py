"""What is known of a sample when it begins: enough to make it again after a crash."""

from __future__ import annotations

from typing import Any

from rollout_log.events import Opened
from rollout_log.trainer.storable import storable

__all__ = ["opened_for"]

_GENERATED = frozenset(
    {
        "tokens",
        "response",
        "response_length",
        "reward",
        "loss_mask",
        "weight_versions",
        "status",
        "index",
        "group_index",
        "spec_info",
        "prefix_cache_info",
        "trace",
        "multimodal_train_inputs",
        "teacher_log_probs",
        "remove_sample",
        "non_generation_time",
    }
)
"""Attributes of a sample that generation makes, or that `Opened` has fields for."""


def opened_for(
    args: Any,
    sample: Any,
    *,
    key: str,
    run: str,
    step: int | None,
    evaluation: bool,
    start: int,
    sampling_params: dict[str, Any] | None = None,
) -> Opened:
    """Return what is known of a sample when it is opened; its prompt ends before the last `start` tokens."""
    attributes = {
        name: value
        for name, value in vars(sample).items()
        if name not in _GENERATED and not name.startswith("rollout_") and not _is_empty(value)
    }
    metadata = {
        "tokenizer": getattr(args, "hf_checkpoint", None),
        "sampling_params": sampling_params,
        **attributes,
    }
    return Opened(
        key=key,
        run=run,
        prompt_token_ids=list(sample.tokens[: len(sample.tokens) - start]),
        step=step,
        evaluation=evaluation,
        group_index=getattr(sample, "group_index", None),
        index=getattr(sample, "index", None),
        metadata={name: storable(value) for name, value in metadata.items() if value is not None},
    )


def _is_empty(value: Any) -> bool:
    return value is None or (isinstance(value, (str, list, dict)) and not value)
