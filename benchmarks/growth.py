"""Growth (target 8): does a token cost the same in long samples and among many, and what does a stream hold?

Without HTTP: chunks of one event are put into many open requests in turn.
"""

from __future__ import annotations

import asyncio
import gc
import statistics
import tempfile
import time
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import msgspec

from benchmarks.frames import BODY, PATH, chunks
from benchmarks.measure import Row
from rollout_log.log import Log
from rollout_log.record.exchange import Exchange
from rollout_log.record.pulse import pulse
from rollout_log.record.samples import Samples

__all__ = ["rows"]

EACH = 8
"""Tokens of each stream between two commits: 250 ms at 30 tokens a second."""
AT_ONCE = 4096
"""The same of a single stream, whose every commit would else be what is measured."""
LEAST = 8192
"""Tokens that are measured together …"""
MANY = 64
"""… and at least of each stream, so that most are folded many at a time."""


def opened(log: Log | None, streams: int) -> list[Exchange]:
    """Open that many streams."""
    samples, body = Samples(log), msgspec.json.encode(BODY)
    found = []
    for place in range(streams):
        exchange = samples.request(f"{place}-{time.monotonic_ns()}", path=PATH, body=body)
        exchange.respond(200, [("content-type", "text/event-stream")])
        found.append(exchange)
    return found


def feed(exchanges: list[Exchange], tokens: int, log: Log | None, at_once: int, *, each: int = 1) -> float:
    """Put tokens into the streams in turn, `each` a chunk, with a commit after `at_once`.

    Returns CPU seconds per token, commits included.
    """
    return asyncio.run(_feed(exchanges, tokens, log, at_once, each))


async def _feed(exchanges: list[Exchange], tokens: int, log: Log | None, at_once: int, each: int) -> float:
    data, streams = chunks(each), len(exchanges)
    if log is not None:
        log.flush_sync()  # what opened them
    start = time.process_time()
    for place in range(tokens // each):
        exchanges[place % streams].put(data[place % len(data)])
        if log is not None and place % at_once == at_once - 1:
            pulse(log.hold_back_s).flush()
            log.flush_sync()
    for exchange in exchanges:
        exchange.take()
    if log is not None:
        log.flush_sync()
    return (time.process_time() - start) / max(tokens, 1)


def lengths(log: Log, *, quick: bool) -> Iterator[Row]:
    """Yield what a token costs late in a long sample."""
    marks = [1024, 4096, 16_384, 131_072] if not quick else [1024, 4096]
    costs: dict[int, list[float]] = {mark: [] for mark in marks}
    for _ in range(1 if quick else 5):
        (exchange,) = opened(log, 1)
        done = 0
        for mark in marks:
            # The last 1,024 tokens before each mark are measured, the others only fed.
            feed([exchange], mark - 1024 - done, log, AT_ONCE)
            costs[mark].append(feed([exchange], 1024, log, AT_ONCE))
            done = mark
    for mark in marks[1:]:
        ratio = statistics.median(costs[mark]) / statistics.median(costs[1024])
        yield Row("8", f"CPU per token at {mark:,} tokens", "at 1,024 tokens", ratio, 1.1)


def widths(log: Log | None, least: int, *, quick: bool) -> Iterator[Row]:
    """Yield what a token costs among many streams, against `least` streams."""
    counts = [least, *(count for count in (64, 512, 4096) if count > least)] if not quick else [least, 128]
    streams = {count: opened(log, count) for count in counts}
    costs: dict[int, list[float]] = {count: [] for count in counts}
    for turn in range(2 if quick else 6):
        for count, exchanges in streams.items():
            cost = feed(exchanges, max(LEAST, MANY * count), log, EACH * count)
            if turn:
                costs[count].append(cost)
    for count in counts[1:]:
        ratio = statistics.median(costs[count]) / statistics.median(costs[least])
        what = f"CPU per token of {count:,} streams" + (", no log" if log is None else "")
        yield Row("8", what, f"of {least}", ratio, 1.1)


def memory(*, quick: bool) -> Iterator[Row]:
    """Yield what an open stream holds in memory, without what waits for the disk."""
    streams = 20
    data = chunks(1)
    for tokens in (0, 256) if quick else (0, 1024, 4096):
        gc.collect()
        tracemalloc.start()
        exchanges = opened(None, streams)
        for exchange in exchanges:
            for place in range(tokens):
                exchange.put(data[place % 4096])
        gc.collect()
        held, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        yield Row(
            "8", f"memory of an open stream, {tokens:,} tokens", "nothing", held / streams / 1e3, unit="kB"
        )


def rows(*, quick: bool = False) -> Iterator[Row]:
    """Measure target 8."""
    with (
        tempfile.TemporaryDirectory() as folder,
        Log.open(Path(folder) / "log", durability="window", window_ms=3_600_000) as log,
    ):
        yield from lengths(log, quick=quick)
        yield from widths(log, 64, quick=quick)
    yield from widths(None, 1, quick=quick)
    yield from memory(quick=quick)
