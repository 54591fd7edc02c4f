"""Reading (target 6): the fold against bare decoding and of a sealed sample; one sample of a large log."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import cast

from msgspec.structs import replace

from benchmarks.frames import decode, events, frames
from benchmarks.generate import write_log
from benchmarks.measure import Row, cpu, in_turn, median_ratio
from rollout_log.events import Ended, Event, Opened
from rollout_log.fold import Rollout, fold
from rollout_log.log import Log, LogReader
from rollout_log.log.directory import segments_of
from rollout_log.log.sealed import SealedSegment
from rollout_log.log.sealing import seal

__all__ = ["rows"]

TOKENS = 4096
LENGTHS = (1024, 16_384)
"""Tokens of a sealed sample."""
AMONG, EACH = 256, 2
"""Streams that are written into one segment, and tokens of each in a commit."""


def opened_and_read(path: Path, key: str) -> Callable[[], object]:
    """Return what opens a log and folds one sample."""

    def work() -> None:
        with LogReader.open(path) as reader:
            reader.rollout(key)

    return work


def sealed(folder: Path, tokens: int) -> Callable[[], object]:
    """Seal one sample; return what folds it, the file opened anew."""
    with Log.open(folder / "log", durability="window", seal=False) as log:
        written = [*events(tokens), Ended(0, "eof", None, 20_000 * tokens)]
        log.append(log.create(written[0]), 0, written)  # type: ignore[arg-type]  # an `Opened` comes first
        log.rotate()
        log.flush_sync()
        path = seal(segments_of(log.path / log.writer)[0])

    def work() -> None:
        segment = SealedSegment.open(path)
        rollout = Rollout()
        for piece in segment.pieces(0):
            rollout.apply_piece(piece.first, piece.events)
        segment.close()
        if rollout.length != tokens:
            raise SystemExit(f"{rollout.length} tokens of {tokens}")

    return work


def written_among_others(folder: Path, tokens: int, streams: int) -> Callable[[], object]:
    """Write that many streams side by side, each elsewhere in the same one; return what reads one of them."""
    opened, *request = events(tokens)[:3]
    deltas = events(tokens)[3:]
    samples: list[list[Event]] = []
    for number in range(streams):
        begin = number * tokens // streams
        key = replace(cast(Opened, opened), key=f"t{number}")
        samples.append([key, *request, *deltas[begin:], *deltas[:begin]])
    with Log.open(folder / "log", durability="window", seal=False) as log:
        ordinals = [log.create(cast(Opened, written[0])) for written in samples]
        for start in range(0, tokens + 3, EACH):
            for ordinal, written in zip(ordinals, samples, strict=True):
                log.append(ordinal, start, written[start : start + EACH])
            log.flush_sync()
    return opened_and_read(folder / "log", f"t{streams // 2}")


def size_of(log: Path) -> str:
    """Return what a log takes on disk."""
    return f"{sum(path.stat().st_blocks * 512 for path in log.rglob('*')) / 1e6:,.0f} MB"


def rows(*, quick: bool = False) -> Iterator[Row]:
    """Measure target 6."""
    runs = 1 if quick else 9
    numbered = list(enumerate(events(TOKENS)))
    of, to = in_turn(runs, lambda: fold(numbered), lambda: [decode(frame) for frame in frames(TOKENS)])
    yield Row("6", "fold of recorded frames", "typed decoding of them", median_ratio(of, to), 2.5)
    for tokens in LENGTHS:
        with tempfile.TemporaryDirectory() as name:
            work = sealed(Path(name), tokens)
            speed = tokens / statistics.median(cpu(work) for _ in range(runs))
        limit = 1e6 if tokens == LENGTHS[-1] else None
        what = f"fold of a sealed sample of {tokens:,} tokens"
        yield Row("6", what, "CPU, opening the file included", speed, limit, "tokens/s", at_least=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_log(folder / "small", 1_000, 10)
        write_log(folder / "large", 2_000 if quick else 100_000, 50, 0 if quick else 1.0)
        large = opened_and_read(folder / "large", "s5-g3-2")
        of, to = in_turn(runs, large, opened_and_read(folder / "small", "s5-g3-2"))
        what = f"one sample of 100,000 ({size_of(folder / 'large')})"
        yield Row("6", what, f"one of 1,000 ({size_of(folder / 'small')})", median_ratio(of, to), 1.5)
        times = statistics.median(cpu(large) for _ in range(runs))
        yield Row("6", what, "CPU, opening the log included", times * 1000, 10.0, unit="ms")
    with tempfile.TemporaryDirectory() as name:
        tokens = 16 if quick else 1024
        work = written_among_others(Path(name), tokens, 8 if quick else AMONG)
        times = statistics.median(cpu(work) for _ in range(runs))
        what = f"one sample of {tokens:,} tokens among {AMONG} streams being written, {EACH} a commit"
        yield Row("6", what, "CPU, opening the log included", times * 1000, unit="ms")
