"""Recordings to replay: every capture and every case, and how two recordings are compared."""

from __future__ import annotations

import json
from typing import Any

import captures
import cases
from raw_server import RawStream
from replay.memory import MemoryLog, record, split
from rollout_log.events import Delta, End, Ended, Event, Observed, Opened, Reads, Requested, Responded
from rollout_log.record.samples import Samples

STALE = {"content-length", "transfer-encoding", "connection", "date", "keep-alive"}
CAPTURES = [name for name in captures.names() if captures.load(name).request["method"] == "POST"]
ENDS: dict[str, tuple[End, str | None]] = {
    "eof": ("eof", None),
    "incomplete": ("reset", "RemoteProtocolError: peer closed connection"),
    "reset": ("reset", "ReadError"),
    "hang": ("cancelled", None),
}


def body_of(name: str) -> bytes:
    request = captures.load(name).request
    raw = request.get("raw_body")
    return raw.encode() if raw is not None else json.dumps(request["body"]).encode()


def record_capture(log: MemoryLog, name: str, *, seed: int = 0) -> None:
    capture = captures.load(name)
    path = capture.request["path"]
    if capture.status is None:
        exchange = Samples(log).request(name, path=path, body=body_of(name))  # type: ignore[arg-type]
        exchange.end("reset", "RemoteProtocolError: Server disconnected without sending a response.")
        return
    end = ENDS["eof" if capture.ended == "eof" else "incomplete"]
    record(
        log,
        name,
        path,
        body_of(name),
        split(capture.body, seed, mean=max(300, len(capture.body) // 400)),
        status=capture.status,
        headers=capture.headers,
        end=end[0],
        detail=end[1],
    )


def record_case(log: MemoryLog, key: str, case: cases.Case, streams: list[RawStream]) -> None:
    samples = None
    for request, stream in zip(case.requests, streams, strict=True):
        end, detail = ENDS[stream.end]
        body = json.dumps(request["body"]).encode()
        samples = record(log, key, case.path, body, stream.pieces(), samples=samples, end=end, detail=detail)


def essence(events: list[Event]) -> list[Any]:
    """What two recordings of the same exchanges have in common: everything but times and connections."""
    found: list[Any] = []
    sizes: dict[int, list[int]] = {}
    for event in events:
        if isinstance(event, Opened):
            found.append(("opened", event.prompt_token_ids))
        elif isinstance(event, Requested):
            found.append((event.number, event.base, event.cause, event.path, event.body, event.ids_at))
        elif isinstance(event, Responded):
            headers = [pair for pair in event.headers if pair[0] not in STALE]
            found.append((event.number, event.status, headers))
        elif isinstance(event, Delta):
            found.append((event.number, event.data, event.raw))
        elif isinstance(event, Reads):
            sizes.setdefault(event.number, []).extend(event.sizes)
        elif isinstance(event, Ended):
            found.append((event.number, event.how, (event.detail or "").partition(":")[0]))
        elif isinstance(event, Observed):
            found.append((event.base, event.token_ids))
        else:
            found.append((event.number, event.data))  # type: ignore[attr-defined]
    return [*found, sizes]
