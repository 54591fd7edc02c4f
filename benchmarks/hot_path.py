"""What one event costs on its way from a read to the log, without HTTP and in warm caches (target 1).

Chunks go to 64 open requests in turn. The unit is typed decoding of a frame that is split already. `split`
is the splitter alone, `off` is `Exchange.put` without a log, `on` with one, its thread and a commit after
four chunks of each request included.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from benchmarks.frames import chunks, decode, frames
from benchmarks.growth import feed, opened
from benchmarks.measure import Row, cpu
from rollout_log.log import Log
from rollout_log.sse import FrameSplitter

__all__ = ["rows"]

STREAMS = 64
TIMES = 8
ROUNDS = 9


def split(each: int) -> float:
    """Return CPU seconds of splitting all chunks."""
    splitter = FrameSplitter()
    return cpu(lambda: [splitter.feed(chunk) for chunk in chunks(each)])


def record(log: Log | None, each: int) -> float:
    """Return CPU seconds of recording all chunks, several times."""
    return feed(opened(log, STREAMS), TIMES * 4096, log, 4 * STREAMS, each=each) * 4096


def rows(*, quick: bool = False) -> Iterator[Row]:
    """Measure; the least of all rounds counts, as whatever disturbs only adds."""
    with (
        tempfile.TemporaryDirectory() as folder,
        Log.open(Path(folder) / "log", durability="window", window_ms=3_600_000) as log,
    ):
        works: dict[str, Callable[[int], float]] = {
            "typed": lambda _: cpu(lambda: [decode(frame) for frame in frames()]),
            "split": split,
            "off": lambda each: record(None, each),
            "on": lambda each: record(log, each),
        }
        for each in (1, 4, 16, 40):
            least = dict.fromkeys(works, float("inf"))
            for _ in range(1 if quick else ROUNDS):
                for name, work in works.items():
                    least[name] = min(least[name], work(each))
            for name in ("split", "off", "on"):
                what = f"{name}, {each} events a chunk, warm"
                yield Row("1", what, "typed decoding", least[name] / least["typed"])
