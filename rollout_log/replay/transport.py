"""Replay inside an HTTP client: no socket is opened.

    client = httpx.AsyncClient(transport=ReplayTransport("runs/today"))

One class for sync and async clients, of httpx and of libraries that share its shape (httpx2): what it
returns and raises is taken from the library that the request comes from.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from functools import cache
from types import ModuleType
from typing import Any

import httpx

from rollout_log.errors import RolloutLogError
from rollout_log.http_message import Request
from rollout_log.record.headers import KEY_HEADER
from rollout_log.record.transport import EXTENSION, _current
from rollout_log.replay.asking import Asked
from rollout_log.replay.controls import Answer, Controls, settle, settle_sync
from rollout_log.replay.desk import Desk, Pace, Sources
from rollout_log.replay.errors import ReplayMiss
from rollout_log.replay.faults import FAULT_HEADER, Faults
from rollout_log.replay.matching import Cut, Report
from rollout_log.replay.playback import AtCut, Playback, play, play_sync

__all__ = ["ReplayTransport"]

_REFUSED = "the recorded connection was refused or closed before a response"
_ENDS = {
    "cut": ("RemoteProtocolError", "peer closed connection without sending complete message body"),
    "reset": ("ReadError", "connection reset by peer"),
    "stall": ("ReadTimeout", "no bytes came for as long as the client waits"),
    "left": ("RemoteProtocolError", "the recorded client left here"),
}


class ReplayTransport(httpx.BaseTransport, httpx.AsyncBaseTransport):
    """Answers with recordings; the options are those of `serve_replay`.

    By default only what was recorded is answered, as it was. A request for which nothing was recorded
    raises `ReplayMiss`, an httpx.TransportError.
    """

    def __init__(
        self,
        source: Sources,
        *,
        pace: Pace = 0,
        cut: Cut = "exact",
        at_cut: AtCut = "hold",
        faults: Faults | None = None,
        hold_s: float | None = None,
    ) -> None:
        self.desk = Desk(source, cut=cut, at_cut=at_cut, pace=pace, faults=faults, hold_s=hold_s)
        self.controls = Controls(self.desk)

    def report(self) -> Report:
        """Say which recordings were not asked for, and what was asked for in vain."""
        return self.desk.report()

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Answer an async client."""
        library = _library_of(request)
        await request.aread()
        if (answer := self._control(request)) is not None:
            await settle(answer)
            return _whole(library, answer)
        playback = self._take(library, request)
        stream = _streams(library)[0](self.desk, playback, library)
        try:
            await stream.head()
        except BaseException:
            self.desk.leave(playback)
            raise
        return _response(library, playback, stream)

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        """Answer a sync client."""
        library = _library_of(request)
        request.read()
        if (answer := self._control(request)) is not None:
            settle_sync(answer)
            return _whole(library, answer)
        playback = self._take(library, request)
        stream = _streams(library)[1](self.desk, playback, library)
        try:
            stream.head()
        except BaseException:
            self.desk.leave(playback)
            raise
        return _response(library, playback, stream)

    def _control(self, request: httpx.Request) -> Answer | None:
        target = request.url.raw_path.decode("ascii")
        url = request.url
        self.controls.url = f"{url.scheme}://{url.netloc.decode('ascii')}"
        return self.controls.answer(Request(request.method, target, [], request.content))

    def _take(self, library: ModuleType, request: httpx.Request) -> Playback:
        extension = request.extensions.get(EXTENSION) or {}
        opened = _current.get()
        key = extension.get("key") or request.headers.get(KEY_HEADER) or (opened.key if opened else None)
        asked = Asked.of(
            request.method,
            request.url.raw_path.decode("ascii"),
            request.content,
            key=key,
            hint=request.headers.get("x-session-id"),
        )
        fault = request.headers.get(FAULT_HEADER)
        try:
            return self.desk.take(asked, faults=Faults.parse(fault) if fault else None)
        except ReplayMiss as miss:
            raise _miss_of(library)(str(miss), nearest=miss.nearest, busy=miss.busy) from None


class _Stream:
    """What the streams of all libraries share."""

    def __init__(self, desk: Desk, playback: Playback, library: ModuleType) -> None:
        self._desk = desk
        self._playback = playback
        self._library = library

    def error(self) -> Exception | None:
        """Return what the client gets at the end of the body, in its own terms."""
        script = self._playback.script
        if script.ending == "eof":
            if script.status is not None:
                return None
            name, message = "RemoteProtocolError", _REFUSED
        else:
            name, message = _ENDS[script.ending]
        recorded = getattr(self._library, script.error or "", None)
        transport_error: type[Exception] = self._library.TransportError
        if isinstance(recorded, type) and issubclass(recorded, transport_error):
            name = script.error or name
        kind: type[Exception] = getattr(self._library, name)
        detail = script.detail if script.detail and not script.faulty else message
        return kind(detail.removeprefix(name).removeprefix(": "))

    def leave(self) -> None:
        self._desk.leave(self._playback)


class _AsyncBody(_Stream):
    """An iterator and not a generator: an event loop would end a forgotten generator in a task."""

    async def head(self) -> None:
        """Wait until the headers are due; raises where the recorded request got no response."""
        self._pieces = play(self._playback)
        await self._pieces.head()
        if self._playback.script.status is None:
            async for _ in self._pieces:
                pass
            raise self.error() or RolloutLogError(_REFUSED)

    def __aiter__(self) -> _AsyncBody:
        return self

    async def __anext__(self) -> bytes:
        try:
            return await self._pieces.__anext__()
        except StopAsyncIteration:
            self.leave()
            error = self.error()
            if error is not None:
                raise error from None
            raise

    async def aclose(self) -> None:
        self.leave()


class _SyncBody(_Stream):
    def head(self) -> None:
        """As `_AsyncBody.head`."""
        time.sleep(self._playback.head_wait())
        self._pieces = play_sync(self._playback)
        if self._playback.script.status is None:
            for _ in self._pieces:
                pass
            raise self.error() or RolloutLogError(_REFUSED)

    def __iter__(self) -> Iterator[bytes]:
        yield from self._pieces
        self.leave()
        error = self.error()
        if error is not None:
            raise error

    def close(self) -> None:
        self.leave()


def _library_of(request: Any) -> ModuleType:
    """Return the HTTP library that a request is of."""
    for kind in type(request).__mro__:
        module = sys.modules.get(kind.__module__.partition(".")[0])
        if module is not None and hasattr(module, "AsyncByteStream"):
            return module
    raise RolloutLogError(f"{type(request).__module__} is no HTTP library of httpx's shape")


@cache
def _streams(library: ModuleType) -> tuple[type[_AsyncBody], type[_SyncBody]]:
    """Return the bodies as the library wants them: it checks for its own base classes."""
    async_body = type("ReplayedBody", (_AsyncBody, library.AsyncByteStream), {})
    return async_body, type("ReplayedBody", (_SyncBody, library.SyncByteStream), {})


@cache
def _miss_of(library: ModuleType) -> type[ReplayMiss]:
    """Return `ReplayMiss` as a transport error of the library."""
    if issubclass(ReplayMiss, library.TransportError):
        return ReplayMiss
    return type("ReplayMiss", (ReplayMiss, library.TransportError), {})


def _response(library: ModuleType, playback: Playback, stream: _Stream) -> httpx.Response:
    script = playback.script
    response: httpx.Response = library.Response(
        script.status, headers=script.headers, stream=stream, extensions={"http_version": b"HTTP/1.1"}
    )
    return response


def _whole(library: ModuleType, answer: Answer) -> httpx.Response:
    headers = {"content-type": answer.content_type}
    response: httpx.Response = library.Response(answer.status, headers=headers, content=answer.body)
    return response
