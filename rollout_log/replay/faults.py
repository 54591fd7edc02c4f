"""Faults on demand: what goes wrong with a response, seeded and so repeatable.

    Faults.parse("drop_after=5,drop=rst")        # a header, an option, or JSON
    script = faults.strike(script, attempt=0)

What strikes a response depends on the seed, the recording and the attempt alone, never on the order or the
time of requests.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal, cast

import msgspec
from msgspec.inspect import FloatType, IntType, LiteralType, StructType, Type, UnionType, type_info

from rollout_log.errors import RolloutLogError
from rollout_log.replay.recording import Read
from rollout_log.replay.rendering import DONE, error_frame
from rollout_log.replay.script import Script

__all__ = ["FAULT_HEADER", "Faults"]

FAULT_HEADER = "x-rollout-log-fault"

_Share = Annotated[float, msgspec.Meta(ge=0, le=1)]
_Count = Annotated[int, msgspec.Meta(ge=0)]


class Faults(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """What may go wrong. A response that is not a stream counts as one frame, and is cut in its middle."""

    seed: int = 0
    rate: _Share = 1.0
    """Share of the responses that are struck (the statuses have their own)."""
    attempts: _Count | None = None
    """Strike only so many attempts for one recorded request; None: all."""
    status_500: _Share = 0.0
    """Share of the requests that are answered so."""
    status_429: _Share = 0.0
    retry_after: Annotated[float, msgspec.Meta(ge=0)] | None = None
    """Seconds, told with a 429."""
    drop_after: _Count | None = None
    """Frames before the connection is closed."""
    drop: Literal["fin", "rst"] = "fin"
    error_after: _Count | None = None
    """Frames before an error frame, `[DONE]` and a clean end."""
    error_code: int = 500
    no_terminal: bool = False
    """End cleanly before the frame that has the finish reason."""
    stall_after: _Count | None = None
    """Frames before nothing more comes."""
    slow: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    """Send one byte at a time, with so many seconds before each."""
    split: bool = False
    """Cut reads at places that mean nothing."""
    coalesce: _Count = 0
    """Join so many frames to one read."""

    @classmethod
    def parse(cls, text: str) -> Faults:
        """Read `name=value,…`, a bare `name` for `name=true`, or JSON. Raises RolloutLogError."""
        try:
            if text.lstrip().startswith("{"):
                return cls._of(msgspec.json.decode(text, type=dict[str, Any]), strict=True)
            pairs = [part.partition("=") for part in text.split(",") if part.strip()]
            fields = {name.strip(): value.strip() if equals else "true" for name, equals, value in pairs}
            return cls._of(fields, strict=False)
        except msgspec.MsgspecError as error:
            raise RolloutLogError(f"these are no faults: {text[:200]!r}: {error}") from None

    @classmethod
    def load(cls, path: Path) -> Faults:
        """Read a JSON file. Raises OSError, or RolloutLogError which names the file."""
        try:
            return cls._of(msgspec.json.decode(path.read_bytes(), type=dict[str, Any]), strict=True)
        except msgspec.MsgspecError as error:
            raise RolloutLogError(f"{path} holds no faults: {error}") from None

    @classmethod
    def _of(cls, values: dict[str, Any], *, strict: bool) -> Faults:
        """Make faults of their fields. Raises msgspec's ValidationError, which says what a field takes."""
        for name, value in values.items():
            try:
                msgspec.convert({name: value}, cls, strict=strict)
            except msgspec.ValidationError:
                kinds = {field.name: field.type for field in cast("StructType", type_info(cls)).fields}
                if name not in kinds:
                    raise msgspec.ValidationError(f"there is no {name!r}, but {', '.join(kinds)}") from None
                raise msgspec.ValidationError(f"{name} takes {_taken(kinds[name])}") from None
        return msgspec.convert(values, cls, strict=strict)

    def strike(self, script: Script, *, attempt: int = 0) -> Script:
        """Return the script as the faults leave it; `faulty` when its end is not the recorded one."""
        if self.attempts is not None and attempt >= self.attempts:
            return script
        exchange = script.exchange
        chance = random.Random(f"{self.seed}:{exchange.sample}:{exchange.number}:{attempt}")
        status = chance.random()
        if status < self.status_500 + self.status_429:
            return _refused(script, 500 if status < self.status_500 else 429, self.retry_after)
        if chance.random() >= self.rate:
            return script
        return self._deliver(self._end(script), chance)

    def _end(self, script: Script) -> Script:
        if self.no_terminal and (end := _before_finish(script)) is not None:
            return _cut(script, end, b"", "eof")
        if self.drop_after is not None and (end := _after(script, self.drop_after)) is not None:
            ended = _cut(script, end, b"", "reset" if self.drop == "rst" else "cut")
            return replace(ended, error="ReadError" if self.drop == "rst" else "RemoteProtocolError")
        if self.error_after is not None and (end := _after(script, self.error_after)) is not None:
            return _cut(script, end, error_frame("an error on demand", self.error_code) + DONE, "eof")
        if self.stall_after is not None and (end := _after(script, self.stall_after)) is not None:
            return replace(_cut(script, end, b"", "stall"), error="ReadTimeout")
        return script

    def _deliver(self, script: Script, chance: random.Random) -> Script:
        if self.slow:
            pieces = [
                Read(piece.time, piece.data[at : at + 1])
                for piece in script.pieces
                for at in range(len(piece.data))
            ]
            return replace(script, pieces=pieces, slow=self.slow)
        pieces = script.pieces
        if self.coalesce:
            pieces = list(_coalesced(script, self.coalesce))
        if self.split:
            pieces = [part for piece in pieces for part in _split(piece, chance)]
        return script if pieces is script.pieces else replace(script, pieces=pieces)


def _taken(kind: Type) -> str:
    """Say in words what values a field takes."""
    if isinstance(kind, UnionType):
        return _taken(kind.types[0])
    if isinstance(kind, LiteralType):
        return " or ".join(map(str, kind.values))
    if not isinstance(kind, (IntType, FloatType)):
        return "true or false"
    number = "a whole number" if isinstance(kind, IntType) else "a number"
    if kind.ge is None:
        return number
    return f"{number} of {kind.ge} or more" if kind.le is None else f"{number} from {kind.ge} to {kind.le}"


def _refused(script: Script, status: int, retry_after: float | None) -> Script:
    error = {"message": "refused on demand", "type": "Fault", "param": None, "code": status}
    headers = [("content-type", "application/json")]
    if status == 429 and retry_after is not None:
        headers.append(("retry-after", f"{retry_after:g}"))
    body = json.dumps({"error": error}).encode()
    return replace(
        script,
        status=status,
        headers=headers,
        pieces=[Read(script.responded, body)],
        marks=[],
        hold=None,
        ending="eof",
        streamed=False,
        faulty=True,
    )


def _cut(script: Script, end: int, more: bytes, ending: Literal["eof", "cut", "reset", "stall"]) -> Script:
    pieces = script.until(end)
    time = pieces[-1].time if pieces else script.responded
    if more:
        pieces.append(Read(time, more))
    hold = script.hold if script.hold is not None and script.hold < end else None
    marks = [mark for mark in script.marks if mark.end <= end]
    return replace(
        script, pieces=pieces, marks=marks, hold=hold, ending=ending, ended=time, faulty=hold is None
    )


def _after(script: Script, frames: int) -> int | None:
    """Return where `frames` frames end; None where there are not so many."""
    if not script.streamed:
        return script.size // 2 if frames == 0 else None
    if frames == 0:
        return 0
    return script.marks[frames - 1].end if frames <= len(script.marks) else None


def _before_finish(script: Script) -> int | None:
    start = 0
    for mark in script.marks:
        if mark.finished:
            return start
        start = mark.end
    return None


def _coalesced(script: Script, count: int) -> Iterator[Read]:
    body = script.body
    ends = [mark.end for mark in script.marks[count - 1 :: count]]
    times = iter(script.pieces)
    start = at = 0
    time = script.responded
    for end in [*ends, len(body)]:
        while at < end and (piece := next(times, None)) is not None:
            at += len(piece.data)
            time = piece.time
        if end > start:
            yield Read(time, body[start:end])
        start = end


def _split(piece: Read, chance: random.Random) -> Iterator[Read]:
    size = len(piece.data)
    places = sorted(chance.sample(range(1, size), min(size - 1, chance.randint(1, 4)))) if size > 1 else []
    for start, end in zip([0, *places], [*places, size], strict=True):
        yield Read(piece.time, piece.data[start:end])
