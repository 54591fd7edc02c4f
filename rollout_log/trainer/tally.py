"""Counters of one sample, in its metadata: they travel with it, between processes and into debug dumps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

from rollout_log.fold import Rollout
from rollout_log.request import Request

__all__ = ["METADATA", "add_up", "facts_of", "tally"]

METADATA = "rollout_log"
"""Name in `sample.metadata`."""
_SUMS = ("requests", "retries", "salvaged", "salvaged_by_retry", "discarded", "bytes")
_CAUSES = ("retried", "aborted")


def facts_of(sample: Any) -> dict[str, Any]:
    """Return what a sample carries of ours; empty where it carries nothing."""
    known = (getattr(sample, "metadata", None) or {}).get(METADATA)
    return known if isinstance(known, dict) else {}


def tally(
    before: Mapping[str, Any],
    rollout: Rollout,
    requests: Sequence[Request],
    *,
    start: int,
    discarded: int,
    aborted: bool,
) -> dict[str, Any]:
    """Return a sample's counters after a call that made `requests`, from those it came with.

    `start`: tokens the sample came with, which an earlier call had generated: salvaged by resuming, once,
    whatever number of calls it took. `discarded`: what its fold had thrown away before this call.
    """
    retries = [
        (earlier.ended or "superseded", later)
        for earlier, later in pairwise(requests)
        if later.cause == "retry"
    ]
    # Tokens that a request which broke off had made, and the sample kept.
    by_retry = _number(before, "salvaged_by_retry") + (max(retries[-1][1].base - start, 0) if retries else 0)
    ended = rollout.ended_of(requests[-1]) if requests and aborted else None
    return {
        "requests": _number(before, "requests") + len(requests),
        "retries": _number(before, "retries") + len(retries),
        "salvaged": start + by_retry,
        "salvaged_by_retry": by_retry,
        "discarded": _number(before, "discarded") + rollout.discarded - discarded,
        "bytes": _number(before, "bytes") + sum(request.bytes for request in requests),
        "retried": _more(before, "retried", (cause for cause, _ in retries)),
        "aborted": _more(before, "aborted", [ended or "cancelled"] if aborted else []),
    }


def add_up(facts: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Return the sums over samples: `tokens_salvaged_by_resume`, …, `retries/reset`, `aborts/cancelled`, …"""
    sums: Counter[str] = Counter(dict.fromkeys((*_SUMS, "samples"), 0))
    causes: Counter[str] = Counter()
    for each in facts:
        sums["samples"] += 1
        for name in _SUMS:
            sums[name] += _number(each, name)
        for kind, label in zip(_CAUSES, ("retries", "aborts"), strict=True):
            for cause, count in _counts(each, kind).items():
                causes[f"{label}/{cause}"] += count
    return {
        "samples": sums["samples"],
        "requests": sums["requests"],
        "retries": sums["retries"],
        "tokens_salvaged_by_resume": sums["salvaged"] - sums["salvaged_by_retry"],
        "tokens_salvaged_by_retry": sums["salvaged_by_retry"],
        "tokens_discarded": sums["discarded"],
        "bytes": sums["bytes"],
        **causes,
    }


def _number(facts: Mapping[str, Any], name: str) -> int:
    value = facts.get(name, 0)
    return value if isinstance(value, int) else 0


def _counts(facts: Mapping[str, Any], name: str) -> dict[str, int]:
    counts = facts.get(name)
    return {str(cause): _number(counts, cause) for cause in counts} if isinstance(counts, dict) else {}


def _more(before: Mapping[str, Any], name: str, causes: Iterable[str]) -> dict[str, int]:
    return dict(Counter(_counts(before, name)) + Counter(causes))
