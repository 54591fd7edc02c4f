"""Events of one or several samples as columns: what the chunks of a sealed segment hold.

The data of Deltas goes through `rollout_log.columns`; request numbers, times and the cuts of reads are
packed integers; every other event stays as it was encoded, and all of those are compressed together.
Whatever would not come back byte for byte, such as an event of a later version, is among the others.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, islice, pairwise
from typing import Union

import msgspec
import zstandard

from rollout_log.columns import pack, pack_ints, unpack, unpack_ints
from rollout_log.errors import LogDamaged
from rollout_log.events import Delta, Reads

__all__ = ["Item", "Run", "encode_items", "pack_group", "places_of", "split_events", "unpack_group"]

Item = Union[msgspec.Raw, Delta, Reads]  # noqa: UP007 - a runtime value, which 3.10 cannot build with strings
"""An event, encoded or not."""

WIDE = 16 << 10
"""Bytes. Frames that are longer than this on average repeat what came before (cumulative streams):
zstd with a long window beats columns there, and takes far less time."""
LEVEL = 12
"""Of zstd, for everything but the columns."""
LIMIT = 1 << 30
"""Bytes of one part of a group that reading agrees to …"""
_MOST_INTS = 1 << 26
"""… and integers of one list: a group that a writer makes has far fewer of both."""

_OTHER, _DELTA, _READS = range(3)
_COLUMNS, _ZSTD = range(2)
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


class _Group(msgspec.Struct, array_like=True):
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


_encode = msgspec.msgpack.Encoder().encode
_decode_delta = msgspec.msgpack.Decoder(Delta).decode
_decode_reads = msgspec.msgpack.Decoder(Reads).decode
_decode_parts = msgspec.msgpack.Decoder(list[msgspec.Raw]).decode
_decode_group = msgspec.msgpack.Decoder(_Group).decode


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


def unpack_group(content: bytes) -> list[Run]:
    """Return what `pack_group` was given; some events are decoded. Raises `LogDamaged`."""
    try:
        group = _decode_group(content)
        events = _events(group)
        runs = [Run(ordinal, first, list(islice(events, count))) for ordinal, first, count in group.runs]
        if next(events, None) is not None or any(
            len(run.events) != count for run, (_, _, count) in zip(runs, group.runs, strict=True)
        ):
            raise LogDamaged("a group has other events than it says")
    except (msgspec.DecodeError, zstandard.ZstdError, RuntimeError, IndexError, ValueError) as error:
        # RuntimeError: a column that ends too early (StopIteration in a generator), or a RecursionError
        raise LogDamaged(f"a group of events cannot be read: {type(error).__name__}: {error}") from error
    return runs


def places_of(content: bytes) -> list[tuple[int, int, int]]:
    """Return the runs of a group without their events: ordinal, first sequence, number of events."""
    return _decode_group(content).runs


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
            self.kinds.append(_DELTA)
        elif data.startswith(_READS_HEAD) and self._add_reads(data):
            self.kinds.append(_READS)
        else:
            self.kinds.append(_OTHER)
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

    def pack(self, runs: list[tuple[int, int, int]]) -> _Group:
        codec, lengths, frames = self._pack_frames()
        return _Group(
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
        )

    def _pack_frames(self) -> tuple[int, bytes, bytes]:
        size = sum(map(len, self.frames))
        if size <= WIDE * len(self.frames):
            return _COLUMNS, b"", pack(self.frames)
        return _ZSTD, pack_ints(list(map(len, self.frames))), _compress(b"".join(self.frames))


def _events(group: _Group) -> Iterator[Item]:
    """Yield the events of a group, in order."""
    requests = iter(_ints(group.requests))
    times = iter(_ints(group.times))
    frames = iter(_frames(group))
    framed = iter(_ints(group.framed))
    cuts = iter(_ints(group.cuts))
    sizes = iter(_ints(group.sizes))
    gaps = iter(_ints(group.gaps))
    others = iter(_decode_parts(_inflate(group.others)))
    for kind in _ints(group.kinds):
        if kind == _DELTA:
            data, framing = next(frames), next(framed)
            before, after = group.framings[framing - 1] if framing else (b"", b"")
            yield Delta(next(requests), data, next(times), before + data + after if framing else None)
        elif kind == _READS:
            count = next(cuts)
            yield Reads(next(requests), list(islice(sizes, count)), list(islice(gaps, count)))
        elif kind == _OTHER:
            yield next(others)
        else:
            raise LogDamaged(f"an event of a group is of kind {kind}")


def _frames(group: _Group) -> Iterable[bytes]:
    if group.codec == _COLUMNS:
        return unpack(group.frames, limit=LIMIT)
    if group.codec != _ZSTD:
        raise LogDamaged(f"frames of a group have codec {group.codec}, which this version cannot read")
    ends = accumulate(_ints(group.lengths), initial=0)
    data = _inflate(group.frames)
    return [data[start:end] for start, end in pairwise(ends)]


def _ints(packed: bytes) -> list[int]:
    return unpack_ints(packed, limit=_MOST_INTS).tolist()


def _fit(numbers: Iterable[int]) -> bool:
    return all(_LEAST <= number <= _MOST for number in numbers)


def _compress(data: bytes) -> bytes:
    """Compress with a window as long as the data, up to what every reader agrees to."""
    window = min(max(len(data).bit_length(), 10), 27)
    parameters = zstandard.ZstdCompressionParameters.from_level(
        LEVEL, window_log=window, enable_ldm=window > 20
    )
    return zstandard.ZstdCompressor(compression_params=parameters).compress(data)


def _inflate(data: bytes) -> bytes:
    size = zstandard.frame_content_size(data)
    if not 0 <= size <= LIMIT:
        raise LogDamaged(f"a group says it has {size} bytes; the limit is {LIMIT}")
    return zstandard.ZstdDecompressor().decompress(data, max_output_size=size)
