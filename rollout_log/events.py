"""What can happen to a sample, and how it is written down.

An event is one immutable fact about one sample, numbered from 0 within it. The number is not part of
the event: it follows from the event's place in the log. Events are msgpack arrays, `[tag, field, …]`;
fields are only ever added at the end, and an unknown tag decodes to `Unknown`, so an older reader
keeps what a newer writer wrote (`docs/format.md`).

Times are microseconds since the request was sent, on the monotonic clock of the writer, except
`*_unix_ns`, which are wall-clock nanoseconds: one stamp per request ties the two together.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Literal, NamedTuple, Union

import msgspec

__all__ = [
    "Body",
    "Cause",
    "Closed",
    "Delta",
    "Elided",
    "End",
    "Ended",
    "Event",
    "Marked",
    "Observed",
    "Opened",
    "Reads",
    "Requested",
    "Responded",
    "Tail",
    "Unknown",
    "Unrecorded",
    "decode_events",
    "elide_token_ids",
    "encode_events",
    "restore_body",
]

Cause = Literal["first", "retry", "resume", "turn"]
"""Why a request was made."""

End = Literal["eof", "cancelled", "reset", "timeout"]
"""How the transport saw a response end; what that makes of the sample is the fold's business."""

JSON = dict[str, Any]
"""A JSON object with whatever its author put in."""


class Event(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Base of all events."""


class Opened(Event, frozen=True, tag=1):
    """A sample begins. Always event 0."""

    key: str
    run: str = ""
    incarnation: int = 0
    """Counts the lives of one key in one run; the newest is what `KEY` alone names."""
    parent: str | None = None
    """The sample this one is a child of: a parallel or foreign request of the same key."""
    prompt_token_ids: list[int] = []
    """Empty when the request named none (text prompts); the fold then takes the engine's own."""
    continues: tuple[int, int] | None = None
    """(incarnation, length): this life starts from that many response tokens of an older one."""
    opened_unix_ns: int = 0
    host: str = ""
    step: int | None = None
    evaluation: bool = False
    group_index: int | None = None
    index: int | None = None
    metadata: JSON = {}
    """Whatever else the trainer knows; `tokenizer` names the tokenizer for `show`."""


class Requested(Event, frozen=True, tag=2):
    """One HTTP call for the sample. Truncates the response to `base`."""

    number: int
    base: int
    cause: Cause
    dialect: str
    method: str
    path: str
    body: bytes
    """As sent, minus the text of the token ids when `ids_at` is not negative."""
    ids_at: int = -1
    """Where in `body` the ids of prompt + response[:base] go, as JSON numbers without brackets."""
    ids_separator: str = ","
    headers: list[tuple[str, str]] = []
    """Without credentials and cookies."""
    weight_version: str | None = None
    """What the caller knew to be loaded at dispatch."""
    sent_unix_ns: int = 0
    url: str = ""
    step: int | None = None
    """The trainer's step this request belongs to; a resumed sample has requests of several."""


class Responded(Event, frozen=True, tag=3):
    """Status line and headers arrived."""

    number: int
    status: int
    headers: list[tuple[str, str]] = []
    time: int = 0
    http_version: str = "HTTP/1.1"


class Delta(Event, frozen=True, tag=4):
    """One SSE data frame, `[DONE]` included."""

    number: int
    data: bytes
    time: int = 0
    raw: bytes | None = None
    """The frame's bytes and whatever came before it, where that is not `data: <data>\\n\\n`."""


class Body(Event, frozen=True, tag=5):
    """A response that is not SSE, whole or as far as it came."""

    number: int
    data: bytes
    time: int = 0


class Tail(Event, frozen=True, tag=6):
    """Bytes after the last whole frame, when the response ended."""

    number: int
    data: bytes


class Reads(Event, frozen=True, tag=7):
    """How the response body was cut into reads: what replay returns it in.

    `sizes` are bytes, `times` the microseconds between one read and the next (the first: since the
    request, or since the last read of the `Reads` before it). Several per request add up.
    """

    number: int
    sizes: list[int]
    times: list[int]


class Observed(Event, frozen=True, tag=8):
    """Tokens the environment added (tool output, a new user turn). Truncates to `base`, then appends."""

    base: int
    token_ids: list[int]


class Unrecorded(Event, frozen=True, tag=9):
    """Tokens known to have been generated while recording was off. Truncates to `base`, then appends."""

    base: int
    token_ids: list[int]


class Ended(Event, frozen=True, tag=10):
    """The request is over, as the transport saw it."""

    number: int
    how: End
    detail: str | None = None
    time: int = 0


class Closed(Event, frozen=True, tag=11):
    """What the trainer made of the sample. Never rewrites what the engine did."""

    status: str | None = None
    reward: Any = None
    step: int | None = None
    sample: JSON = {}
    """The trainer's own record of the sample, minus what the fold has."""
    closed_unix_ns: int = 0
    order: int | None = None
    """Place among the samples that the step consumed; all of them are closed with one stamp."""
    of: int | None = None
    """How many the step consumed."""
    evaluation: bool = False
    """It was an evaluation that consumed them."""


class Marked(Event, frozen=True, tag=12):
    """Anything else with a name: an abort signal, a weight update, a finish that was inferred."""

    name: str
    fields: JSON = {}
    marked_unix_ns: int = 0


class Unknown(Event, frozen=True, tag=0):
    """An event of a kind this version does not know, kept as it is."""

    kind: int
    fields: list[Any]


_Known = Union[  # noqa: UP007 - a runtime value for msgspec, which 3.10 cannot build with `|` and strings
    Opened,
    Requested,
    Responded,
    Delta,
    Body,
    Tail,
    Reads,
    Observed,
    Unrecorded,
    Ended,
    Closed,
    Marked,
]

_encoder = msgspec.msgpack.Encoder()
_decode_known = msgspec.msgpack.Decoder(list[_Known]).decode
_decode_one = msgspec.msgpack.Decoder(_Known).decode
_decode_parts = msgspec.msgpack.Decoder(list[msgspec.Raw]).decode
_decode_any = msgspec.msgpack.Decoder(list[Any]).decode


def encode_events(events: Sequence[Event]) -> bytes:
    """Encode consecutive events as one msgpack array of arrays."""
    if Unknown in set(map(type, events)):
        return _encoder.encode([_plain(event) for event in events])
    return _encoder.encode(events)


def decode_events(data: bytes) -> list[Event]:
    """Decode what `encode_events` made; a kind or shape this version does not know becomes `Unknown`.

    Raises `msgspec.DecodeError` when `data` is not msgpack at all.
    """
    try:
        return list[Event](_decode_known(data))
    except msgspec.ValidationError:
        return list(_decode_leniently(_decode_parts(data)))


def _decode_leniently(parts: Iterable[msgspec.Raw]) -> Iterable[Event]:
    for part in parts:
        try:
            yield _decode_one(part)
        except msgspec.ValidationError:
            kind, *fields = _decode_any(part)
            yield Unknown(kind=kind, fields=fields)


def _plain(event: Event) -> Any:
    return [event.kind, *event.fields] if type(event) is Unknown else event


class Elided(NamedTuple):
    """A request body without the text of its token ids; `at` -1 when it is whole."""

    body: bytes
    at: int
    separator: str


def elide_token_ids(body: bytes, token_ids: Sequence[int] | None) -> Elided:
    """Cut the text of `token_ids` out of a body, where that can be undone exactly.

    A resumed request repeats prompt and response, which the sample has; this keeps requests small.
    """
    if token_ids:
        for separator in (",", ", "):
            text = separator.join(map(str, token_ids)).encode()
            at = body.find(b"[" + text + b"]") + 1
            if at:
                return Elided(body[:at] + body[at + len(text) :], at, separator)
    return Elided(body, -1, ",")


def restore_body(requested: Requested, token_ids: Sequence[int]) -> bytes:
    """Return the body as it was sent; `token_ids` are prompt + response[:base] at that time."""
    if requested.ids_at < 0:
        return requested.body
    text = requested.ids_separator.join(map(str, token_ids)).encode()
    return requested.body[: requested.ids_at] + text + requested.body[requested.ids_at :]
