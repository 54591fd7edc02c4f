"""The writer (target 4): CPU against an append-only file, and what the event loop notices of a slow disk.

The file gets every event as a record of its own: sample, sequence, length, checksum, event; flushed and
synced at the same moments as the log commits.
"""

from __future__ import annotations

import asyncio
import os
import struct
import tempfile
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest.mock import patch

from benchmarks.frames import frames
from benchmarks.measure import Row, in_turn, median_ratio
from rollout_log.events import Delta, Opened, encode_events
from rollout_log.log import Log
from rollout_log.log.segment import Segment

__all__ = ["rows"]

SAMPLES = 512
COMMITS = 4


class File:
    """The least that a log can be."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("wb")
        self._lock = threading.Lock()

    def append(self, sample: int, first: int, events: list[Delta]) -> None:
        """Write events down."""
        with self._lock:
            data = encode_events(events)
            header = struct.pack(">QQI", sample, first, len(data))
            self._file.write(header + struct.pack(">I", zlib.crc32(data, zlib.crc32(header))) + data)

    def sync(self) -> None:
        """Make all of it durable."""
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def interleaved(
    append: Callable[[int, int, list[Delta]], object], sync: Callable[[], object], each: int, commits: int
) -> Callable[[], None]:
    """Return what appends `each` events of every sample, one by one and in turn, between two commits."""
    data = frames()
    sequence = 0

    def work() -> None:
        nonlocal sequence
        for _ in range(commits):
            for _ in range(each):
                sequence += 1
                for sample in range(SAMPLES):
                    append(sample, sequence, [Delta(0, data[(sequence * 97 + sample) % 4096], sequence)])
            sync()

    return work


def throughput(folder: Path, each: int, *, quick: bool) -> float:
    """Return CPU per event of the log ÷ that of the file."""
    file = File(folder / f"file-{each}")
    commits = 1 if quick else COMMITS
    with Log.open(folder / f"log-{each}", durability="window", window_ms=3_600_000) as log:
        ordinals = []
        for place in range(SAMPLES):
            opened = Opened(key=f"sample-{place}")
            ordinals.append(log.create(opened))
            log.append(ordinals[-1], 0, [opened])
        assert ordinals == list(range(SAMPLES))
        log.flush_sync()
        ours = interleaved(log.append, log.flush_sync, each, commits)
        theirs = interleaved(file.append, file.sync, each, commits)
        of, to = in_turn(1 if quick else 7, ours, theirs)
    file.close()
    return median_ratio(of, to)


async def lateness(log: Log | None, seconds: float) -> list[float]:
    """Return by how many seconds a timer of 1 ms was late, while 64 samples are appended to in turn."""
    ordinals = []
    for place in range(64 if log is not None else 0):
        opened = Opened(key=f"sample-{place}")
        ordinals.append(log.create(opened))  # type: ignore[union-attr]
        log.append(ordinals[-1], 0, [opened])  # type: ignore[union-attr]
    late = []
    sequence = 1
    end = time.monotonic() + seconds
    while (now := time.monotonic()) < end:
        await asyncio.sleep(0.001)
        late.append(time.monotonic() - now - 0.001)
        for ordinal in ordinals:
            log.append(ordinal, sequence, [Delta(0, frames()[sequence % 4096], sequence)])  # type: ignore[union-attr]
        sequence += 1
    return late


def slow_disk(seconds: float) -> Callable[[Segment, object], None]:
    """Return a write that takes so long."""
    write = Segment.write

    def slow(self: Segment, rows: object) -> None:
        time.sleep(seconds)
        write(self, rows)  # type: ignore[arg-type]

    return slow


def delay(folder: Path, *, quick: bool) -> float:
    """Return the milliseconds that recording adds to the 99th percentile of lateness."""
    seconds = 0.2 if quick else 2.0

    def p99(log: Log | None) -> float:
        late = sorted(asyncio.run(lateness(log, seconds * 1.2)))
        return late[len(late) * 99 // 100]

    added = []
    for turn in range(1 if quick else 5):
        without = p99(None)
        with patch.object(Segment, "write", slow_disk(seconds)):
            log = Log.open(folder / f"slow-{turn}", durability="window", window_ms=20)
            added.append(p99(log) - without)
        log.close()
    return sorted(added)[len(added) // 2] * 1000


def rows(*, quick: bool = False) -> Iterator[Row]:
    """Measure target 4."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for each in (1, 8, 32):
            ratio = throughput(folder, each, quick=quick)
            limit = 2.0 if each == 8 else None
            yield Row(
                "4", f"writing, {each} events of each sample a commit", "append-only file", ratio, limit
            )
        what = "p99 delay of the event loop while a commit takes 2 s"
        yield Row("4", what, "no recording", delay(folder, quick=quick), 1.0, unit="ms added")
