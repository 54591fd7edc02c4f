"""Whether a log is whole: lengths, checksums, sequences, indexes. Trusts nothing it reads.

LMDB reads a damaged file in place, and then dies by a signal or silently skips records. So every segment
is walked by `verify_segment` in a process of its own, which prints one JSON object a line.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec

from rollout_log.child import command_of
from rollout_log.errors import LogDamaged
from rollout_log.log.directory import (
    is_live,
    logs_at,
    read_marker,
    sealed_path,
    segment_number,
    segment_path,
    segments_of,
    writers_of,
)
from rollout_log.log.retention import Pruned, read_pruned

__all__ = ["Finding", "Report", "verify"]

_PATIENCE_S = 600
"""For a segment; another second for each MB of it."""


class Finding(msgspec.Struct, frozen=True):
    """One thing that is wrong."""

    path: Path
    what: str
    """In a word: length, pages, reader, header, hash, table, batch, last, block, sequence, sample, key, step,
    segment, marker."""
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
                if (answer := _read_child(segment)) is not None:
                    _take_in(answer, report, walked)
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
    if not (there or pruned or segments_of(folder) or is_live(folder)) and folder.exists():
        yield Finding(folder, "segment", "it has no segment, and nothing says that any was pruned")
    for number in range(1, max(there | pruned, default=0)):
        if number not in there and number not in pruned and not segment_path(folder, number).exists():
            yield Finding(folder, "segment", f"segment {number} is gone, and nothing says that it was pruned")
    for segment in segments:
        if segment.is_symlink() and not segment.exists():
            yield Finding(segment, "segment", "it is a link to nothing")


class _Answer(NamedTuple):
    """What the child that walked a segment said, and how it ended."""

    segment: Path
    lines: bytes = b""
    code: int = 0
    errors: str = ""


def _read_child(segment: Path) -> _Answer | None:
    """Walk a segment in a child process; None where it was pruned meanwhile."""
    answer = _ask(segment)
    if segment.exists():
        return answer
    sealed = sealed_path(segment)  # meanwhile, and the answer may be of half a file
    return _ask(sealed) if sealed != segment and sealed.exists() else None


def _ask(segment: Path) -> _Answer:
    try:
        size = segment.stat().st_size
        child = subprocess.run(  # noqa: S603 - a module of this package, on a path that is passed as it is
            command_of("rollout_log.log.verify_segment:main", os.fspath(segment.absolute())),
            capture_output=True,
            cwd="/",
            check=False,
            timeout=_PATIENCE_S + size / 1e6,
        )
    except FileNotFoundError:
        return _Answer(segment)
    except subprocess.TimeoutExpired as error:
        return _Answer(segment, error.stdout or b"", -signal.SIGKILL, "it went on for too long")
    return _Answer(segment, child.stdout, child.returncode, child.stderr.decode(errors="replace"))


def _take_in(answer: _Answer, report: Report, walked: _Walked) -> None:
    segment, lines, code, errors = answer
    done = False
    for line in lines.splitlines():
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
