"""Sealing: from a segment that is written no more to one immutable file (`docs/format.md`).

The file gets its name only once it is synced and everything in it was read back and found equal; then
the segment is removed. Whoever is killed in between leaves one of the two whole, or both.
"""

from __future__ import annotations

import itertools
import os
import struct
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

import lmdb
import lmdb.verify
import msgspec
import zstandard

from rollout_log.errors import LogDamaged
from rollout_log.log.batch import read_claim
from rollout_log.log.block import writer_identity
from rollout_log.log.chunk import EVENTS, META, SAMPLES, TABLE, pack_chunk
from rollout_log.log.directory import FORMAT, sealed_path
from rollout_log.log.draft import whole_file
from rollout_log.log.group import WIDE, Run, pack_group, split_events
from rollout_log.log.sealed import HEAD, PLACE, TAIL, TAIL_MAGIC, ContentHash, Meta, SealedSegment, file_hash
from rollout_log.log.segment import BATCHES, KEYS, LAST, STEPS, Segment, Snapshot
from rollout_log.log.segment import SAMPLES as SAMPLE_ROWS

__all__ = ["seal"]

GROUP = 1 << 20
"""Bytes of events that are packed together: what reading one of them unpacks."""
WIDE_GROUP = 32 << 20
"""The same where events are wide, and squeezed by what is alike over long distances."""
_PAGE = 512
"""Summaries that are compressed together."""
_LEVEL = 12


def seal(path: Path) -> Path:
    """Seal one segment that nobody writes, and remove it. Returns the sealed file.

    For a process of its own: LMDB dies of some kinds of damage. Raises `RolloutLogError`, or `OSError` where
    the disk is full; the segment is then as it was.
    """
    target = sealed_path(path)
    if not target.exists():
        _check_pages(path)
        modified = path.stat().st_mtime_ns  # of the last commit, which retention goes by
        segment = Segment.open(path)
        try:
            with whole_file(target, check=_check, modified_ns=modified) as file, segment.snapshot() as tables:
                _write(segment, tables, file)
        finally:
            segment.close()
    path.with_name(path.name + "-lock").unlink(missing_ok=True)
    path.unlink(missing_ok=True)
    return target


def _check_pages(path: Path) -> None:
    """Raise `LogDamaged` where LMDB might skip records: what it does not read would be lost for good."""
    try:
        wrong = lmdb.verify.verify(os.fspath(path))  # type: ignore[no-untyped-call] # it has no annotations
    except lmdb.verify.VerifyError as error:
        wrong = [str(error)]
    if wrong:
        raise LogDamaged(f"{path} is damaged, so it is not sealed: {wrong[0]}; run `rollout-log recover`")


def _write(segment: Segment, tables: Snapshot, file: BinaryIO) -> None:
    header = segment.header()
    writer = writer_identity(str(header["writer"]))
    content, events = ContentHash(), 0
    places: list[bytes] = []

    def put(kind: int, data: bytes) -> int:
        offset = file.tell()
        file.write(pack_chunk(kind, writer, data))
        return offset

    file.write(HEAD)
    for runs in _group(_runs(segment.path, tables, writer)):
        offset = put(EVENTS, pack_group(runs))
        for run in runs:
            content.update(run)
            events += len(run.events)
            places.append(PLACE.pack(run.ordinal, run.first, len(run.events), offset))
    there = sum(place.events for _, data in tables.rows(BATCHES) for place in read_claim(data).places())
    if there != events:
        raise LogDamaged(f"{segment.path} has {there} events, and {events} can be reached by sample")
    pages: list[bytes] = []
    samples = 0
    rows = tables.rows(SAMPLE_ROWS)
    while page := list(itertools.islice(rows, _PAGE)):
        data = msgspec.msgpack.encode([(int.from_bytes(key, "big"), summary) for key, summary in page])
        compressed = zstandard.ZstdCompressor(level=_LEVEL).compress(data)
        pages.append(page[0][0] + struct.pack(">Q", put(SAMPLES, compressed)))
        samples += len(page)
    index = {
        "places": places,
        "pages": pages,
        "keys": [key for key, _ in tables.rows(KEYS)],
        "steps": [key for key, _ in tables.rows(STEPS)],
    }
    meta = Meta(
        format=FORMAT,
        writer=str(header["writer"]),
        run=str(header.get("run", "")),
        segment=segment.number,
        created_unix_ns=int(header.get("created_unix_ns", 0)),
        sealed_unix_ns=time.time_ns(),
        samples=samples,
        events=events,
        content=content.hexdigest(),
        tables={name: (put(TABLE, b"".join(rows)), len(rows)) for name, rows in index.items()},
    )
    last = put(META, msgspec.json.encode(meta))
    file.flush()
    file.write(TAIL.pack(TAIL_MAGIC, last, file_hash(file.fileno(), file.tell())))


def _check(draft: Path) -> None:
    """Read everything back. Raises `LogDamaged` where it is not what was written."""
    sealed = SealedSegment.open(draft)
    try:
        sealed.check_hash()
        found = ContentHash()
        for runs in sealed.groups():
            for run in runs:
                found.update(run)
        if found.hexdigest() != sealed.meta.content:
            raise LogDamaged(f"{draft} does not give back the events that were sealed; the segment is kept")
    finally:
        sealed.close()


def _runs(path: Path, tables: Snapshot, writer: bytes) -> Iterator[tuple[int, Run]]:
    """Yield every block's bytes and events, by sample and sequence. Raises `LogDamaged`."""
    for key, _ in tables.rows(LAST):
        for block in tables.blocks(int.from_bytes(key, "big")):
            events = split_events(block.payload)
            if block.writer != writer or len(events) != block.count:
                raise LogDamaged(f"{path}: block {block.first} of sample {block.ordinal} is not whole")
            yield len(block.payload), Run(block.ordinal, block.first, events)


def _group(blocks: Iterable[tuple[int, Run]]) -> Iterator[list[Run]]:
    """Join blocks to runs, and runs to groups of a bounded size."""
    runs: list[Run] = []
    size = events = 0
    for length, run in blocks:
        last = runs[-1] if runs else None
        if last is not None and (run.ordinal, run.first) == (last.ordinal, last.first + len(last.events)):
            last.events += run.events
        else:
            runs.append(run)
        size += length
        events += len(run.events)
        if size >= (WIDE_GROUP if size > events * WIDE else GROUP):
            yield runs
            runs, size, events = [], 0, 0
    if runs:
        yield runs
