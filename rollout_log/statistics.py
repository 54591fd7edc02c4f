"""What a log weighs and how fast its tokens came: sizes, rates, latencies, what sealing would gain.

Counts and sizes are of the whole log, from summaries and files. What only the events tell is measured on
samples picked evenly over the log, and says how many those were.
"""

from __future__ import annotations

import random
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import chain, pairwise
from pathlib import Path

import msgspec

from rollout_log.events import Delta, Event, Requested
from rollout_log.fold import Rollout
from rollout_log.log import Block, Entry, LogReader
from rollout_log.log.block import COLUMNS
from rollout_log.log.directory import segments_of, writer_start_ns, writers_of
from rollout_log.log.group import Run, pack_group, split_events
from rollout_log.log.sealing import GROUP
from rollout_log.undated import since_epoch_ns

__all__ = ["Distribution", "Moment", "Statistics", "measure"]

BUCKETS = 60
"""Of the timeline."""
_MOST_KEPT = 1 << 20
"""Values of a distribution that are kept; beyond that, a random choice of them."""
_NEIGHBOURS = 8
"""Samples that are looked into side by side: in a sealed segment, neighbours are unpacked together."""
_MOST_PACKED = 16 << 20
"""Bytes of events that are packed to see what sealing gains: a second or two."""
_SEALED_SAMPLE, _SEALED_FILE = 100, 700
"""About so many bytes has a sealed segment beside its events, for each sample and in all."""


class Distribution(msgspec.Struct):
    """Seconds, of so many values; null where there are none."""

    count: int
    median: float | None
    p99: float | None
    largest: float | None


class Moment(msgspec.Struct):
    """A stretch of the timeline."""

    began_unix_ns: int
    seconds: float
    tokens: int
    """Generated in it, scaled from the samples that were looked at to the whole log."""


class Statistics(msgspec.Struct):
    """A log in numbers."""

    samples: int
    statuses: dict[str, int]
    requests: int
    tokens: int
    discarded: int
    events: int
    """As of the summaries: what the samples had when they last began, ended or were closed."""
    writers: int
    """0: it is a fixture, which has no blocks either."""
    segments: int
    """Files."""
    disk_bytes: int
    """Of these, as the file system counts them."""
    response_bytes: int
    """As they arrived."""
    began_unix_ns: int
    updated_unix_ns: int
    undated: int
    """Samples that came from a fixture and have no date: where others have one, they are left out of the
    time, of the rate and of the timeline."""
    tokens_per_second: float | None
    """From the first sample's beginning to the last update, thrown away or not."""
    looked_at: int
    """Samples of which the events were read, for everything below."""
    timeline: list[Moment]
    first_token: Distribution
    """From sending a request to its first token."""
    between_tokens: Distribution
    """From one frame with tokens to the next one of its request."""
    loss_window: Distribution
    """How long the first event of a block waited for the last before both were committed. Of samples that
    were recorded as they came: what was copied into a log says nothing of it."""
    blocks: int
    events_per_block: float | None
    block_bytes: int
    event_bytes: int
    """What the blocks hold, before compression."""
    sealed_bytes: int
    """What they weigh in sealed segments, or would; some are packed to see, where there are many."""
    sealed_disk_bytes: int
    """What the files of the whole log weigh once all are sealed, about; 0 for a fixture."""


def measure(reader: LogReader, most: int | None = 1000) -> Statistics:
    """Measure a log; at most `most` samples are looked into, None for all."""
    entries = list(reader.samples())
    statuses: Counter[str] = Counter(entry.summary.status for entry in entries)
    dated = [entry for entry in entries if _is_dated(entry)]
    timed = dated or entries
    began = min((entry.summary.opened_unix_ns for entry in timed), default=0)
    updated = max((entry.summary.updated_unix_ns for entry in timed), default=0)
    generated = sum(entry.summary.tokens + entry.summary.discarded for entry in timed)
    writers, files = _files(reader)
    seen = _Measured()
    picked = _pick(entries, most)
    stored = bool(writers)
    for entry in picked:
        seen.read(
            reader.blocks(entry.ref),
            stored=stored,
            live=stored and _was_live(entry),
            timed=not dated or _is_dated(entry),
        )
    seconds = (updated - began) / 1e9
    timed_picked = sum(map(_is_dated, picked)) if dated else len(picked)
    sealed = seen.sealed_bytes
    return Statistics(
        samples=len(entries),
        statuses=dict(statuses.most_common()),
        requests=sum(entry.summary.requests for entry in entries),
        tokens=sum(entry.summary.tokens for entry in entries),
        discarded=sum(entry.summary.discarded for entry in entries),
        events=sum(entry.summary.events for entry in entries),
        writers=writers,
        segments=len(files),
        disk_bytes=sum(_on_disk(file) for file in files),
        response_bytes=sum(entry.summary.bytes for entry in entries),
        began_unix_ns=began,
        updated_unix_ns=updated,
        undated=len(entries) - len(dated),
        tokens_per_second=generated / seconds if seconds > 0 else None,
        looked_at=len(picked),
        timeline=seen.timeline(len(timed) / timed_picked if timed_picked else 1.0),
        first_token=seen.first_token.distribution(),
        between_tokens=seen.between_tokens.distribution(),
        loss_window=seen.loss_window.distribution(),
        blocks=seen.blocks,
        events_per_block=seen.events / seen.blocks if seen.blocks else None,
        block_bytes=seen.block_bytes,
        event_bytes=seen.event_bytes,
        sealed_bytes=sealed,
        sealed_disk_bytes=_sealed_disk(sealed, len(entries), len(picked), len(files)),
    )


def _pick(entries: Sequence[Entry], most: int | None) -> list[Entry]:
    if most is None or len(entries) <= most:
        return list(entries)
    places = -(-most // _NEIGHBOURS)
    bounds = pairwise(i * len(entries) // places for i in range(places + 1))
    parts = (entries[start : min(start + _NEIGHBOURS, end)] for start, end in bounds)
    return list(chain.from_iterable(parts))[:most]


def _files(reader: LogReader) -> tuple[int, list[Path]]:
    """Return how many writers there are, and all files with samples."""
    folders = [folder for log in reader.logs if log.is_dir() for folder in writers_of(log)]
    files = [log for log in reader.logs if log.is_file()]
    return len(folders), files + [segment for folder in folders for segment in segments_of(folder)]


def _sealed_disk(sealed: int, samples: int, looked_at: int, files: int) -> int:
    if not sealed:
        return 0
    return round(sealed * samples / looked_at) + _SEALED_SAMPLE * samples + _SEALED_FILE * files


def _is_dated(entry: Entry) -> bool:
    return since_epoch_ns(entry.summary.opened_unix_ns) is None


def _was_live(entry: Entry) -> bool:
    """Whether a sample was recorded as it came; one that is older than its writer was copied."""
    return entry.summary.opened_unix_ns >= writer_start_ns(entry.ref.folder)


def _on_disk(path: Path) -> int:
    """Bytes a file takes; LMDB's are sparse."""
    try:
        found = path.stat()
    except FileNotFoundError:  # pruned meanwhile
        return 0
    return min(found.st_size, found.st_blocks * 512) or found.st_size


class _Values:
    """Values of a distribution, at most so many."""

    def __init__(self) -> None:
        self._values = array("d")
        self._count = 0
        self._random = random.Random(0)

    def add(self, value: float) -> None:
        self._count += 1
        if len(self._values) < _MOST_KEPT:
            self._values.append(value)
        elif (place := self._random.randrange(self._count)) < _MOST_KEPT:
            self._values[place] = value

    def distribution(self) -> Distribution:
        values = sorted(self._values)
        if not values:
            return Distribution(0, None, None, None)
        at = len(values) - 1
        return Distribution(self._count, values[at // 2], values[round(at * 0.99)], values[-1])


class _Sealing:
    """What blocks would weigh in sealed segments: some are packed to see, and stand for the others."""

    def __init__(self) -> None:
        self._sealed = self._unsealed = self._tried = self._packed = 0
        self._runs: list[Run] = []
        self._size = 0

    def add(self, block: Block) -> None:
        if block.codec == COLUMNS:
            self._sealed += block.stored
            return
        self._unsealed += len(block.payload)
        if self._tried + self._size < _MOST_PACKED:
            self._runs.append(Run(block.ordinal, block.first, split_events(block.payload)))
            self._size += len(block.payload)
            if self._size >= GROUP:
                self._pack()

    def estimate(self) -> int:
        if self._runs:
            self._pack()
        return self._sealed + (self._unsealed * self._packed // self._tried if self._tried else 0)

    def _pack(self) -> None:
        self._packed += len(pack_group(self._runs))
        self._tried += self._size
        self._runs, self._size = [], 0


class _Measured:
    """What the events of some samples tell."""

    def __init__(self) -> None:
        self.first_token = _Values()
        self.between_tokens = _Values()
        self.loss_window = _Values()
        self.blocks = self.events = self.block_bytes = self.event_bytes = 0
        self._sealing = _Sealing()
        self._arrivals: Counter[int] = Counter()
        """Tokens by second."""

    def read(self, blocks: Iterator[Block], *, stored: bool, live: bool, timed: bool) -> None:
        """Take in a sample; its blocks as well where a log stores them. A fixture has none.

        `live`: they were committed as they came. `timed`: its tokens are of the timeline.
        """
        rollout = Rollout()
        last: dict[int, int] = {}
        for block in blocks:
            events = block.events()
            if stored:
                self._weigh(block)
            if live and block.codec != COLUMNS:  # a sealed one is no longer what was committed together
                self._wait(events)
            for event in events:
                self._apply(rollout, event, last, timed=timed)

    @property
    def sealed_bytes(self) -> int:
        return self._sealing.estimate()

    def _weigh(self, block: Block) -> None:
        self.blocks += 1
        self.events += block.count
        self.block_bytes += block.stored
        self.event_bytes += len(block.payload)
        self._sealing.add(block)

    def _wait(self, events: Sequence[Event]) -> None:
        """Take the time between the first and the last frame of one request in a block."""
        times: dict[int, list[int]] = {}
        for event in events:
            if isinstance(event, Delta):
                times.setdefault(event.number, []).append(event.time)
        for found in times.values():
            self.loss_window.add((max(found) - min(found)) / 1e6)

    def _apply(self, rollout: Rollout, event: Event, last: dict[int, int], *, timed: bool) -> None:
        request = rollout.request
        before = 0 if request is None or isinstance(event, Requested) else request.tokens
        rollout.apply(event)
        request = rollout.request
        if request is None or not isinstance(event, Delta) or request.tokens == before:
            return
        if request.number in last:
            self.between_tokens.add((event.time - last[request.number]) / 1e6)
        else:
            self.first_token.add(event.time / 1e6)
        last[request.number] = event.time
        if timed:
            second = (request.sent_unix_ns + 1000 * event.time) // 10**9
            self._arrivals[second] += request.tokens - before

    def timeline(self, scale: float) -> list[Moment]:
        if not self._arrivals:
            return []
        first, last = min(self._arrivals), max(self._arrivals)
        seconds = max(-(-(last - first + 1) // BUCKETS), 1)
        tokens: Counter[int] = Counter()
        for second, count in self._arrivals.items():
            tokens[(second - first) // seconds] += count
        return [
            Moment((first + i * seconds) * 10**9, float(seconds), round(tokens[i] * scale))
            for i in range((last - first) // seconds + 1)
        ]
