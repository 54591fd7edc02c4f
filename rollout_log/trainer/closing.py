"""What the trainer made of a sample, as its last event: everything that its fold does not tell."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import msgspec

from rollout_log.events import Closed
from rollout_log.fold import Rollout
from rollout_log.trainer.storable import storable

__all__ = ["Fingerprint", "close_consumed", "fingerprints", "folded", "rest_of"]

_IN_CLOSED = ("status", "reward")


class Fingerprint(msgspec.Struct, frozen=True):
    """What tells whether a value is the one that it was taken of, in the same process."""

    hash: int


def close_consumed(sample: Any, known: Mapping[str, Any], consumed: Closed) -> Closed:
    """Return the event of a sample that was consumed when, where and as which one `consumed` says.

    `known`: what the log has of it (`folded`), or `fingerprints` of that.
    """
    status = getattr(sample.status, "value", sample.status)
    return msgspec.structs.replace(
        consumed, status=str(status), reward=storable(sample.reward), sample=rest_of(sample, known)
    )


def rest_of(sample: Any, known: Mapping[str, Any]) -> dict[str, Any]:
    """Return a sample's attributes by name, but for those that are as the fold has them or at their defaults.

    `Sample.from_dict` of these, with tokens, log-probs, mask and versions of the fold, status and reward of
    the event, is the sample again. Tensors above 65,536 elements and objects are named only (`storable`).
    """
    known = {**_defaults(type(sample)), **known}
    return {
        name: storable(_plain(value))
        for name, value in _attributes(sample).items()
        if name not in _IN_CLOSED and not (name in known and _same(value, known[name]))
    }


def _attributes(sample: Any) -> Mapping[str, Any]:
    return vars(sample) if hasattr(sample, "__dict__") else dataclasses.asdict(sample)


def _plain(value: Any) -> Any:
    """Counters of a sample know how to become a dict."""
    return value.to_dict() if hasattr(value, "to_dict") else value


def folded(rollout: Rollout) -> dict[str, Any]:
    """Return the attributes of a sample that the log gives back without its closing."""
    opened, choice = rollout.opened, rollout.choice_or_first()
    found: dict[str, Any] = {
        "tokens": [*rollout.prompt_token_ids, *choice.token_ids],
        "response_length": len(choice.token_ids),
        "rollout_log_probs": choice.logprobs,
        "loss_mask": choice.loss_mask,
        "weight_versions": [span.version for span in choice.weight_versions(rollout.dispatched)],
    }
    if opened is not None:
        found |= {"index": opened.index, "group_index": opened.group_index}
    return found


def fingerprints(values: Mapping[str, Any]) -> dict[str, Fingerprint]:
    """Return what is left of values when they are let go: nothing, of those that have no hash."""
    found = {name: _fingerprint(value) for name, value in values.items()}
    return {name: print_ for name, print_ in found.items() if print_ is not None}


def _fingerprint(value: Any) -> Fingerprint | None:
    try:
        return Fingerprint(hash(tuple(value) if type(value) is list else value))
    except TypeError:
        return None


def _defaults(kind: type[Any]) -> dict[str, Any]:
    if not dataclasses.is_dataclass(kind):
        return {}
    defaults = {}
    for field in dataclasses.fields(kind):
        if field.default is not dataclasses.MISSING:
            defaults[field.name] = field.default
        elif field.default_factory is not dataclasses.MISSING:
            defaults[field.name] = field.default_factory()
    return defaults


def _same(value: Any, other: Any) -> bool:
    """Whether two values are equal; NaN equals NaN, and what cannot be compared differs."""
    if type(other) is Fingerprint:
        return _fingerprint(value) == other
    if value is other:
        return True
    if type(value) is list and type(other) is list:
        return len(value) == len(other) and (
            value == other or all(_equal(one, another) for one, another in zip(value, other, strict=True))
        )
    return type(value) is type(other) and _equal(value, other)


def _equal(value: Any, other: Any) -> bool:
    if isinstance(value, float) and isinstance(other, float) and math.isnan(value):
        return math.isnan(other)
    try:
        return bool(value == other)
    except (TypeError, ValueError, RuntimeError):  # arrays of several elements have no truth
        return False
