"""A chunk of events of a sealed segment, read: all of it byte for byte, or one sample for folding.

Folding needs few of the frames as they were; what the others say is read from their columns.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cached_property
from itertools import accumulate, chain, islice, pairwise

import msgspec
import zstandard

from rollout_log.columns import Alike, Columns, read_columns, unpack, unpack_ints
from rollout_log.errors import LogDamaged
from rollout_log.events import Delta, Event, Reads, decode_events
from rollout_log.log.group import (
    COLUMNS,
    DELTA,
    OTHER,
    READS,
    ZSTD,
    Item,
    Run,
    Span,
    decode_group,
    encode_items,
    spans_of,
    split_events,
)

__all__ = ["GroupReader"]

LIMIT = 1 << 30
"""Bytes of one part of a group that reading agrees to …"""
_MOST_INTS = 1 << 26
"""… and integers of one list: a group that a writer makes has far fewer of both."""
_LEAST = 16
"""Frames that are alike; fewer are sooner rendered."""
_SHORT = 256
"""Events of a run. Who asks for a second one that is shorter asks for more: all are rendered at once."""


class GroupReader:
    """A group that `pack_group` made. Where it is not, everything raises `LogDamaged`, which says `where`."""

    def __init__(self, content: bytes, where: str = "a group of events") -> None:
        self._where = where
        self._asked = False
        with self.damage():
            self._group = decode_group(content)
        self.places = self._group.runs
        """Ordinal, first sequence and number of events of each run."""

    @cached_property
    def runs(self) -> list[Run]:
        """The events of all runs; some of them are decoded."""
        with self.damage():
            events = self._events()
            runs = [Run(ordinal, first, list(islice(events, count))) for ordinal, first, count in self.places]
            if next(events, None) is not None or any(
                len(run.events) != count for run, (_, _, count) in zip(runs, self.places, strict=True)
            ):
                raise LogDamaged("a group has other events than it says")
            self._check_weights(runs)
        return runs

    def parts(self, place: int) -> Iterator[list[Event] | SealedStretch]:
        """Yield the events of one run, in order; Deltas and the Reads among them as stretches."""
        again, self._asked = self._asked, True
        rendered = again and self.places[place][2] < _SHORT
        with self.damage():
            if rendered or self._group.codec != COLUMNS or not self._group.weights:
                yield decode_events(encode_items(self.runs[place].events))
                return
            at = sum(count for _, _, count in self.places[:place])
            other = self._kinds.count(OTHER, 0, at)
            end = at + self.places[place][2]
            for span, weight in self._spans[place]:
                yield decode_events(encode_items(self._others[other : other + span.start - at]))
                yield SealedStretch(self, span, weight)
                other, at = other + span.start - at, span.start + span.events
            yield decode_events(encode_items(self._others[other : other + end - at]))

    # Parts

    @cached_property
    def columns(self) -> Columns:
        """The frames."""
        return read_columns(self._group.frames, limit=LIMIT)

    @cached_property
    def times(self) -> array[int]:
        """When each Delta came."""
        return _ints(self._group.times)

    @contextmanager
    def damage(self) -> Iterator[None]:
        """Turn whatever is raised by bytes that do not fit together into `LogDamaged`."""
        try:
            yield
        except LogDamaged as error:
            raise LogDamaged(f"{self._where}: {error}") from error
        except (msgspec.DecodeError, zstandard.ZstdError, RuntimeError, IndexError, ValueError) as error:
            # RuntimeError: a column that ends too early (StopIteration in a generator), or a RecursionError
            raise LogDamaged(f"{self._where} cannot be read: {type(error).__name__}: {error}") from error

    @cached_property
    def _kinds(self) -> bytes:
        return bytes(_ints(self._group.kinds).tolist())

    @cached_property
    def _requests(self) -> array[int]:
        return _ints(self._group.requests)

    @cached_property
    def _others(self) -> list[Item]:
        return split_events(_inflate(self._group.others))

    @cached_property
    def _spans(self) -> list[list[tuple[Span, int]]]:
        """The spans of each run, and what their frames weigh."""
        spans = list(spans_of([count for _, _, count in self.places], self._kinds, self._requests))
        weights = _ints(self._group.weights)
        if len(weights) != sum(map(len, spans)):
            raise LogDamaged("a group has not one weight for each span of its Deltas")
        each = iter(weights)
        return [[(span, next(each)) for span in those] for those in spans]

    def _check_weights(self, runs: list[Run]) -> None:
        """What is folded unrendered is not seen otherwise, so `verify` looks at it here."""
        if not self._group.weights:
            return
        lengths = [len(event.data) for run in runs for event in run.events if isinstance(event, Delta)]
        for span, weight in chain.from_iterable(self._spans):
            if sum(lengths[span.first : span.first + span.deltas]) != weight:
                raise LogDamaged(
                    f"the frames of request {span.request} do not weigh the {weight} bytes they should"
                )

    def _events(self) -> Iterator[Item]:
        """Yield all events."""
        group = self._group
        requests, times = iter(self._requests), iter(self.times)
        frames = iter(self._frames())
        framed = iter(_ints(group.framed))
        cuts = iter(_ints(group.cuts))
        sizes = iter(_ints(group.sizes))
        gaps = iter(_ints(group.gaps))
        others = iter(self._others)
        for kind in _ints(group.kinds):
            if kind == DELTA:
                data, framing = next(frames), next(framed)
                before, after = group.framings[framing - 1] if framing else (b"", b"")
                yield Delta(next(requests), data, next(times), before + data + after if framing else None)
            elif kind == READS:
                count = next(cuts)
                yield Reads(next(requests), list(islice(sizes, count)), list(islice(gaps, count)))
            elif kind == OTHER:
                yield next(others)
            else:
                raise LogDamaged(f"an event of a group is of kind {kind}")

    def _frames(self) -> Iterable[bytes]:
        group = self._group
        if group.codec == COLUMNS:
            return unpack(group.frames, limit=LIMIT)
        if group.codec != ZSTD:
            raise LogDamaged(f"frames of a group have codec {group.codec}, which this version cannot read")
        ends = accumulate(_ints(group.lengths), initial=0)
        data = _inflate(group.frames)
        return [data[start:end] for start, end in pairwise(ends)]


class SealedStretch:
    """Deltas of one request in a row, with the Reads among them (`rollout_log.stretch`)."""

    def __init__(self, group: GroupReader, span: Span, weight: int) -> None:
        self.request = span.request
        self.events = span.events
        self.count = span.deltas
        self.bytes = weight
        self._group = group
        self._first = span.first

    def parts(self) -> Iterator[SealedPart]:
        """Yield the Deltas: long rows that are alike, and what is between those."""
        at = start = self._first
        with self._group.damage():
            for alike in self._group.columns.alike(start, start + self.count):
                if alike.frames >= _LEAST:
                    if start < at:
                        yield SealedPart(self._group, self.request, start, at)
                    start = at + alike.frames
                    yield SealedPart(self._group, self.request, at, start, alike)
                at += alike.frames
            if start < at:
                yield SealedPart(self._group, self.request, start, at)


class SealedPart:
    """Some Deltas of a stretch."""

    def __init__(
        self, group: GroupReader, request: int, start: int, end: int, frames: Alike | None = None
    ) -> None:
        self.frames = frames
        self.count = end - start
        self.first_time = group.times[start]
        self.last_time = group.times[end - 1]
        self._group = group
        self._request = request
        self._start = start
        self._end = end

    def deltas(self) -> list[Delta]:
        """Render them, as far as folding needs: without what is around their data."""
        with self._group.damage():
            frames = self._group.columns.render(self._start, self._end)
            times = self._group.times[self._start : self._end]
            return [Delta(self._request, data, time) for data, time in zip(frames, times, strict=True)]


def _ints(packed: bytes) -> array[int]:
    return unpack_ints(packed, limit=_MOST_INTS)


def _inflate(data: bytes) -> bytes:
    size = zstandard.frame_content_size(data)
    if not 0 <= size <= LIMIT:
        raise LogDamaged(f"a group says it has {size} bytes; the limit is {LIMIT}")
    return zstandard.ZstdDecompressor().decompress(data, max_output_size=size)
