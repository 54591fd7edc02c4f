"""Large parts of a frame or a request that the log keeps as length and hash, unless it is told to keep them.

Routed experts of a large model weigh as much as all the rest of a stream, sampling masks and images more, and
none of them is needed to know what a sample was. What is cut out says so in its place, in the JSON itself:

    "routed_experts":null,"routed_experts_elided":{"bytes":98304,"sha256":"…"}

The live sample has everything; only the log goes without. Pure, and cheap for what has nothing to cut.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Sequence

import msgspec

from rollout_log.events import Body, Delta, Event, Requested

__all__ = ["KINDS", "LARGE", "elide", "size_of"]

KINDS = ("routed_experts", "sampling_mask", "images")
"""What can be kept whole."""
LARGE = 2048
"""Bytes below which nothing is cut out."""

_EXPERTS = re.compile(rb'"routed_experts"\s*:\s*("[A-Za-z0-9+/=_\-]{%d,}")' % LARGE)
_MASK = re.compile(rb'"sampling_mask"\s*:\s*(\[[\[\]0-9,\s]{%d,}\])' % LARGE)
_IMAGE = re.compile(rb"(?<=;base64,)[A-Za-z0-9+/=_\-]{%d,}" % LARGE)


def elide(events: Sequence[Event], keep: Collection[str] = ()) -> Sequence[Event]:
    """Return events as the log takes them: the very same ones where nothing is to be cut out."""
    for event in events:  # nearly all are small Deltas
        if len(event.data if type(event) is Delta else _bytes(event)) > LARGE:
            return [_elided(each, keep) for each in events]
    return events


def size_of(event: Event) -> int:
    """Return how many bytes of a response an event stands for, as far as elision changes it."""
    if type(event) is Delta and event.raw is not None:
        return len(event.raw)
    return len(_bytes(event)) if type(event) is not Requested else 0


def _bytes(event: Event) -> bytes:
    kind = type(event)
    if kind is Delta or kind is Body:
        return event.data  # type: ignore[attr-defined, no-any-return]  # `kind is` does not narrow
    return event.body if kind is Requested else b""  # type: ignore[attr-defined]


def _elided(event: Event, keep: Collection[str]) -> Event:
    if isinstance(event, Requested):
        if "images" in keep or b";base64," not in event.body:
            return event
        return _without_images(event)
    if not isinstance(event, (Delta, Body)):
        return event
    data = _without(event.data, keep)
    if data is event.data:
        return event
    if isinstance(event, Body):
        return Body(event.number, data, event.time)
    raw = None if event.raw is None else event.raw.replace(event.data, data)
    return Delta(event.number, data, event.time, raw)


def _without(data: bytes, keep: Collection[str]) -> bytes:
    for name, pattern in (("routed_experts", _EXPERTS), ("sampling_mask", _MASK)):
        if name not in keep and b'"%b"' % name.encode() in data:
            data = pattern.sub(lambda found, name=name: _note(name, found[1]), data)  # type: ignore[misc]
    return data


def _note(name: str, value: bytes) -> bytes:
    digest = hashlib.sha256(value).hexdigest()
    return b'"%b":null,"%b_elided":{"bytes":%d,"sha256":"%b"}' % (
        name.encode(),
        name.encode(),
        len(value),
        digest.encode(),
    )


def _without_images(requested: Requested) -> Requested:
    """Cut image data out of a body, before and behind the place where its token ids go."""
    at = max(requested.ids_at, 0)
    head, tail = requested.body[:at], requested.body[at:]
    head, tail = (_IMAGE.sub(_image_note, part) for part in (head, tail))
    ids_at = len(head) if requested.ids_at >= 0 else requested.ids_at
    return msgspec.structs.replace(requested, body=head + tail, ids_at=ids_at)


def _image_note(found: re.Match[bytes]) -> bytes:
    image = found[0]
    return b"elided:%d:%b" % (len(image), hashlib.sha256(image).hexdigest().encode())
