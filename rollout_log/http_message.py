"""One HTTP/1.1 request and the writer of its response, as `rollout_log.http_server` hands them out."""

from __future__ import annotations

import asyncio
import http
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

__all__ = ["Header", "Request", "Responder", "Wire", "format_head"]

Header = tuple[str, str]

_ILLEGAL = re.compile(r"[\r\n\0]")


@dataclass(frozen=True)
class Request:
    """One request, with its whole body. Header names are lower-case, values latin-1 as on the wire."""

    method: str
    target: str
    """Path and query as they were sent; of an absolute URL what follows the host."""
    headers: list[Header]
    body: bytes = b""
    http_version: str = "HTTP/1.1"

    @property
    def path(self) -> str:
        return self.target.partition("?")[0]

    @property
    def query(self) -> str:
        return self.target.partition("?")[2]

    def header(self, name: str, default: str | None = None) -> str | None:
        """Return the first header of this name."""
        return next((value for key, value in self.headers if key == name.lower()), default)


class Wire(Protocol):
    """The connection that a response goes out on. Once it is closing, each call does nothing."""

    def write(self, data: bytes) -> None: ...

    async def drain(self) -> None: ...

    def close(self) -> None: ...

    def reset(self) -> None: ...


class Responder:
    """Writes one response. After the client has left it writes nothing and raises nothing."""

    def __init__(self, wire: Wire, request: Request) -> None:
        self.disconnected = asyncio.Event()
        """Set as soon as the client hung up (FIN or RST) before the response was over."""
        self.on_disconnect: Callable[[], None] | None = None
        """Called at that moment, before anything else happens in the event loop."""
        self.status: int | None = None
        """Of the response that was started."""
        self.over = False
        """Finished, cut or reset."""
        self.keep_alive = request.http_version == "HTTP/1.1" and not _says_close(request.headers)
        self._wire = wire
        self._method = request.method
        self._may_chunk = request.http_version == "HTTP/1.1"
        self._chunked = False
        self._bodiless = False
        self._left: int | None = None

    def hang_up(self) -> None:
        """The client is gone; the connection says so."""
        if not self.disconnected.is_set():
            self.disconnected.set()
            if self.on_disconnect is not None:
                self.on_disconnect()

    async def start(self, status: int, headers: Iterable[Header] = (), *, chunked: bool = True) -> None:
        """Write status line and headers, these as they are given.

        A `content-length` among them frames the body, otherwise it is chunked; without `chunked`, or
        for a client of HTTP/1.0, it lasts until the connection is closed. HEAD, 204 and 304 have no
        body. `transfer-encoding` is for the server to say: one that is given is left out.
        """
        if self.status is not None:
            raise RuntimeError(f"the response was started before, with status {self.status}")
        headers = [(name, value) for name, value in headers if name.lower() != "transfer-encoding"]
        lengths = [int(value) for name, value in headers if name.lower() == "content-length"]
        self._bodiless = self._method == "HEAD" or status in {204, 304}
        if not self._bodiless:
            self._left = lengths[0] if lengths else None
            self._chunked = not lengths and chunked and self._may_chunk
        if self._chunked:
            headers.append(("transfer-encoding", "chunked"))
        ends_with_connection = not (lengths or self._chunked or self._bodiless)
        if ends_with_connection or _says_close(headers):
            self.keep_alive = False
        if not self.keep_alive and not _says_close(headers):
            headers.append(("connection", "close"))
        head = format_head(status, headers)
        self.status = status
        self._wire.write(head)
        await self.drain()

    def send(self, *pieces: bytes) -> None:
        """Put pieces of the body on the wire now; chunked, each of them is one chunk."""
        if self.status is None:
            raise RuntimeError("the response has not been started")
        if self._bodiless or self.over:
            return
        if self._chunked:
            data = b"".join([b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces if piece])
        else:
            data = b"".join(pieces)
            if self._left is not None:
                if len(data) > self._left:
                    raise ValueError(f"{len(data)} bytes where {self._left} of the content-length are left")
                self._left -= len(data)
        if data:
            self._wire.write(data)

    def raw(self, data: bytes) -> None:
        """Put bytes on the wire with no framing at all; the connection closes after the response."""
        if self.over:
            return
        self.status = self.status or 0
        self.keep_alive = False
        self._wire.write(data)

    async def drain(self) -> None:
        """Wait while the client reads more slowly than bytes are sent."""
        await self._wire.drain()

    async def finish(self) -> None:
        """End the response well; a body shorter than its content-length is cut."""
        if self.over:
            return
        if self._left:
            self.cut()
            return
        if self._chunked:
            self._wire.write(b"0\r\n\r\n")
        await self.drain()
        self.over = True
        if not self.keep_alive:
            self._wire.close()

    async def answer(self, status: int, body: bytes, headers: Iterable[Header] = ()) -> None:
        """Write a whole response, framed by its length."""
        await self.start(status, [*headers, ("content-length", str(len(body)))])
        self.send(body)
        await self.finish()

    def cut(self) -> None:
        """Close the connection (FIN) once what was sent has left: no last chunk."""
        self.over = True
        self.keep_alive = False
        self._wire.close()

    def reset(self) -> None:
        """Reset the connection (RST) once what was sent has left."""
        self.over = True
        self.keep_alive = False
        self._wire.reset()


def format_head(status: int, headers: Iterable[Header]) -> bytes:
    """Format status line and headers. A line break or NUL in a header is a `ValueError`."""
    try:
        reason = http.HTTPStatus(status).phrase
    except ValueError:
        reason = ""
    lines = [f"HTTP/1.1 {status} {reason}"]
    for name, value in headers:
        if _ILLEGAL.search(name) or _ILLEGAL.search(value):
            raise ValueError(f"header {name!r} has a line break or a NUL in it: {value!r}")
        lines.append(f"{name}: {value}")
    return "\r\n".join([*lines, "", ""]).encode("latin-1")


def _says_close(headers: Iterable[Header]) -> bool:
    return any(name.lower() == "connection" and "close" in value.lower() for name, value in headers)
