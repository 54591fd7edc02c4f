"""The reader: all writers of a log, or of several logs, as one table of samples."""

from __future__ import annotations

import difflib
import itertools
import re
from bisect import bisect
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeVar

import msgspec

from rollout_log.counting import several
from rollout_log.errors import LogDamaged, SampleNotFound
from rollout_log.events import Event, Opened
from rollout_log.log.block import Block, Piece
from rollout_log.log.directory import logs_at, read_marker, segments_of, writers_of
from rollout_log.log.environment import NothingCommitted
from rollout_log.log.opening import open_segment
from rollout_log.log.retention import Pruned, read_pruned
from rollout_log.log.segment import Segment
from rollout_log.log.summary import Summary

if TYPE_CHECKING:
    import os

    from typing_extensions import Self

    from rollout_log.fold import Rollout
    from rollout_log.log.sealed import SealedSegment

__all__ = ["Entry", "LogReader", "Ref", "Tables"]

_Events = TypeVar("_Events", Block, Piece)
_MOST_COMPARED = 1000
_MOST_LIVES = 5
_VIEW = re.compile(r"(?P<key>.+)#(?P<choice>\d+)", re.DOTALL)
_LIFE = re.compile(r"(?P<key>.+)@(?P<incarnation>\d+)", re.DOTALL)


class Ref(msgspec.Struct, frozen=True, gc=False):
    """Where a sample is. Good for any reader of the same log."""

    key: str
    run: str
    incarnation: int
    """Counted over all writers."""
    folder: Path
    ordinal: int
    choice: int | None = None
    """The view of one choice of n; None: the sample as a whole."""


class Entry(msgspec.Struct, frozen=True, gc=False):
    """One line of a listing."""

    summary: Summary
    name: str
    """What `find` finds it by: `KEY` for the newest life of the key, else `KEY@n`."""
    ref: Ref


class _Row(msgspec.Struct, gc=False):
    folder: Path
    ordinal: int
    summary: Summary
    incarnation: int = 0
    newest: bool = True

    def entry(self) -> Entry:
        summary = self.summary
        name = summary.key if self.newest else f"{summary.key}@{self.incarnation}"
        return Entry(
            summary, name, Ref(summary.key, summary.run, self.incarnation, self.folder, self.ordinal)
        )

    def age(self) -> tuple[int, str, int]:
        return self.summary.opened_unix_ns, self.folder.name, self.ordinal


class Tables(Protocol):
    """What the reader asks of a segment."""

    def summary(self, ordinal: int) -> Summary | None: ...

    def summaries(self) -> Iterator[tuple[int, Summary]]: ...

    def with_key(self, key: str) -> list[int]: ...

    def in_step(self, step: int) -> list[int]: ...

    def blocks(self, ordinal: int, start: int = 0) -> Iterator[Block]: ...

    def pieces(self, ordinal: int, start: int = 0) -> Iterator[Piece]: ...


class LogReader:
    """Reads a log beside its writers, in this process or others. Get it from `LogReader.open`.

    Everything it returns is a copy; it holds no read transaction between calls, and each call sees
    what is committed by then.
    """

    def __init__(self, logs: list[Path]) -> None:
        self.logs = logs
        self._segments: dict[Path, Segment | SealedSegment] = {}

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> LogReader:
        """Open a log, or a directory of logs. Raises `LogNotFound`, `NotALog`, `LogTooNew`, `LogDamaged`."""
        logs = logs_at(Path(path))
        for log in logs:
            read_marker(log)
        return cls(logs)

    def close(self) -> None:
        """Let go of the files. A closed reader opens them again when it is used."""
        while self._segments:
            self._segments.popitem()[1].close()

    def __reduce__(self) -> tuple[type[LogReader], tuple[list[Path]]]:
        """Travel between processes as what is read, not as the files that are open here."""
        return type(self), (self.logs,)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def samples(
        self, *, step: int | None = None, status: str | None = None, key_prefix: str | None = None
    ) -> Iterator[Entry]:
        """Yield samples in the order they opened.

        `step`: those that took part in a step, found through the step table alone. `status` and
        `key_prefix` narrow further.
        """
        rows = self._rows() if step is None else self._rows_of_step(step)
        if step is None:
            _number(rows)
        else:
            lives: dict[str, list[_Row]] = {}
            for row in rows:
                key = row.summary.key
                if key not in lives:
                    lives[key] = _number(self._rows_of_key(key))
                for life in lives[key]:
                    if (life.folder, life.ordinal) == (row.folder, row.ordinal):
                        row.incarnation, row.newest = life.incarnation, life.newest
        for row in sorted(rows, key=_Row.age):
            summary = row.summary
            if status is not None and summary.status != status:
                continue
            if key_prefix is None or summary.key.startswith(key_prefix):
                yield row.entry()

    def summaries(self) -> Iterator[Summary]:
        """Yield every sample's newest summary, in no order and without holding them: for counting."""
        for folder in self._folders():
            seen = set[int]()
            segments = self._of(folder)
            for left, segment in zip(reversed(range(len(segments))), reversed(segments), strict=True):
                for ordinal, summary in segment.summaries():
                    if ordinal not in seen:
                        if left:  # the oldest is the last, and mostly the largest
                            seen.add(ordinal)
                        yield summary

    def find(self, name: str) -> Ref:
        """Return the sample of a name: `KEY`, `KEY@n`, `KEY#i`, `KEY@n#i`, or a child, `KEY~k`.

        A sample whose key is the very name wins over the other readings; of several runs, the newest.
        Raises `SampleNotFound`, which names the nearest keys.
        """
        found = self._find(name)
        if found is None:
            keys = sorted({summary.key for summary in self.summaries()})
            at = bisect(keys, name)  # of many, those that begin as it does
            alike = keys[max(at - _MOST_COMPARED, 0) : at + _MOST_COMPARED]
            near = difflib.get_close_matches(name, alike, n=3, cutoff=0.4)
            count = several(len(keys), "key")
            hint = f"the nearest: {', '.join(map(repr, near))}" if near else f"it has {count}"
            if lives := self._lives(name):
                hint = (
                    f"there {'is' if len(lives) == 1 else 'are'} {', '.join(map(repr, lives[-_MOST_LIVES:]))}"
                )
            where = ", ".join(str(log) for log in self.logs[:3])
            pruned = self.pruned()
            gone = (
                f"; {several(len(pruned), 'segment')} pruned, with what was in there alone" if pruned else ""
            )
            raise SampleNotFound(f"no sample {name!r} in {where}; {hint}{gone}")
        return found

    def _lives(self, name: str) -> list[str]:
        """Return the names of all lives of a key, where `name` asks for a life of it."""
        view = _VIEW.fullmatch(name)
        life = _LIFE.fullmatch(name if view is None else view["key"])
        if life is None:
            return []
        rows = _number(self._rows_of_key(life["key"]))
        return [f"{life['key']}@{number}" for number in sorted({row.incarnation for row in rows})]

    def pruned(self) -> list[Pruned]:
        """Return which segments were deleted to free the disk. Raises `LogDamaged`."""
        return [each for folder in self._folders() for each in read_pruned(folder)]

    def summary(self, ref: Ref) -> Summary:
        """Return a sample's newest summary."""
        for segment in reversed(self._of(ref.folder)):
            found = segment.summary(ref.ordinal)
            if found is not None:
                return found
        raise SampleNotFound(f"no sample {ref.ordinal} in {ref.folder}")

    def events(self, ref: Ref, start: int = 0) -> Iterator[tuple[int, Event]]:
        """Yield a sample's numbered events from `start` on, across segments. Raises `LogDamaged`."""
        for block in self.blocks(ref, start):
            for sequence, event in enumerate(block.events(), block.first):
                if sequence >= start:
                    yield sequence, event
                    start = sequence + 1

    def blocks(self, ref: Ref, start: int = 0) -> Iterator[Block]:
        """Yield a sample's blocks that hold events from `start` on, in order. Raises `LogDamaged`."""
        return self._across(ref, start, lambda segment, at: segment.blocks(ref.ordinal, at))

    def rollout(self, ref: Ref | str) -> Rollout:
        """Fold a sample; one that continues an older life of its key starts from that one's rollout."""
        from rollout_log.fold import Rollout

        ref = self.find(ref) if isinstance(ref, str) else ref
        rollout = Rollout()
        for piece in self._across(ref, 0, lambda segment, at: segment.pieces(ref.ordinal, at)):
            if piece.first == 0 and isinstance(piece.events, list):
                older = self._continued(ref, piece.events[0])
                if older is not None:
                    rollout = Rollout.continue_from(self.rollout(older[0]), older[1])
            rollout.apply_piece(piece.first, piece.events)
        return rollout

    def continued(self, ref: Ref) -> tuple[Ref, int] | None:
        """Return the older life and the length that a sample goes on from; None: it began afresh."""
        head = next(self.events(ref), None)
        return self._continued(ref, head[1]) if head is not None else None

    def _continued(self, ref: Ref, head: Event) -> tuple[Ref, int] | None:
        if not isinstance(head, Opened) or head.continues is None:
            return None
        incarnation, length = head.continues
        for row in _number(self._rows_of_key(ref.key)):
            if (
                row.summary.run == ref.run
                and row.incarnation == incarnation
                and incarnation < ref.incarnation
            ):
                return row.entry().ref, length
        return None

    def _across(
        self, ref: Ref, start: int, part_of: Callable[[Tables, int], Iterator[_Events]]
    ) -> Iterator[_Events]:
        """Yield what the segments have of a sample's events from `start` on, each of them once."""
        segments = self._of(ref.folder)
        while segments:
            segment, *segments = segments
            try:
                for events in part_of(segment, start):
                    if events.first + events.count > start:
                        yield events
                        start = events.first + events.count
            except LogDamaged:
                now = self._of(ref.folder)
                if segment in now:
                    raise
                segments = now  # sealed and closed meanwhile: go on in the sealed one

    def _find(self, name: str) -> Ref | None:
        rows = [row for row in _number(self._rows_of_key(name)) if row.newest]
        if rows:  # of several runs, the newest
            return max(rows, key=_Row.age).entry().ref
        view = _VIEW.fullmatch(name)
        if view is not None:
            found = self._find(view["key"])
            return msgspec.structs.replace(found, choice=int(view["choice"])) if found else None
        life = _LIFE.fullmatch(name)
        if life is not None:
            rows = [
                row
                for row in _number(self._rows_of_key(life["key"]))
                if row.incarnation == int(life["incarnation"])
            ]
            return max(rows, key=_Row.age).entry().ref if rows else None
        return None

    def _rows(self) -> list[_Row]:
        """Read all samples. In each writer the newest segment has a sample's newest row."""
        rows: list[_Row] = []
        for folder in self._folders():
            theirs: dict[int, _Row] = {}
            for segment in self._of(folder):
                for ordinal, summary in segment.summaries():
                    theirs[ordinal] = _Row(folder, ordinal, summary)
            rows += theirs.values()
        return rows

    def _rows_of_key(self, key: str) -> list[_Row]:
        return self._rows_where(lambda segment: segment.with_key(key))

    def _rows_of_step(self, step: int) -> list[_Row]:
        return self._rows_where(lambda segment: segment.in_step(step))

    def _rows_where(self, ordinals_in: Callable[[Tables], Iterable[int]]) -> list[_Row]:
        rows: list[_Row] = []
        for folder in self._folders():
            segments = self._of(folder)
            left = {ordinal for segment in segments for ordinal in ordinals_in(segment)}
            for segment in reversed(segments):
                for ordinal in sorted(left):
                    summary = segment.summary(ordinal)
                    if summary is not None:
                        rows.append(_Row(folder, ordinal, summary))
                        left.discard(ordinal)
        return rows

    def _folders(self) -> Iterator[Path]:
        for log in self.logs:
            yield from writers_of(log)

    def _of(self, folder: Path) -> Sequence[Tables]:
        """Open a writer's segments, oldest first, and forget those that are gone."""
        before: list[Path] | None = None
        while True:
            there = segments_of(folder)
            for path in [path for path in self._segments if path.parent == folder and path not in there]:
                self._segments.pop(path).close()
            try:
                found = [self._open(path, newest=path == there[-1]) for path in there]
            except FileNotFoundError as error:
                if there == before:
                    raise LogDamaged(f"{error.filename} is a link to nothing") from error
                before = there  # sealed or pruned since it was listed
                continue
            return [segment for segment in found if segment is not None]

    def _open(self, path: Path, *, newest: bool) -> Tables | None:
        if path not in self._segments:
            try:
                self._segments[path] = open_segment(path)
            except NothingCommitted:
                if newest:
                    return None
                raise
        return self._segments[path]


def _number(rows: list[_Row]) -> list[_Row]:
    """Number the lives of each key in each run: as declared, but later than the one before it."""
    ordered = sorted(rows, key=lambda row: (row.summary.key, row.summary.run, row.folder.name, row.ordinal))
    for _, group in itertools.groupby(ordered, key=lambda row: (row.summary.key, row.summary.run)):
        number = -1
        lives = _by_age(list(group))
        for row in lives:
            number = row.incarnation = max(row.summary.incarnation, number + 1)
            row.newest = row is lives[-1]
    return rows


def _by_age(lives: list[_Row]) -> list[_Row]:
    """Sort lives of one key. Those of one writer stay in its order, whatever its clock said meanwhile."""
    if len(lives) == 1:
        return lives
    latest: dict[Path, int] = {}
    aged = []
    for row in lives:
        opened, folder, ordinal = row.age()
        opened = latest[row.folder] = max(opened, latest.get(row.folder, 0))
        aged.append(((opened, folder, ordinal), row))
    return [row for _, row in sorted(aged, key=lambda pair: pair[0])]
