"""How things are compared: CPU time, A and B in turn in one process, medians; and the rows of the table."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

__all__ = ["Row", "cpu", "in_turn", "median_ratio"]


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    target: str
    """Number of the target."""
    what: str
    baseline: str
    """What it is measured against."""
    value: float
    limit: float | None = None
    """None: no target, for information."""
    unit: str = "×"
    """`×` for a ratio to the baseline."""
    at_least: bool = False
    """The limit is the least, not the most."""

    @property
    def met(self) -> bool | None:
        if self.limit is None:
            return None
        return self.value >= self.limit if self.at_least else self.value <= self.limit


def cpu(work: Callable[[], object]) -> float:
    """Return the CPU seconds of this process, all its threads, that a call takes."""
    start = time.process_time()
    work()
    return time.process_time() - start


def in_turn(runs: int, *works: Callable[[], object]) -> list[list[float]]:
    """Run all works in turn, `runs` times after a first time that does not count; CPU seconds of each."""
    times: list[list[float]] = [[] for _ in works]
    for work in works:
        work()
    for _ in range(runs):
        for work, found in zip(works, times, strict=True):
            found.append(cpu(work))
    return times


def median_ratio(of: Sequence[float], to: Sequence[float]) -> float:
    """Return the ratio of two medians."""
    return statistics.median(of) / statistics.median(to)
