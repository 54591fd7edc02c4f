"""A server that plays byte streams with the ending they had: a stand-in for an engine in tests.

async with play(RawStream(200, [("content-type", "text/event-stream")], body, end="reset")) as engine:
    ... engine.url ...
assert engine.requests[0].body == b"{}"
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass, field
from typing import Literal

from captures import Capture
from rollout_log.http_server import Header, Request, Responder, serve

EVENT_STREAM: list[Header] = [("content-type", "text/event-stream; charset=utf-8")]

# About one connection or one response, so a recorded one is not repeated.
_FRAMING = {"connection", "keep-alive", "transfer-encoding"}


@dataclass(frozen=True)
class RawStream:
    """One response. Without a content-length in the headers each read is one chunk."""

    status: int | None = 200
    """None: the body is everything, from the status line to the framing, and the connection then closes."""
    headers: list[Header] = field(default_factory=lambda: list(EVENT_STREAM))
    body: bytes = b""
    reads: list[int] | None = None
    """Sizes of the pieces the body is sent in, the rest in one; None: all at once."""
    end: Literal["eof", "incomplete", "reset", "hang"] = "eof"
    """incomplete: FIN without the last chunk; hang: nothing more, until the client leaves."""
    delay: float = 0.0
    """Seconds before each piece."""

    def pieces(self) -> list[bytes]:
        """Cut the body as `reads` says."""
        pieces, at = [], 0
        for size in self.reads or []:
            pieces.append(self.body[at : at + size])
            at += size
        return [piece for piece in [*pieces, self.body[at:]] if piece]


def captured(capture: Capture) -> RawStream:
    """Give the stream that plays a capture; one that the peer cut is cut again."""
    end: Literal["eof", "incomplete"] = "incomplete" if capture.ended == "cut" else "eof"
    return RawStream(capture.status, capture.headers, capture.body, end=end)


@dataclass
class RawServer:
    """A running stand-in."""

    url: str = ""
    requests: list[Request] = field(default_factory=list)
    """What it was asked, in order."""
    hung_up: list[Request] = field(default_factory=list)
    """The requests whose client left before the end."""
    left: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when a client has left before the end."""


@contextlib.asynccontextmanager
async def play(
    *streams: RawStream, choose: Callable[[Request], RawStream] | None = None
) -> AsyncIterator[RawServer]:
    """Answer requests with `streams`, in order, or with what `choose` says; then with 500."""
    engine = RawServer()
    waiting: Iterable[RawStream] = iter(streams)

    async def handle(request: Request, responder: Responder) -> None:
        engine.requests.append(request)
        stream = choose(request) if choose else next(iter(waiting), None)
        if stream is None:
            await responder.answer(500, b"no stream is left to play")
            return
        try:
            await send(stream, responder)
        finally:
            if responder.disconnected.is_set():
                engine.hung_up.append(request)
                engine.left.set()

    async with serve(handle) as server:
        engine.url = server.url
        yield engine


async def send(stream: RawStream, responder: Responder) -> None:
    """Write one stream as the response."""
    if stream.status is not None:
        headers = [(name, value) for name, value in stream.headers if name.lower() not in _FRAMING]
        await responder.start(stream.status, headers)
    else:
        responder.raw(b"")
    for piece in stream.pieces():
        await asyncio.sleep(stream.delay)
        if stream.status is None:
            responder.raw(piece)
        else:
            responder.send(piece)
        await responder.drain()
    if stream.end == "eof":
        await responder.finish()
    elif stream.end == "incomplete":
        responder.cut()
    elif stream.end == "reset":
        responder.reset()
    else:
        await asyncio.Event().wait()
