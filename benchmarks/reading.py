"""Reading (target 6): the fold against bare decoding, and one sample out of a large log."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from benchmarks.frames import decode, events, frames
from benchmarks.generate import write_log
from benchmarks.measure import Row, cpu, in_turn, median_ratio
from rollout_log.fold import fold
from rollout_log.log import LogReader

__all__ = ["rows"]

TOKENS = 4096


def opened_and_read(path: Path, key: str) -> Callable[[], object]:
    """Return what opens a log and folds one sample."""

    def work() -> None:
        with LogReader.open(path) as reader:
            reader.rollout(key)

    return work


def rows(*, quick: bool = False) -> Iterator[Row]:
    """Measure target 6."""
    runs = 1 if quick else 9
    numbered = list(enumerate(events(TOKENS)))
    of, to = in_turn(runs, lambda: fold(numbered), lambda: [decode(frame) for frame in frames(TOKENS)])
    yield Row("6", "fold of recorded frames", "typed decoding of them", median_ratio(of, to), 2.5)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_log(folder / "small", 1_000, 10)
        write_log(folder / "large", 2_000 if quick else 100_000, 50, 0 if quick else 1.0)
        large = opened_and_read(folder / "large", "s5-g3-2")
        of, to = in_turn(runs, large, opened_and_read(folder / "small", "s5-g3-2"))
        what = "one sample of 100,000 (1.2 GB)"
        yield Row("6", what, "one of 1,000 (2 MB)", median_ratio(of, to), 1.5)
        times = statistics.median(cpu(large) for _ in range(runs))
        yield Row("6", what, "CPU, opening the log included", times * 1000, 10.0, unit="ms")
