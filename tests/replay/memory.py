"""A log in memory: what `Samples` writes to, and what replay reads from."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from rollout_log.errors import SampleNotFound
from rollout_log.events import End, Event, Opened
from rollout_log.fold import Rollout, fold
from rollout_log.log.summary import Summary
from rollout_log.record.samples import Samples


class Entry(NamedTuple):
    summary: Summary
    name: str
    ref: int


@dataclass
class MemoryLog:
    run: str = ""
    hold_back_s: float = 0.05
    written: list[list[Event]] = field(default_factory=list)

    # What a recorder needs

    def create(self, opened: Opened) -> int:
        self.written.append([])
        return len(self.written) - 1

    def append(
        self, sample: int, first: int, events: Sequence[Event], summary: Any = None, since: Any = None
    ) -> bool:
        assert first == len(self.written[sample])
        self.written[sample] += events
        return True

    async def settle(self, sample: int) -> bool:
        return True

    async def flush(self, sample: int | None = None) -> None: ...

    def flush_sync(self, *_: Any, **__: Any) -> bool:
        return True

    # What a reader has

    def samples(self) -> Iterator[Entry]:
        for ref, events in enumerate(self.written):
            opened = events[0]
            assert isinstance(opened, Opened)
            yield Entry(Summary(key=opened.key), opened.key, ref)

    def find(self, name: str) -> int:
        for entry in self.samples():
            if entry.name == name:
                return entry.ref
        raise SampleNotFound(name)

    def events(self, ref: int) -> Iterator[tuple[int, Event]]:
        yield from enumerate(self.written[ref])

    def rollout(self, ref: int) -> Rollout:
        return fold(self.events(ref))


def record(
    log: MemoryLog,
    key: str,
    path: str,
    body: bytes,
    chunks: Sequence[bytes],
    *,
    samples: Samples | None = None,
    status: int = 200,
    headers: Sequence[tuple[str, str]] = (("content-type", "text/event-stream; charset=utf-8"),),
    end: End = "eof",
    detail: str | None = None,
) -> Samples:
    """Record one exchange."""
    samples = samples or Samples(log)  # type: ignore[arg-type]
    exchange = samples.request(key, path=path, body=body)
    exchange.respond(status, headers)
    for chunk in chunks:
        exchange.feed(chunk)
    exchange.end(end, detail)
    assert exchange.broken is None
    return samples


def split(body: bytes, seed: int, mean: int = 300) -> list[bytes]:
    """Cut a body at seeded places."""
    places = random.Random(seed)
    chunks, at = [], 0
    while at < len(body):
        size = places.randint(1, 2 * mean)
        chunks.append(body[at : at + size])
        at += size
    return chunks
