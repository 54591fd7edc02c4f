"""The trainers' debug dump: what `--load-debug-rollout-data` trains on again, `rollout_N.pt`.

The samples that a step consumed, in the order in which it did, with tokens, log-probs, masks, rewards and
everything else the trainer had on them; of an evaluation likewise, `rollout_eval_N.pt`. That is known only
where the step was closed (`rollout_log.vime.log_metrics`, `log_eval_metrics`); what is missing is named,
never made up.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from rollout_log.counting import several
from rollout_log.errors import RolloutLogError
from rollout_log.events import Closed
from rollout_log.export.samples import Options, Sample, whole
from rollout_log.extras import missing
from rollout_log.fold import Rollout
from rollout_log.response import Choice
from rollout_log.trainer.arrays import routed_experts
from rollout_log.trainer.storable import LEFT_OUT

__all__ = ["dump", "to_dict", "write"]

JSON = dict[str, Any]
_INT32 = ("rollout_top_p_token_ids", "rollout_top_p_token_offsets", "rollout_routed_experts")
_FLAGS = {
    False: "--custom-rollout-log-function-path rollout_log.vime.log_metrics",
    True: "--custom-eval-rollout-log-function-path rollout_log.vime.log_eval_metrics",
}


def write(samples: Iterable[Sample], path: Path, options: Options) -> None:
    """Write the dump of one step. Raises RolloutLogError, which names every sample and field missing."""
    if options.step is None:
        raise RolloutLogError("a debug dump is of one step: give --step N")
    data = dump(samples, options.step, evaluation=options.evaluation)
    try:
        import torch
    except ImportError as error:
        raise RolloutLogError(missing("a .pt file", "torch", error)) from error
    for sample in data["samples"]:
        for name in _INT32:
            if isinstance(sample.get(name), list):
                sample[name] = torch.tensor(sample[name], dtype=torch.int32)
        inputs = sample.get("multimodal_train_inputs") or {}
        inputs |= {name: torch.tensor(value) for name, value in inputs.items() if isinstance(value, list)}
    with whole(path) as draft:
        torch.save(data, draft)


def dump(samples: Iterable[Sample], step: int, *, evaluation: bool = False) -> JSON:
    """Return `{"rollout_id": step, "samples": […]}` of the samples that the step consumed, in order.

    Where it was run more than once, after a crash or before training as well, the last time counts, as in
    the trainer's own file. Raises RolloutLogError.
    """
    times, runs, left_out = defaultdict[int, dict[int, Sample]](dict), set[str](), 0
    for sample in samples:
        closed = sample.rollout.closed
        if closed is None or closed.step != step or closed.order is None:
            left_out += 1
        elif sample.rollout.evaluation is evaluation:
            times[closed.closed_unix_ns][closed.order] = sample
            runs.add(sample.entry.ref.run)
    what = f"{'evaluation' if evaluation else 'step'} {step}"
    if not times:
        raise RolloutLogError(
            f"the log does not say which samples the trainer took for {what} "
            f"({several(left_out, 'sample')} had a part in it): the run has to use {_FLAGS[evaluation]}"
        )
    if len(runs) > 1:
        raise RolloutLogError(f"{what} is in several runs, {', '.join(sorted(runs))}: read the log of one")
    consumed = times[max(times)]
    found = [to_dict(sample.rollout) for _, sample in sorted(consumed.items())]
    missing = [*_samples_missing(consumed), *_fields_missing(consumed, found)]
    if missing:
        shown = ", ".join(missing[:5]) + (f" and {len(missing) - 5} more" if len(missing) > 5 else "")
        raise RolloutLogError(f"the log does not have all of {what}: {shown}")
    return {"rollout_id": step, "samples": found}


def to_dict(rollout: Rollout) -> JSON:
    """Return a closed sample as the trainer's `Sample.to_dict` had it, without what was at its default."""
    opened, choice = rollout.opened, rollout.choice_or_first()
    closed = rollout.closed or Closed()
    values = {
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
    values |= _routing(values.get("rollout_routed_experts"), choice)
    return values


def _routing(stored: Any, choice: Choice) -> JSON:
    """Where it was too large to be stored, the routing of all tokens is in a frame, if the log keeps that."""
    shape = stored.get("shape", ()) if isinstance(stored, dict) else ()
    if len(shape) != 3 or choice.routed_experts is None or choice.routed_experts_start:
        return {}
    return {"rollout_routed_experts": routed_experts(choice.routed_experts, *shape)}


def _samples_missing(consumed: dict[int, Sample]) -> Iterator[str]:
    closings = [sample.rollout.closed or Closed() for sample in consumed.values()]
    count = max(1 + max(consumed), *(closed.of or 0 for closed in closings))
    yield from (
        f"the sample that was taken as number {order}" for order in range(count) if order not in consumed
    )


def _fields_missing(consumed: dict[int, Sample], found: Iterable[JSON]) -> Iterator[str]:
    for (_, sample), values in zip(sorted(consumed.items()), found, strict=True):
        if any(problem.code == "log_gap" for problem in sample.rollout.problems):
            yield f"part of {sample.entry.name!r} (log_gap)"
        for name in filter(lambda name: _lacks(values[name]), values):
            kept = " (setting rollout_log_keep: routed_experts)" if name == "rollout_routed_experts" else ""
            yield f"{name} of {sample.entry.name!r}{kept}"


def _lacks(value: Any) -> bool:
    """Whether something in a value was too large or too odd to be stored."""
    if isinstance(value, list):
        return bool(value) and isinstance(value[0], (dict, list)) and any(map(_lacks, value))
    return isinstance(value, dict) and (LEFT_OUT in value or any(map(_lacks, value.values())))
