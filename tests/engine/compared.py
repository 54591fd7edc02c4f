"""Fixtures that are recorded again, compared with those that are shipped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from rollout_log.fixture import FixtureReader
from rollout_log.view import view

__all__ = ["SHIPPED", "assert_same_samples"]

SHIPPED = Path(__file__).resolve().parents[2] / "fixtures"
_ONCE_ONLY = {"events", "requests", "usage", "weight_versions"}
"""Fields of a sample in which there are times, cut points and what the engine had in its cache."""


def assert_same_samples(again: Path) -> None:
    """Assert that a fixture folds like the shipped one of its name.

    Request ids, times and, where a request goes on from another one, the place are aside.
    """
    shipped, new = _samples(SHIPPED / again.name), _samples(again)
    assert new.keys() == shipped.keys()
    for name in shipped:
        assert new[name] == shipped[name], name


def _samples(path: Path) -> dict[str, Any]:
    with FixtureReader.open(path) as reader:
        return {
            f"{entry.name}#{index}": _told(reader.rollout(entry.ref), index)
            for entry in reader.samples()
            for index in (reader.rollout(entry.ref).choices or [None])
        }


def _told(rollout: Any, choice: int | None) -> dict[str, Any]:
    shown = view(rollout, choice=choice)
    told = {name: value for name, value in msgspec.to_builtins(shown).items() if name not in _ONCE_ONLY}
    told["versions"] = [span.version for span in shown.weight_versions]
    # What is met in between depends on how long an engine takes to start.
    first, last = shown.requests[0], shown.requests[-1]
    told["ends"] = [(each.http_status, each.ended) for each in (first, last)]
    told["problems"] = sorted({problem.code for problem in shown.problems})
    if first is last:
        told["tokens"] = (first.base, first.tokens)
    return told
