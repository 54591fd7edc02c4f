"""What one event costs on its way from a read to the log, without HTTP and in warm caches (target 1).

Chunks go to 64 open requests in turn. The unit is typed decoding of a frame that is split already. `split`
is the splitter alone, `off` is `Exchange.feed` without a log, `on` with one, its thread and commits included.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import cycle
from pathlib import Path

from benchmarks.frames import chunks, decode, frames
from benchmarks.growth import opened
from benchmarks.measure import Row, cpu
from rollout_log.log import Log
from rollout_log.sse import FrameSplitter

__all__ = ["rows"]

STREAMS = 64
ROUNDS = 9


def split(each: int) -> float:
    """Return CPU seconds of splitting all chunks."""
    splitter = FrameSplitter()
    return cpu(lambda: [splitter.feed(chunk) for chunk in chunks(each)])


def feed(log: Log | None, each: int) -> float:
    """Return CPU seconds of feeding all chunks."""
    turns = cycle(opened(log, STREAMS))
    start = time.process_time()
    for chunk in chunks(each):
        next(turns).feed(chunk)
    if log is not None:
        log.flush_sync()
    return time.process_time() - start


def rows(*, quick: bool = False) -> Iterator[Row]:
    """Measure; the least of all rounds counts, as whatever disturbs only adds."""
    with (
        tempfile.TemporaryDirectory() as folder,
        Log.open(Path(folder) / "log", durability="window", window_ms=3_600_000) as log,
    ):
        works: dict[str, Callable[[int], float]] = {
            "typed": lambda _: cpu(lambda: [decode(frame) for frame in frames()]),
            "split": split,
            "off": lambda each: feed(None, each),
            "on": lambda each: feed(log, each),
        }
        for each in (1, 4, 16, 40):
            least = dict.fromkeys(works, float("inf"))
            for _ in range(1 if quick else ROUNDS):
                for name, work in works.items():
                    least[name] = min(least[name], work(each))
            for name in ("split", "off", "on"):
                what = f"{name}, {each} events a chunk, warm"
                yield Row("1", what, "typed decoding", least[name] / least["typed"])
