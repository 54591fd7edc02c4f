"""Whether one segment is whole: what `verify` has a process of its own say, one JSON object a line.

Where the file is at rest its pages are checked first, without LMDB.
"""

from __future__ import annotations

import collections
import json
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lmdb
import lmdb.verify
import msgspec

from rollout_log.errors import LogDamaged, RolloutLogError
from rollout_log.log.batch import unpack_batch
from rollout_log.log.block import Block, writer_identity
from rollout_log.log.directory import SEALED, is_live, segments_of
from rollout_log.log.environment import NothingCommitted, check_length
from rollout_log.log.segment import BATCHES, KEYS, LAST, SAMPLES, STEPS, Segment, Snapshot, sample_rows
from rollout_log.log.summary import Summary, decode_summary
from rollout_log.log.verify_sealed import walk_sealed

__all__ = ["main"]

_MOST, _MOST_OF_PAGES = 100, 3
"""Findings of one kind in one segment that are told one by one. Of LMDB's pages a few are enough: each says
only that LMDB cannot be followed there."""


def _walk(path: Path) -> Iterator[dict[str, Any]]:
    """Yield what is wrong with a segment, the ranges of events it has, and the totals at the end."""
    if path.suffix == SEALED:
        yield from walk_sealed(path)
        return
    nothing = {"samples": [], "blocks": 0, "events": 0}
    try:
        wrong = list(_check_pages(path))
    except NothingCommitted as error:
        if not _is_newest(path):
            yield {"what": "header", "detail": f"{error}, and segments follow it"}
        yield nothing
        return
    if wrong:
        yield from wrong
        yield nothing
        return
    try:
        segment = Segment.open(path)
    except RolloutLogError as error:
        yield {"what": "header", "detail": str(error)}
        yield nothing
        return
    try:
        writer = str(segment.header().get("writer"))
        with segment.snapshot() as tables:
            yield from _Walk(tables, writer).findings()
    finally:
        segment.close()


def _check_pages(path: Path) -> Iterator[dict[str, Any]]:
    """Check the file as LMDB's pages, without LMDB; one that is being written can only be measured.

    Raises `NothingCommitted`.
    """
    try:
        check_length(path)
        if _is_newest(path) and is_live(path.parent):
            return
        for problem in lmdb.verify.verify(os.fspath(path)):  # type: ignore[no-untyped-call] # has no annotations
            yield {"what": "pages", "detail": problem}
    except NothingCommitted:
        raise
    except LogDamaged as error:
        yield {"what": "length", "detail": str(error)}
    except lmdb.verify.VerifyError as error:
        yield {"what": "pages", "detail": str(error)}


def _is_newest(path: Path) -> bool:
    """Whether this is the segment that its writer writes, where it is still there."""
    return segments_of(path.parent)[-1:] == [path]


class _Walk:
    """Every row of a segment, and whether the tables agree."""

    def __init__(self, tables: Snapshot, writer: str) -> None:
        self.tables = tables
        self.writer = writer_identity(writer)
        self.summaries: dict[int, Summary] = {}
        self.expected: set[tuple[str, bytes]] = set()
        """Rows of the indexes that the samples ask for."""
        self.blocks = 0
        self.events = 0
        self.ranges: dict[int, list[tuple[int, int]]] = {}
        """The events of each sample, from first to end."""

    def findings(self) -> Iterator[dict[str, Any]]:
        yield from self._walk_samples()
        yield from self._walk_index(KEYS, "key")
        yield from self._walk_index(STEPS, "step")
        for table, key in sorted(self.expected):
            yield {"what": table[:-1], "detail": f"row {key.hex()} is missing from {table}"}
        yield from self._walk_batches()
        yield {"samples": sorted(self.summaries), "blocks": self.blocks, "events": self.events}

    def _walk_samples(self) -> Iterator[dict[str, Any]]:
        for key, data in self.tables.rows(SAMPLES):
            try:
                (ordinal,) = struct.unpack(">Q", key)
                summary = decode_summary(data)
            except (struct.error, msgspec.DecodeError) as error:
                yield {"what": "sample", "detail": f"row {key.hex()} of samples cannot be read: {error}"}
                continue
            self.summaries[ordinal] = summary
            self.expected.update(
                (table, row) for table, row, _ in sample_rows(ordinal, summary) if table != SAMPLES
            )

    def _walk_index(self, table: str, what: str) -> Iterator[dict[str, Any]]:
        for key, data in self.tables.rows(table):
            ordinal = int.from_bytes(key[-8:], "big")
            known = self.summaries.get(ordinal)
            if known is None:
                yield {
                    "what": what,
                    "detail": f"row {key.hex()} is of sample {ordinal}, which is not in samples",
                }
            elif table == KEYS and (
                (table, key) not in self.expected or data.decode(errors="replace") != known.key
            ):
                yield {"what": what, "detail": f"row {key.hex()} is not the key of sample {ordinal}"}
            self.expected.discard((table, key))

    def _walk_batches(self) -> Iterator[dict[str, Any]]:
        last: dict[int, int] = {}
        broken: set[int] = set()
        for key, data in self.tables.rows(BATCHES):
            number = int.from_bytes(key, "big")
            try:
                batch = unpack_batch(data)
                if (batch.claim.number, batch.claim.writer) != (number, self.writer):
                    raise LogDamaged(f"batch {batch.claim.number} lies where another belongs")
            except LogDamaged as error:
                yield {"what": "batch", "detail": f"{error} (key {key.hex()})"}
                broken.add(number)
                continue
            places = batch.claim.places()
            for place in places:
                before = last.get(place.ordinal, 0)
                if place.previous != before and place.previous not in broken:
                    yield {
                        "what": "batch",
                        "detail": f"batch {number} says that sample {place.ordinal} has events in batch "
                        f"{place.previous} before it, and it has some in {before}",
                    }
            last.update((place.ordinal, number) for place in places)
            for block in batch.blocks():
                try:
                    block.events()
                except LogDamaged as error:
                    yield {"what": "batch", "detail": f"{error} (key {key.hex()})"}
                    continue
                self._note(block)
        yield from self._walk_last(last, broken)
        for ordinal, ranges in sorted(self.ranges.items()):
            if ordinal not in self.summaries:
                yield {"what": "sample", "detail": f"sample {ordinal} has blocks and is not in samples"}
            for first, end in ranges:
                yield {"ordinal": ordinal, "first": first, "end": end}

    def _walk_last(self, last: dict[int, int], broken: set[int]) -> Iterator[dict[str, Any]]:
        for key, data in self.tables.rows(LAST):
            ordinal, told = int.from_bytes(key, "big"), int.from_bytes(data, "big")
            if last.pop(ordinal, 0) != told and told not in broken:
                yield {"what": "last", "detail": f"batch {told} is not the last one of sample {ordinal}"}
        for ordinal in sorted(last):
            yield {"what": "last", "detail": f"sample {ordinal} has batches and is not in last"}

    def _note(self, block: Block) -> None:
        """Count a block, and join it to the events of its sample that were there before."""
        self.blocks += 1
        self.events += block.count
        ranges = self.ranges.setdefault(block.ordinal, [])
        if ranges and ranges[-1][1] == block.first:
            ranges[-1] = ranges[-1][0], block.first + block.count
        else:
            ranges.append((block.first, block.first + block.count))


def _most(what: str) -> int:
    return _MOST_OF_PAGES if what == "pages" else _MOST


def main(segment: str) -> None:
    """What the child does."""
    told: collections.Counter[str] = collections.Counter()
    try:
        for line in _walk(Path(segment)):
            if "what" in line:
                told[line["what"]] += 1
                if told[line["what"]] > _most(line["what"]):
                    continue
            print(json.dumps(line), flush=True)  # noqa: T201 - how the child answers
    except Exception as error:
        detail = f"{type(error).__name__}: {error}"
        print(json.dumps({"what": "reader", "detail": detail}), flush=True)  # noqa: T201 - the same
        print(json.dumps({"samples": [], "blocks": 0, "events": 0}), flush=True)  # noqa: T201 - the same
    for what, number in told.items():
        if number > (most := _most(what)):
            detail = f"and {number - most} more like these"
            print(json.dumps({"what": what, "detail": detail}), flush=True)  # noqa: T201 - the same
