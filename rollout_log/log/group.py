"""Events of one or several samples as columns: what the chunks of a sealed segment hold.

The data of Deltas goes through `rollout_log.columns`; request numbers, times and the cuts of reads are
packed integers; every other event stays as it was encoded, and all of those are compressed together.
Whatever would not come back byte for byte, such as an event of a later version, is among the others.
`group_reader` is the way back.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import NamedTuple, Union

import msgspec
import zstandard

from rollout_log.columns import pack, pack_ints
from rollout_log.errors import LogDamaged
from rollout_log.events import Delta, Reads

__all__ = [
    "COLUMNS",
    "DELTA",
    "OTHER",
    "READS",
    "ZSTD",
    "Group",
    "Item",
    "Run",
    "Span",
    "decode_group",
    "encode_items",
    "pack_group",
    "places_of",
    "spans_of",
    "split_events",
]

Item = Union[msgspec.Raw, Delta, Reads]  # noqa: UP007 - a runtime value, which 3.10 cannot build with strings
"""An event, encoded or not."""

WIDE = 16 << 10
"""Bytes. Frames that are longer than this on average repeat what came before (cumulative streams):
zstd with a long window beats columns there, and takes far less time."""
LEVEL = 12
"""Of zstd, for everything but the columns."""
OTHER, DELTA, READS = range(3)
COLUMNS, ZSTD = range(2)
_DELTA_HEAD, _READS_HEAD = b"\x95\x04", b"\x94\x07"
"""How the usual encoding of each begins: an array of so many, and the tag."""
_FRAMINGS = 64
"""Different ways in which the frames of one group may be framed."""
_LEAST, _MOST = -(1 << 63), (1 << 63) - 1


class Run(msgspec.Struct, array_like=True, gc=False):
    """Consecutive events of one sample."""

    ordinal: int
    first: int
    events: list[Item]


class Group(msgspec.Struct, array_like=True):
    """The content of a chunk of events (`docs/format.md`). Fields are only ever added at the end."""

    runs: list[tuple[int, int, int]]
    """Ordinal, first sequence and number of events, in the order of `kinds`."""
    kinds: bytes
    """Packed integers, one per event; all `bytes` below are packed integers where nothing else is said."""
    requests: bytes
    """Numbers, of Deltas and Reads."""
    times: bytes
    """Of Deltas."""
    codec: int
    lengths: bytes
    """Of the frames, where the codec is zstd."""
    frames: bytes
    """Packed columns, or one zstd frame of the data of all Deltas."""
    framings: list[tuple[bytes, bytes]]
    """What was around the data of frames that are not framed as `data: …\\n\\n`."""
    framed: bytes
    """For each Delta, 0 or the place in `framings` plus one."""
    cuts: bytes
    """How many reads each Reads has."""
    sizes: bytes
    gaps: bytes
    others: bytes
    """zstd of a msgpack array of all other events."""
    weights: bytes = b""
    """Of each span (`spans_of`): the bytes of its frames."""


_encode = msgspec.msgpack.Encoder().encode
_decode_delta = msgspec.msgpack.Decoder(Delta).decode
_decode_reads = msgspec.msgpack.Decoder(Reads).decode
_decode_parts = msgspec.msgpack.Decoder(list[msgspec.Raw]).decode
decode_group = msgspec.msgpack.Decoder(Group).decode


def split_events(payload: bytes) -> list[Item]:
    """Cut the payload of a block into its events, decoding none. Raises `LogDamaged`."""
    try:
        return list(_decode_parts(payload))
    except (msgspec.DecodeError, RecursionError) as error:
        raise LogDamaged(f"events cannot be told apart: {error}") from error


def encode_items(events: Sequence[Item]) -> bytes:
    """Encode events as `encode_events` does."""
    return _encode(events)


def pack_group(runs: Sequence[Run]) -> bytes:
    """Pack runs of encoded events."""
    columns = _Columns()
    for run in runs:
        for event in run.events:
            columns.add(event)
    return _encode(columns.pack([(run.ordinal, run.first, len(run.events)) for run in runs]))


def places_of(content: bytes) -> list[tuple[int, int, int]]:
    """Return the runs of a group without their events: ordinal, first sequence, number of events."""
    return decode_group(content).runs


class Span(NamedTuple):
    """Deltas of one request, and the Reads among them, that follow each other in a run."""

    start: int
    """Place of its first event among those of the group …"""
    events: int
    request: int
    first: int
    """… and of its first Delta among the Deltas."""
    deltas: int


_TOGETHER = re.compile(rb"[\x01\x02]+")


def spans_of(counts: Iterable[int], kinds: bytes, requests: Sequence[int]) -> Iterator[list[Span]]:
    """Yield the spans of each run, where runs have so many events."""
    start = number = first = 0
    for count in counts:
        spans = []
        for found in _TOGETHER.finditer(kinds, start, start + count):
            at, theirs = found.start(), requests[number : number + len(found[0])]
            number += len(theirs)
            for request, events in _in_a_row(theirs):
                deltas = kinds.count(DELTA, at, at + events)
                spans.append(Span(at, events, request, first, deltas))
                at, first = at + events, first + deltas
        yield spans
        start += count


def _in_a_row(numbers: Sequence[int]) -> list[tuple[int, int]]:
    """Return equal numbers in a row, with how many they are."""
    if numbers.count(numbers[0]) == len(numbers):  # nearly always
        return [(numbers[0], len(numbers))]
    return [(number, len(list(same))) for number, same in groupby(numbers)]


class _Columns:
    """The columns of a group that is being packed."""

    def __init__(self) -> None:
        self.kinds: list[int] = []
        self.requests: list[int] = []
        self.times: list[int] = []
        self.frames: list[bytes] = []
        self.framings: dict[tuple[bytes, bytes], int] = {}
        self.framed: list[int] = []
        self.cuts: list[int] = []
        self.sizes: list[int] = []
        self.gaps: list[int] = []
        self.others: list[Item] = []

    def add(self, event: Item) -> None:
        raw = event if isinstance(event, msgspec.Raw) else msgspec.Raw(_encode(event))
        data = bytes(raw)
        if data.startswith(_DELTA_HEAD) and self._add_delta(data):
            self.kinds.append(DELTA)
        elif data.startswith(_READS_HEAD) and self._add_reads(data):
            self.kinds.append(READS)
        else:
            self.kinds.append(OTHER)
            self.others.append(raw)

    def _add_delta(self, data: bytes) -> bool:
        try:
            delta = _decode_delta(data)
        except msgspec.DecodeError:
            return False
        if _encode(delta) != data or not _fit((delta.number, delta.time)):
            return False
        framing = 0
        if delta.raw is not None:
            if not delta.data:
                return False
            before, found, after = delta.raw.partition(delta.data)
            if not found or ((before, after) not in self.framings and len(self.framings) == _FRAMINGS):
                return False
            framing = self.framings.setdefault((before, after), len(self.framings) + 1)
        self.requests.append(delta.number)
        self.times.append(delta.time)
        self.frames.append(delta.data)
        self.framed.append(framing)
        return True

    def _add_reads(self, data: bytes) -> bool:
        try:
            reads = _decode_reads(data)
        except msgspec.DecodeError:
            return False
        if len(reads.sizes) != len(reads.times) or _encode(reads) != data:
            return False
        if not _fit((reads.number, *reads.sizes, *reads.times)):
            return False
        self.requests.append(reads.number)
        self.cuts.append(len(reads.sizes))
        self.sizes += reads.sizes
        self.gaps += reads.times
        return True

    def pack(self, runs: list[tuple[int, int, int]]) -> Group:
        codec, lengths, frames = self._pack_frames()
        return Group(
            runs,
            pack_ints(self.kinds),
            pack_ints(self.requests),
            pack_ints(self.times),
            codec,
            lengths,
            frames,
            list(self.framings),
            pack_ints(self.framed),
            pack_ints(self.cuts),
            pack_ints(self.sizes),
            pack_ints(self.gaps),
            _compress(_encode(self.others)),
            pack_ints(list(self._weights([count for _, _, count in runs]))),
        )

    def _weights(self, counts: Iterable[int]) -> Iterator[int]:
        lengths = list(map(len, self.frames))
        for spans in spans_of(counts, bytes(self.kinds), self.requests):
            for span in spans:
                yield sum(lengths[span.first : span.first + span.deltas])

    def _pack_frames(self) -> tuple[int, bytes, bytes]:
        size = sum(map(len, self.frames))
        if size <= WIDE * len(self.frames):
            return COLUMNS, b"", pack(self.frames)
        return ZSTD, pack_ints(list(map(len, self.frames))), _compress(b"".join(self.frames))


def _fit(numbers: Iterable[int]) -> bool:
    return all(_LEAST <= number <= _MOST for number in numbers)


def _compress(data: bytes) -> bytes:
    """Compress with a window as long as the data, up to what every reader agrees to."""
    window = min(max(len(data).bit_length(), 10), 27)
    parameters = zstandard.ZstdCompressionParameters.from_level(
        LEVEL, window_log=window, enable_ldm=window > 20
    )
    return zstandard.ZstdCompressor(compression_params=parameters).compress(data)
