"""Going on after a crash: sample by sample, and for what waited in the trainer's buffer, group by group."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from itertools import accumulate
from typing import Any, TypeVar

from rollout_log.trainer.arrays import int32
from rollout_log.trainer.host import Host, Unsupported
from rollout_log.trainer.prompt import has_media, put_prompt
from rollout_log.trainer.recovery import Life
from rollout_log.trainer.session import Session, session_for
from rollout_log.trainer.storable import storable
from rollout_log.trainer.tally import METADATA, facts_of

__all__ = ["generate_rollout", "older_life", "restore", "resumed_by"]

_logger = logging.getLogger("rollout_log")
_Rollout = TypeVar("_Rollout", bound=Callable[..., Any])


def generate_rollout(
    host: Host, args: Any, rollout_id: int, data_source: Any, *, evaluation: bool = False
) -> Any:
    """Call the trainer's own rollout function; before the first training step, give groups back."""
    module = host.module(host.rollout)
    if module is None:
        raise Unsupported("this rollout function", f"{host.name}.{host.rollout} cannot be imported")
    return resumed_by(host)(module.generate_rollout)(args, rollout_id, data_source, evaluation=evaluation)


def resumed_by(host: Host) -> Callable[[_Rollout], _Rollout]:
    """Return the decorator for a trainer's rollout functions, `f(args, rollout_id, data_source, evaluation)`.

    Before its first training step, groups that a crash left unfinished go back to the data source.
    """

    def resumed(function: _Rollout) -> _Rollout:
        @functools.wraps(function)
        def rollout(
            args: Any, rollout_id: int, data_source: Any, evaluation: bool = False, **more: Any
        ) -> Any:
            if not evaluation:
                _give_back(host, session_for(args), args, rollout_id, data_source)
            return function(args, rollout_id, data_source, evaluation=evaluation, **more)

        return rollout  # type: ignore[return-value]  # the same signature, as `wraps` says

    return resumed


def _give_back(host: Host, session: Session, args: Any, rollout_id: int, data_source: Any) -> None:
    recovery = session.recovery(rollout_id)
    if recovery is None or session.gave_back:
        return
    session.gave_back = True
    if not getattr(args, "partial_rollout", False):
        session.say_once("no groups are given back: without --partial-rollout none waited")
        return
    try:
        kind = getattr(host.module("utils.types"), "Sample")  # noqa: B009 - of a module that may not be there
        lives = list(recovery.groups(args.n_samples_per_prompt))
        groups = [[restore(kind, life) for life in group] for group in lives if _whole(group)]
        if groups:
            data_source.add_samples(groups)
    except Exception as error:
        if session.settings.strict:
            raise
        session.say_once(
            "no groups are given back: %s (%s). Prompts that are issued again still go on from the log.",
            error,
            type(error).__name__,
        )
        return
    for life in (life for group in lives for life in group if life.is_unfinished):
        session.take(life)
    _logger.info(
        "gave back %d groups with %d tokens that a process before this one left unfinished",
        len(groups),
        sum(sample.response_length for group in groups for sample in group),
    )


def _whole(group: list[Life]) -> bool:
    """Whether the log has all that makes the samples: images it only describes."""
    return all(life.rollout.opened and "prompt" in _facts(life) for life in group) and not any(
        _facts(life).get("multimodal_inputs") for life in group
    )


def _facts(life: Life) -> dict[str, Any]:
    return life.rollout.opened.metadata if life.rollout.opened is not None else {}


def restore(kind: type[Any], life: Life) -> Any:
    """Make the trainer's sample again: aborted with its tokens where it was cut, else empty and pending.

    Old tokens get loss mask 0, whoever made them: the weights are not known to be those that go on.
    """
    rollout, facts = life.rollout, dict(_facts(life))
    opened = rollout.opened
    for ours in ("tokenizer", "sampling_params"):
        facts.pop(ours, None)
    metadata = dict(facts.pop("metadata", None) or {})
    metadata.pop(METADATA, None)
    sample = kind(metadata=metadata)
    for name, value in facts.items():
        setattr(sample, name, value)
    sample.index = opened.index if opened is not None else None
    sample.group_index = opened.group_index if opened is not None else None
    if life.is_unfinished:
        _fill(sample, life)
        sample.status = kind.Status.ABORTED
        sample.metadata = {**metadata, METADATA: {"key": life.entry.summary.key}}
        if opened is not None and opened.step is not None:
            sample.metadata.setdefault("start_rollout_id", opened.step)
    return sample


def _fill(sample: Any, life: Life) -> None:
    """Put the tokens of an older life into a sample."""
    rollout, choice = life.rollout, life.rollout.choice_or_first()
    sample.tokens = [*rollout.prompt_token_ids, *choice.token_ids]
    sample.response_length = life.length
    sample.rollout_log_probs = list(choice.logprobs)
    sample.loss_mask = [0] * life.length
    sample.weight_versions = [span.version for span in choice.weight_versions(rollout.dispatched)]
    if choice.sampling_mask:
        masks = [*choice.sampling_mask, *[None] * life.length][: life.length]
        sample.rollout_top_p_token_ids = int32([token for mask in masks for token in mask or ()])
        sample.rollout_top_p_token_offsets = int32([0, *accumulate(len(mask or ()) for mask in masks)])


def older_life(
    host: Host,
    session: Session,
    sample: Any,
    sampling_params: dict[str, Any],
    state: Any,
    *,
    evaluation: bool,
) -> Life | None:
    """Return what a sample goes on from after a crash, None if nothing; it has those tokens then."""
    recovery = None if evaluation else session.recovery(host.step())
    if recovery is None:
        return None
    if sample.response_length:
        key = facts_of(sample).get("key")
        life = session.given_back(key) if isinstance(key, str) else None
        return life if life is not None and life.length == sample.response_length else None
    if getattr(sample, "index", None) is None or has_media(sample):
        return None
    put_prompt(host, sample, state)
    life = recovery.claim(sample.index, sample.group_index, sample.tokens, storable(sampling_params))
    if life is not None:
        _fill(sample, life)
        sample.metadata = {**(sample.metadata or {}), METADATA: {"key": life.entry.summary.key}}
    return life
