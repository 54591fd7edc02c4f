"""A small HTTP/1.1 server that forwards each chunk at once and can end a response badly on purpose.

    async def handler(request: Request, responder: Responder) -> None:
        await responder.start(200, [("content-type", "text/event-stream")])
        responder.send(b"data: 1\\n\\n")         # one chunk on the wire, now
        await responder.finish()                # or: responder.cut(), responder.reset()

    async with serve(handler) as server:
        print(server.url)

Requests are parsed by h11. Responses are framed by hand: h11 refuses to end a body too early, which
is what a proxy of a dying engine, and a stand-in for one, have to do.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import re
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import cast

import h11

from rollout_log.errors import RolloutLogError
from rollout_log.http_message import Header, Request, Responder, format_head

__all__ = ["CannotListen", "Handler", "Header", "Request", "Responder", "Server", "check_address", "serve"]

Handler = Callable[[Request, Responder], Awaitable[None]]
"""Answers one request. What it leaves unfinished is cut; if it fails before it started, that is a 500."""

MAX_HEAD = 64 << 10
MAX_BODY = 256 << 20
ARRIVAL_S = 60.0
"""How long a request may take to arrive, and a second more for each …"""
_LEAST_RATE = 100_000
"""… bytes of it."""
STALL_S = 600.0
"""How long a client may leave its connection unused, or a response unread, before it counts as gone."""
_REFUSAL_S = 5.0
"""How long a client may take to read why it was refused."""

_UNSENT = 0x894B  # SIOCOUTQNSD (Linux): bytes in the socket's send queue that have not left

logger = logging.getLogger(__name__)


class CannotListen(RolloutLogError, OSError):
    """The address is taken, or is none of this machine's."""


@dataclass(frozen=True)
class Server:
    """A running server."""

    host: str
    port: int

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}"


async def check_address(host: str, port: int) -> None:
    """Raise `CannotListen` where an address is taken, or is none of this machine's. Nobody is listened to."""
    (await _bind(asyncio.Protocol, host, port, start_serving=False)).close()


async def _bind(
    protocol: Callable[[], asyncio.Protocol], host: str, port: int, *, start_serving: bool = True
) -> asyncio.Server:
    try:
        return await asyncio.get_running_loop().create_server(
            protocol, host, port, backlog=2048, start_serving=start_serving
        )
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno and error.errno > 0 else error.strerror
        where = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        raise CannotListen(
            f"cannot listen on {where}: {reason}; name another, or port 0 for a free one"
        ) from error


@contextlib.asynccontextmanager
async def serve(
    handler: Handler,
    host: str = "127.0.0.1",
    port: int = 0,
    *,
    max_head: int = MAX_HEAD,
    max_body: int = MAX_BODY,
    arrival_s: float = ARRIVAL_S,
    stall_s: float = STALL_S,
    cancel: bool = True,
) -> AsyncIterator[Server]:
    """Serve until the block is left, which ends every handler and every connection.

    With `cancel`, a handler whose client hangs up is cancelled at once; without, it is told by
    `responder.disconnected` alone. A client that closes its sending half counts as hung up, and so does one
    that reads nothing for `stall_s`. Raises `CannotListen`.
    """
    connections: set[_Connection] = set()
    limits = _Limits(max_head, max_body, arrival_s, stall_s)
    listener = await _bind(lambda: _Connection(connections, handler, limits, cancel=cancel), host, port)
    address = listener.sockets[0].getsockname()
    try:
        yield Server(address[0], address[1])
    finally:
        listener.close()
        tasks = [connection.task for connection in connections if connection.task is not None]
        for connection in connections:
            connection.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        closing = [connection.closed for connection in connections]
        for connection in connections:
            connection.close()
        if closing:
            await asyncio.wait(closing, timeout=1)
        for connection in connections:
            connection.abort()
        await asyncio.gather(*closing)


@dataclass(frozen=True)
class _Limits:
    head: int
    body: int
    arrival: float
    stall: float


class _Connection(asyncio.Protocol):
    """One client. While a handler runs, reading goes on: that is how a hang-up is noticed."""

    def __init__(
        self, connections: set[_Connection], handler: Handler, limits: _Limits, *, cancel: bool
    ) -> None:
        self.task: asyncio.Task[None] | None = None
        self.closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._connections = connections
        self._handler = handler
        self._limits = limits
        self._cancels = cancel
        self._cancelled = False
        self._responder: Responder | None = None
        self._writable = asyncio.Event()
        self._deaf = False
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        """Of what the client is waited for: a request, or that it reads."""
        self._await_request(b"")

    # What asyncio calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._writable.set()
        self._connections.add(self)
        sock = transport.get_extra_info("socket")
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)

    def data_received(self, data: bytes) -> None:
        if self._deaf:
            return
        self._parser.receive_data(data)
        if self.task is None:
            if not self._arrived:
                self._await_arrival()
            self._arrived += len(data)
            self._parse()
            return
        self._ahead += len(data)
        if self._ahead > self._limits.head:  # a pipelining client waits; its hang-up then shows later
            self._transport.pause_reading()

    def eof_received(self) -> None:
        self._hang_up()
        self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        self._hang_up()
        self._writable.set()
        self._connections.discard(self)
        self.closed.set_result(None)

    def pause_writing(self) -> None:
        self._writable.clear()
        self._start_timer(self._limits.stall, self.abort)

    def resume_writing(self) -> None:
        self._writable.set()
        if not self._transport.is_closing():
            self._stop_timer()

    # Requests

    def _await_request(self, ahead: bytes) -> None:
        self._parser = h11.Connection(h11.SERVER, max_incomplete_event_size=self._limits.head)
        self._head: h11.Request | None = None
        self._body = bytearray()
        self._ahead = 0
        self._arrived = len(ahead)
        if ahead:
            self._parser.receive_data(ahead)
            self._await_arrival()
        else:
            self._start_timer(self._limits.stall, self.close)

    def _await_arrival(self) -> None:
        """The first byte of a request is there; the last one is to come in time."""
        self._arrives_since = self._loop.time()
        self._start_timer(self._limits.arrival, self._check_arrival)

    def _check_arrival(self) -> None:
        allowed = self._limits.arrival + self._arrived / _LEAST_RATE
        left = self._arrives_since + allowed - self._loop.time()
        if left > 0:
            self._start_timer(left, self._check_arrival)
        else:
            self._refuse(408, f"The request did not arrive within {allowed:.0f} s.")

    def _parse(self) -> None:
        try:
            while self.task is None and not self._deaf:
                event = self._parser.next_event()
                if isinstance(event, h11.Request):
                    self._head = event
                    self._check_head(event)
                elif isinstance(event, h11.Data):
                    self._body += event.data
                    if len(self._body) > self._limits.body:
                        self._refuse(413, f"The request body is longer than {self._limits.body} bytes.")
                elif isinstance(event, h11.EndOfMessage):
                    self._begin()
                else:
                    if self._parser.they_are_waiting_for_100_continue:
                        go_on = h11.InformationalResponse(status_code=100, headers=[], reason=b"Continue")
                        self.write(self._parser.send(go_on) or b"")
                    return
        except h11.RemoteProtocolError as error:
            if error.error_status_hint == 431:
                self._refuse_head()
            else:
                self._refuse(error.error_status_hint, f"This is no request of HTTP/1.1: {error}.")

    def _check_head(self, head: h11.Request) -> None:
        size = len(head.target) + sum(len(name) + len(value) + 4 for name, value in head.headers)
        if size > self._limits.head:
            self._refuse_head()
        elif int(dict(head.headers).get(b"content-length", 0)) > self._limits.body:
            self._refuse(413, f"The request body is longer than {self._limits.body} bytes.")

    def _refuse_head(self) -> None:
        self._refuse(431, f"Request line and headers are longer than {self._limits.head} bytes.")

    def _refuse(self, status: int, message: str) -> None:
        """Answer, then read and drop what still comes: closing on unread bytes would be a reset."""
        self._deaf = True
        body = (message + "\n").encode("latin-1", "replace")
        length = str(len(body))
        head = [("content-type", "text/plain"), ("content-length", length), ("connection", "close")]
        self.write(format_head(status, head) + body)
        self._transport.write_eof()
        self._start_timer(_REFUSAL_S, self.abort)

    def _begin(self) -> None:
        head = cast("h11.Request", self._head)
        request = Request(
            method=head.method.decode("ascii"),
            target=_origin_form(head.target.decode("latin-1")),
            headers=[(name.decode("ascii"), value.decode("latin-1")) for name, value in head.headers],
            body=bytes(self._body),
            http_version=f"HTTP/{head.http_version.decode('ascii')}",
        )
        self._body.clear()
        self._stop_timer()
        responder = self._responder = Responder(self, request)
        self.task = self._loop.create_task(self._handle(request, responder))
        self.task.add_done_callback(lambda _: self._end(responder))

    async def _handle(self, request: Request, responder: Responder) -> None:
        try:
            await self._handler(request, responder)
            if responder.status is None and not responder.over:
                raise RuntimeError("the handler returned without a response")
        except Exception:
            logger.exception("%s %s failed", request.method, request.path)
            if responder.status is None and not responder.over:
                await responder.answer(500, b"Internal error: see the log of this server.\n")

    def _end(self, responder: Responder) -> None:
        self.task = self._responder = None
        if not responder.over:
            responder.cut()
        if responder.keep_alive and not self._transport.is_closing():
            self._await_request(self._parser.trailing_data[0])
            self._transport.resume_reading()
            self._parse()

    def _hang_up(self) -> None:
        if self._responder is not None and not self._responder.over:
            self._responder.hang_up()
            if self._cancels:
                self.cancel()

    def cancel(self) -> None:
        """Cancel the handler, once: a second time would hit it while it cleans up."""
        if self.task is not None and not self._cancelled:
            self._cancelled = True
            self.task.cancel()

    def _start_timer(self, seconds: float, then: Callable[[], None]) -> None:
        self._stop_timer()
        self._timer = self._loop.call_later(seconds, then)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    # What the responder calls

    def write(self, data: bytes) -> None:
        if not self._transport.is_closing():
            self._transport.write(data)

    async def drain(self) -> None:
        if self._transport.is_closing():
            await asyncio.sleep(0)  # lets a cancellation into a loop that only sends and drains
        await self._writable.wait()

    def close(self) -> None:
        if not self._transport.is_closing():
            self._start_timer(self._limits.stall, self.abort)  # what was written may still wait to be read
            self._transport.close()

    def abort(self) -> None:
        self._transport.abort()

    def reset(self, tries: int = 1000) -> None:
        """RST throws away what the kernel has not sent, so wait for that: at most a second."""
        self._deaf = True
        if self._transport.is_closing():
            return
        sock = self._transport.get_extra_info("socket")
        if tries and (self._transport.get_write_buffer_size() or _unsent(sock)):
            self._loop.call_later(0.001, self.reset, tries - 1)
            return
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._transport.abort()


def _unsent(sock: socket.socket) -> int:
    """Bytes that the kernel holds back; 0 where it does not say."""
    try:
        return int(struct.unpack("i", fcntl.ioctl(sock.fileno(), _UNSENT, b"\0\0\0\0"))[0])
    except OSError:
        return 0


def _origin_form(target: str) -> str:
    """`/path?query` of a target that may be a whole URL."""
    absolute = re.match(r"[A-Za-z][A-Za-z0-9+.-]*://[^/?#]*", target)
    if absolute is None:
        return target
    rest = target[absolute.end() :]
    return rest if rest.startswith("/") else "/" + rest
