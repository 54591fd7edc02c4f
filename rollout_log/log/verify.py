"""Whether a log is whole: lengths, checksums, sequences, indexes. Trusts nothing it reads.

LMDB reads a damaged file in place, and then dies by a signal or silently skips records. So a segment
is walked in a process of its own, `python -m rollout_log.log.verify SEGMENT`, which prints one JSON
object a line; where the file is at rest its pages are checked first, without LMDB.
"""

from __future__ import annotations

import collections
import contextlib
import json
import os
import signal
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lmdb
import lmdb.verify
import msgspec

from rollout_log.errors import LogDamaged, NotALog, RolloutLogError
from rollout_log.log.block import unpack_block, writer_identity
from rollout_log.log.directory import (
    SEALED,
    is_live,
    logs_at,
    read_marker,
    sealed_path,
    segment_number,
    segment_path,
    segments_of,
    writers_of,
)
from rollout_log.log.environment import check_length
from rollout_log.log.retention import Pruned, read_pruned
from rollout_log.log.segment import BLOCKS, KEYS, SAMPLES, STEPS, Segment, Snapshot, sample_rows
from rollout_log.log.summary import Summary, decode_summary
from rollout_log.log.verify_sealed import walk_sealed

__all__ = ["Finding", "Report", "verify"]

_PATIENCE_S = 600
"""For a segment; another second for each MB of it."""
_MOST = 100
"""Findings of one segment that are told one by one."""


class Finding(msgspec.Struct, frozen=True):
    """One thing that is wrong."""

    path: Path
    what: str
    """In a word: length, pages, reader, header, hash, table, block, sequence, sample, key, step, segment,
    marker."""
    detail: str


class Report(msgspec.Struct):
    """What `verify` found."""

    damage: list[Finding] = []
    pruned: list[Pruned] = []
    """Segments that were deleted to free the disk, which is no damage."""
    samples: int = 0
    blocks: int = 0
    events: int = 0


class _Walked(msgspec.Struct):
    """What is known of a writer's samples, over its segments."""

    samples: set[int] = set()
    ranges: dict[int, list[tuple[int, int]]] = {}


def verify(path: str | os.PathLike[str]) -> Report:
    """Check every segment of a log, or of the logs in a directory, and report the damage.

    Raises `LogNotFound`, `NotALog` and `LogTooNew` where there is nothing to check; damage never raises.
    """
    report = Report()
    for log in logs_at(Path(path)):
        try:
            read_marker(log)
        except LogDamaged as error:
            report.damage.append(Finding(log, "marker", str(error)))
        for folder in writers_of(log):
            walked = _Walked()
            pruned = _pruned(folder, report)
            segments = segments_of(folder)
            for segment in segments:
                _read_child(segment, report, walked)
            whole = bool(segments) and segment_number(segments[0]) == 1
            report.damage += _missing(folder, segments, pruned)
            report.samples += len(walked.samples)
            report.damage += [
                Finding(folder, "sequence", detail)
                for ordinal, ranges in sorted(walked.ranges.items())
                for detail in _gaps(ordinal, ranges, from_start=whole)
            ]
    return report


def _pruned(folder: Path, report: Report) -> set[int]:
    try:
        pruned = read_pruned(folder)
    except LogDamaged as error:
        report.damage.append(Finding(folder, "segment", str(error)))
        return set()
    report.pruned += pruned
    return {each.segment for each in pruned}


def _missing(folder: Path, segments: list[Path], pruned: set[int]) -> Iterator[Finding]:
    there = {segment_number(segment) for segment in segments}
    for number in range(1, max(there | pruned, default=0)):
        if number not in there and number not in pruned and not segment_path(folder, number).exists():
            yield Finding(folder, "segment", f"segment {number} is gone, and nothing says that it was pruned")


def _read_child(segment: Path, report: Report, walked: _Walked) -> None:
    """Walk a segment in a child process and take in what it says, however it ends."""
    output, code, errors = _run_child(segment)
    if not segment.exists():  # and if it was half read when that happened
        if segment == sealed_path(segment) or not sealed_path(segment).exists():
            return  # pruned meanwhile
        segment = sealed_path(segment)
        output, code, errors = _run_child(segment)
    _take_in(segment, output, code, errors, report, walked)


def _run_child(segment: Path) -> tuple[bytes, int, str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)}
    command = [sys.executable, "-m", "rollout_log.log.verify", os.fspath(segment.absolute())]
    try:
        size = segment.stat().st_size
        child = subprocess.run(  # noqa: S603 - this very module, on a path that is passed as it is
            command,
            capture_output=True,
            cwd="/",
            env=environment,
            check=False,
            timeout=_PATIENCE_S + size / 1e6,
        )
    except FileNotFoundError:
        return b"", 0, ""
    except subprocess.TimeoutExpired as error:
        return error.stdout or b"", -signal.SIGKILL, "it went on for too long"
    return child.stdout, child.returncode, child.stderr.decode(errors="replace")


def _take_in(segment: Path, output: bytes, code: int, errors: str, report: Report, walked: _Walked) -> None:
    done = False
    for line in output.splitlines():
        with contextlib.suppress(ValueError, KeyError, TypeError):
            match json.loads(line):
                case {"what": what, "detail": detail}:
                    report.damage.append(Finding(segment, what, detail))
                case {"ordinal": ordinal, "first": first, "end": end}:
                    walked.ranges.setdefault(ordinal, []).append((first, end))
                case {"samples": samples, "blocks": blocks, "events": events}:
                    walked.samples.update(samples)
                    report.blocks += blocks
                    report.events += events
                    done = True
    if code or not done:
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with {code}"
        last = errors.strip().splitlines()[-1:]
        detail = f"the process that read it {how}" + "".join(f": {line}" for line in last)
        report.damage.append(Finding(segment, "reader", detail))


def _gaps(ordinal: int, ranges: list[tuple[int, int]], *, from_start: bool) -> Iterator[str]:
    ranges = sorted(ranges)
    expected = 0 if from_start else ranges[0][0]
    for first, end in ranges:
        if first > expected:
            yield f"sample {ordinal} lacks events {expected} to {first - 1}"
        elif first < expected:
            yield f"sample {ordinal} has events {first} to {min(expected, end) - 1} twice"
        expected = max(expected, end)


# What the child does.


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


def _main(path: Path) -> None:
    told: collections.Counter[str] = collections.Counter()
    try:
        for line in _walk(path):
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


if __name__ == "__main__":
    _main(Path(sys.argv[1]))
