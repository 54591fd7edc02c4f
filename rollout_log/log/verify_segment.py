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

from rollout_log.errors import LogDamaged, NotALog, RolloutLogError
from rollout_log.log.block import unpack_block, writer_identity
from rollout_log.log.directory import SEALED, is_live, segments_of
from rollout_log.log.environment import check_length
from rollout_log.log.segment import BLOCKS, KEYS, SAMPLES, STEPS, Segment, Snapshot, sample_rows
from rollout_log.log.summary import Summary, decode_summary
from rollout_log.log.verify_sealed import walk_sealed

__all__ = ["main"]

_MOST = 100
"""Findings of one segment that are told one by one."""


def _walk(path: Path) -> Iterator[dict[str, Any]]:
    """Yield what is wrong with a segment, the ranges of events it has, and the totals at the end."""
    if path.suffix == SEALED:
        yield from walk_sealed(path)
        return
    nothing = {"samples": [], "blocks": 0, "events": 0}
    if path.stat().st_size == 0:
        yield nothing  # its writer died before the first commit
        return
    wrong = list(_check_pages(path))
    if wrong:
        yield from wrong
        yield nothing
        return
    try:
        segment = Segment.open(path)
    except NotALog as error:
        if _tables_of(path):
            yield {"what": "header", "detail": str(error)}
        yield nothing
        return
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
    """Check the file as LMDB's pages, without LMDB; one that is being written can only be measured."""
    try:
        if _is_live(path):
            check_length(path)
            return
        for problem in lmdb.verify.verify(os.fspath(path)):  # type: ignore[no-untyped-call] # has no annotations
            yield {"what": "pages", "detail": problem}
    except LogDamaged as error:
        yield {"what": "length", "detail": str(error)}
    except lmdb.verify.VerifyError as error:
        yield {"what": "pages", "detail": str(error)}


def _is_live(path: Path) -> bool:
    """Whether a writer holds the folder and this is the segment it writes."""
    return segments_of(path.parent)[-1:] == [path] and is_live(path.parent)


def _tables_of(path: Path) -> int:
    with lmdb.open(os.fspath(path), subdir=False, readonly=True, lock=False, max_dbs=16) as environment:
        return environment.stat()["entries"]


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

    def findings(self) -> Iterator[dict[str, Any]]:
        yield from self._walk_samples()
        yield from self._walk_index(KEYS, "key")
        yield from self._walk_index(STEPS, "step")
        for table, key in sorted(self.expected):
            yield {"what": table[:-1], "detail": f"row {key.hex()} is missing from {table}"}
        yield from self._walk_blocks()
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

    def _walk_blocks(self) -> Iterator[dict[str, Any]]:
        open_range: tuple[int, int, int] | None = None
        for key, data in self.tables.rows(BLOCKS):
            try:
                block = unpack_block(data)
                if struct.pack(">QQ", block.ordinal, block.first) != key or block.writer != self.writer:
                    raise LogDamaged(
                        f"block {block.first} of sample {block.ordinal} lies where another belongs"
                    )
                block.events()
            except LogDamaged as error:
                yield {"what": "block", "detail": f"{error} (key {key.hex()})"}
                continue
            if block.ordinal not in self.summaries:
                yield {"what": "sample", "detail": f"sample {block.ordinal} has blocks and is not in samples"}
            self.blocks += 1
            self.events += block.count
            end = block.first + block.count
            if open_range is not None and open_range[0] == block.ordinal and open_range[2] == block.first:
                open_range = (block.ordinal, open_range[1], end)
            else:
                yield from _as_line(open_range)
                open_range = (block.ordinal, block.first, end)
        yield from _as_line(open_range)


def _as_line(of: tuple[int, int, int] | None) -> Iterator[dict[str, Any]]:
    if of is not None:
        yield {"ordinal": of[0], "first": of[1], "end": of[2]}


def main(segment: str) -> None:
    """What the child does."""
    told: collections.Counter[str] = collections.Counter()
    try:
        for line in _walk(Path(segment)):
            if "what" in line:
                told[line["what"]] += 1
                if told[line["what"]] > _MOST:
                    continue
            print(json.dumps(line), flush=True)  # noqa: T201 - how the child answers
    except Exception as error:
        detail = f"{type(error).__name__}: {error}"
        print(json.dumps({"what": "reader", "detail": detail}), flush=True)  # noqa: T201 - the same
        print(json.dumps({"samples": [], "blocks": 0, "events": 0}), flush=True)  # noqa: T201 - the same
    for what, number in told.items():
        if number > _MOST:
            detail = f"and {number - _MOST} more like these"
            print(json.dumps({"what": what, "detail": detail}), flush=True)  # noqa: T201 - the same
