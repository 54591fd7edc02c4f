"""Blocks: consecutive events of one sample in one commit, and how they are encoded (`docs/format.md`).

They lie on disk in batches, which `batch` packs and unpacks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import TYPE_CHECKING

import msgspec

from rollout_log.errors import LogDamaged
from rollout_log.events import Closed, Event, Marked, Opened, decode_events, encode_events

if TYPE_CHECKING:
    from rollout_log.stretch import Stretch

__all__ = [
    "COLUMNS",
    "RAW",
    "SPLIT_AT",
    "ZSTD",
    "Block",
    "Piece",
    "encode_blocks",
    "pieces_of",
    "writer_identity",
]

RAW, ZSTD, COLUMNS = 0, 1, 2
"""Codecs. Columns: rebuilt from a sealed segment, and never stored so. 128 and above: private use."""

SPLIT_ABOVE = 64 << 10
"""Bytes of encoded events in one block; a single larger event is not split."""
SPLIT_AT = 192
"""Events in one block: with frames of usual size the bytes are right then, and nothing is encoded twice."""


class Block(msgspec.Struct, frozen=True, gc=False):
    """Consecutive events of one sample, checked and decompressed."""

    writer: bytes
    """`writer_identity` of the folder it was written in."""
    ordinal: int
    first: int
    count: int
    codec: int
    stored: int
    """Bytes on disk: its share of the batch or chunk that it lies in."""
    payload: bytes
    """What `encode_events` made."""

    def events(self) -> list[Event]:
        """Decode the events. Raises `LogDamaged` where the payload is not what the header promises."""
        try:
            events = decode_events(self.payload)
        except (msgspec.DecodeError, ValueError, TypeError, RecursionError) as error:
            raise LogDamaged(
                f"block {self.first} of sample {self.ordinal} does not decode: {error}"
            ) from error
        if len(events) != self.count:
            raise LogDamaged(
                f"block {self.first} of sample {self.ordinal} has {len(events)} events, "
                f"and {self.count} by its header"
            )
        return events


class Piece(msgspec.Struct, frozen=True, gc=False):
    """Consecutive events of one sample, as folding takes them."""

    first: int
    count: int
    events: list[Event] | Stretch


def pieces_of(blocks: Iterable[Block], start: int) -> Iterator[Piece]:
    """Yield the events of blocks from `start` on."""
    for block in blocks:
        events = block.events()[max(start - block.first, 0) :]
        yield Piece(max(start, block.first), len(events), events)


def writer_identity(folder_name: str) -> bytes:
    """Return the 8 bytes that stand for a writer in its blocks."""
    return hashlib.blake2b(folder_name.encode(), digest_size=8).digest()


def encode_blocks(first: int, events: Sequence[Event]) -> list[tuple[int, int, bytes]]:
    """Encode consecutive events as one or more blocks: first sequence, number of events, payload."""
    count = len(events)
    if count > SPLIT_AT:
        starts = range(0, count, SPLIT_AT)
        parts = [encode_blocks(first + start, events[start : start + SPLIT_AT]) for start in starts]
        return list(chain.from_iterable(parts))
    payload = _encode(events)
    if len(payload) > SPLIT_ABOVE and count > 1:
        half = count // 2
        return encode_blocks(first, events[:half]) + encode_blocks(first + half, events[half:])
    return [(first, count, payload)]


def _encode(events: Sequence[Event]) -> bytes:
    try:
        return encode_events(events)
    except (TypeError, ValueError, OverflowError, RecursionError):
        return encode_events([_encodable(event) for event in events])


def _encodable(event: Event) -> Event:
    """Return the event, or what of it can be written: one odd value must not cost the events around it."""
    try:
        encode_events([event])
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        reason = {"unencodable": f"{type(error).__name__}: {error}".encode("ascii", "replace").decode()}
        candidates: list[Event] = []
        if isinstance(event, Opened):
            candidates.append(msgspec.structs.replace(event, metadata=reason))
        elif isinstance(event, Closed):
            candidates.append(msgspec.structs.replace(event, sample=reason))
            candidates.append(msgspec.structs.replace(event, reward=None, sample=reason))
        candidates.append(Marked("unencodable", {"kind": type(event).__name__, **reason}))
        for candidate in candidates:
            try:
                encode_events([candidate])
            except (TypeError, ValueError, OverflowError, RecursionError):
                continue
            return candidate
    return event
