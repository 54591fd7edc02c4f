"""Whether a sealed segment is whole: every byte of it, every event, and whether its tables agree."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from rollout_log.errors import LogDamaged, RolloutLogError
from rollout_log.events import decode_events
from rollout_log.log.group import Run, encode_items
from rollout_log.log.group_reader import GroupReader
from rollout_log.log.sealed import ContentHash, SealedSegment
from rollout_log.log.segment import SAMPLES, sample_rows
from rollout_log.log.summary import Summary

__all__ = ["walk_sealed"]

Line = dict[str, Any]


def walk_sealed(path: Path) -> Iterator[Line]:
    """Yield what is wrong, the ranges of events there are, and the totals at the end, as `verify` does."""
    try:
        segment = SealedSegment.open(path)
    except RolloutLogError as error:
        yield {"what": "header", "detail": str(error)}
        yield {"samples": [], "blocks": 0, "events": 0}
        return
    try:
        yield from _Walk(segment).findings()
    finally:
        segment.close()


class _Walk:
    def __init__(self, segment: SealedSegment) -> None:
        self.segment = segment
        self.summaries: dict[int, Summary] = {}
        self.content = ContentHash()
        self.runs = 0
        self.events = 0

    def findings(self) -> Iterator[Line]:
        """Yield everything."""
        for what, look in (
            ("hash", self._look_at_bytes),
            ("sample", self._look_at_samples),
            ("key", lambda: self._look_at_index("keys")),
            ("step", lambda: self._look_at_index("steps")),
            ("table", self._look_at_events),
        ):
            try:
                yield from look()
            except LogDamaged as error:
                yield {"what": what, "detail": str(error)}
        yield {"samples": sorted(self.summaries), "blocks": self.runs, "events": self.events}

    def _look_at_bytes(self) -> Iterator[Line]:
        self.segment.check_hash()
        yield from ()

    def _look_at_samples(self) -> Iterator[Line]:
        for ordinal, summary in self.segment.summaries():
            self.summaries[ordinal] = summary
        if len(self.summaries) != self.segment.meta.samples:
            detail = f"{len(self.summaries)} samples where {self.segment.meta.samples} should be"
            yield {"what": "sample", "detail": detail}

    def _look_at_index(self, table: str) -> Iterator[Line]:
        there = self.segment.index_rows(table)
        for ordinal, summary in self.summaries.items():
            for name, row, _ in sample_rows(ordinal, summary):
                if name == table and row not in there:
                    yield {"what": table[:-1], "detail": f"row {row.hex()} is missing from {table}"}
        for row in sorted(there):
            ordinal = int.from_bytes(row[-8:], "big")
            if ordinal not in self.summaries:
                detail = f"row {row.hex()} is of sample {ordinal}, which is not in {SAMPLES}"
                yield {"what": table[:-1], "detail": detail}

    def _look_at_events(self) -> Iterator[Line]:
        places = set(self.segment.places())
        for offset in sorted({offset for _, _, _, offset in places}):
            try:
                runs = GroupReader(self.segment.events_chunk(offset).content).runs
            except LogDamaged as error:
                lost = {place for place in places if place[3] == offset}
                events = sum(count for _, _, count, _ in lost)
                samples = len({ordinal for ordinal, _, _, _ in lost})
                yield {"what": "block", "detail": f"{error} ({events} events of {samples} samples)"}
                places -= lost
                continue
            for run in runs:
                place = run.ordinal, run.first, len(run.events), offset
                if place not in places:
                    yield {"what": "table", "detail": f"events {place[1]} of sample {place[0]} have no place"}
                places.discard(place)
                yield from self._look_at_run(run)
        for ordinal, first, count, offset in sorted(places):
            detail = f"events {first} to {first + count - 1} of sample {ordinal} cannot be read"
            yield {"what": "block", "detail": f"chunk at {offset}: {detail}"}
        if self.events == self.segment.meta.events and self.content.hexdigest() != self.segment.meta.content:
            yield {"what": "hash", "detail": "the events are not those that were sealed"}

    def _look_at_run(self, run: Run) -> Iterator[Line]:
        self.content.update(run)
        self.runs += 1
        self.events += len(run.events)
        name = f"{run.first} of sample {run.ordinal}"
        try:
            decode_events(encode_items(run.events))
        except (msgspec.DecodeError, ValueError, TypeError, RecursionError) as error:
            yield {"what": "block", "detail": f"events {name} do not decode: {error}"}
        if run.ordinal not in self.summaries:
            yield {"what": "sample", "detail": f"events {name}, which is not in {SAMPLES}"}
        yield {"ordinal": run.ordinal, "first": run.first, "end": run.first + len(run.events)}
