"""The trainers' debug dump: what `--load-debug-rollout-data` trains on again, `rollout_N.pt`.

The samples that a step consumed, in the order in which it did, with tokens, log-probs, masks, rewards and
everything else the trainer had on them. That is known only where the step was closed
(`--custom-rollout-log-function-path rollout_log.vime.log_metrics`); what is missing is named, never made up.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rollout_log.errors import RolloutLogError
from rollout_log.events import Closed
from rollout_log.export.samples import Options, Sample, whole
from rollout_log.fold import Rollout

__all__ = ["dump", "to_dict", "write"]

JSON = dict[str, Any]
_TENSORS = ("rollout_top_p_token_ids", "rollout_top_p_token_offsets", "rollout_routed_experts")
_DESCRIBED = re.compile(r"<[\w.]+( of shape \(.*\))?>")
"""What stands for a value that was too large to keep."""


def write(samples: Iterable[Sample], path: Path, options: Options) -> None:
    """Write the dump of one step. Raises RolloutLogError, which names every sample and field missing."""
    if options.step is None:
        raise RolloutLogError("a debug dump is of one step: give --step N")
    data = dump(samples, options.step)
    try:
        import torch
    except ImportError as error:
        raise RolloutLogError(f"{path} takes PyTorch: pip install torch") from error
    for sample in data["samples"]:
        for name in _TENSORS:
            if isinstance(sample.get(name), list):
                sample[name] = torch.tensor(sample[name], dtype=torch.int32)
    with whole(path) as draft:
        torch.save(data, draft)


def dump(samples: Iterable[Sample], step: int) -> JSON:
    """Return `{"rollout_id": step, "samples": […]}` of the samples that the step consumed, in order."""
    consumed: dict[int, Sample] = {}
    left_out = 0
    for sample in samples:
        closed = sample.rollout.closed
        if closed is None or closed.step != step or closed.order is None:
            left_out += 1
        else:
            consumed[closed.order] = sample
    if not consumed:
        raise RolloutLogError(
            f"no sample of step {step} was closed as consumed ({left_out} others took part in it): the run "
            "has to use --custom-rollout-log-function-path rollout_log.vime.log_metrics"
        )
    missing = [f"the sample consumed as number {i}" for i in range(max(consumed)) if i not in consumed]
    found = []
    for order in sorted(consumed):
        sample = consumed[order]
        values = to_dict(sample.rollout)
        missing += [f"{name} of {sample.entry.name!r}" for name in _lacking(values)]
        found.append(values)
    if missing:
        shown = ", ".join(missing[:5]) + (f" and {len(missing) - 5} more" if len(missing) > 5 else "")
        raise RolloutLogError(f"the log does not have all of step {step}: {shown}")
    return {"rollout_id": step, "samples": found}


def to_dict(rollout: Rollout) -> JSON:
    """Return a closed sample as the trainer's `Sample.to_dict` had it, without what was at its default."""
    opened, choice = rollout.opened, rollout.choice_or_first()
    closed = rollout.closed or Closed()
    return {
        "index": opened.index if opened else None,
        "group_index": opened.group_index if opened else None,
        "tokens": [*rollout.prompt_token_ids, *choice.token_ids],
        "response_length": len(choice.token_ids),
        "rollout_log_probs": choice.logprobs,
        "loss_mask": choice.loss_mask,
        "weight_versions": [span.version for span in choice.weight_versions(rollout.dispatched)],
        "status": closed.status,
        "reward": closed.reward,
        **closed.sample,
    }


def _lacking(values: JSON) -> list[str]:
    return [name for name, value in values.items() if isinstance(value, str) and _DESCRIBED.fullmatch(value)]
