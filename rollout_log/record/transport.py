"""The httpx tap: a transport around any other that records what passes, unchanged and unhurried.

client = httpx.AsyncClient(transport=RecordingTransport(log, httpx.AsyncHTTPTransport()))
with recording("t1-abc", step=3):
    await client.post(...)
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import httpx

from rollout_log.engines import dialect_for
from rollout_log.errors import RecordingFailed, RolloutLogError
from rollout_log.events import Opened
from rollout_log.record.exchange import Exchange
from rollout_log.record.headers import BASE_HEADER, KEY_HEADER
from rollout_log.record.samples import Samples

if TYPE_CHECKING:
    from rollout_log.log import Log

__all__ = ["RecordingTransport", "recording"]

EXTENSION = "rollout_log"
"""Name of the request extension: `{"key": …, "base": …}`, or `{"recorded": True}` to be left alone."""
_Wanted = tuple[str | None, int | None, Opened | None]
"""Key, base and what is known of the sample."""
_logger = logging.getLogger("rollout_log")
_current: ContextVar[Opened | None] = ContextVar("rollout_log_sample", default=None)


@contextmanager
def recording(key: str | Opened, **known: Any) -> Iterator[None]:
    """Requests made inside belong to this sample; `known` are further fields of `events.Opened`."""
    token = _current.set(key if isinstance(key, Opened) else Opened(key=key, **known))
    try:
        yield
    finally:
        _current.reset(token)


class RecordingTransport(httpx.BaseTransport, httpx.AsyncBaseTransport):
    """Records the generations that go through `inner`, a sync or async transport.

    The key comes from the request's extensions, else from the header `X-Rollout-Log-Key` (taken off), else
    from `recording(…)`, else from `x-session-id`, else a new one is made. A POST to a path on which engines
    generate is recorded, and any other POST for which a key was given; `scoped`: only what is posted inside
    `recording(…)`. What a `Recorder` sends passes, since it records that itself. Wrapping a recording
    transport again raises, since everything would be recorded twice.
    """

    def __init__(
        self,
        log: Log | None,
        inner: httpx.BaseTransport | httpx.AsyncBaseTransport,
        *,
        samples: Samples | None = None,
        scoped: bool = False,
    ) -> None:
        if isinstance(inner, RecordingTransport):
            raise RolloutLogError("this transport records already; wrapping it again would record all twice")
        self.inner = inner
        self.samples = samples or Samples(log)
        self._scoped = scoped

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Pass a request on; its response is recorded as the consumer reads it."""
        inner: Any = self.inner
        if (wanted := self._wanted(request)) is not None:
            await request.aread()
        if (exchange := self._begin(request, wanted)) is None:
            return await inner.handle_async_request(request)  # type: ignore[no-any-return]
        try:
            response: httpx.Response = await inner.handle_async_request(request)
        except BaseException as error:
            _end(exchange, error)
            raise
        _respond(exchange, response, _AsyncTap)
        return response

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        """Pass a request on; its response is recorded as the consumer reads it."""
        inner: Any = self.inner
        if (wanted := self._wanted(request)) is not None:
            request.read()
        if (exchange := self._begin(request, wanted)) is None:
            return inner.handle_request(request)  # type: ignore[no-any-return]
        try:
            response: httpx.Response = inner.handle_request(request)
        except BaseException as error:
            _end(exchange, error)
            raise
        _respond(exchange, response, _SyncTap)
        return response

    async def aclose(self) -> None:
        """Close the inner transport."""
        await self.inner.aclose()  # type: ignore[union-attr]

    def close(self) -> None:
        """Close the inner transport."""
        self.inner.close()  # type: ignore[union-attr]

    def _wanted(self, request: httpx.Request) -> _Wanted | None:
        """Return key, base and what is known of the sample; None when the request is not to be recorded."""
        header_key = request.headers.pop(KEY_HEADER, None)
        header_base = request.headers.pop(BASE_HEADER, None)
        if request.method != "POST":
            return None
        extension = request.extensions.get(EXTENSION) or {}
        opened = _current.get()
        if extension.get("recorded") or (self._scoped and opened is None):
            return None
        key = extension.get("key") or header_key or (opened.key if opened else None)
        if key is None and dialect_for(request.url.path) is None:
            return None
        base = extension.get("base")
        if base is None and header_base and header_base.isdecimal() and len(header_base) < 19:
            base = int(header_base)
        return key or request.headers.get("x-session-id"), base, opened

    def _begin(self, request: httpx.Request, wanted: _Wanted | None) -> Exchange | None:
        if wanted is None:
            return None
        key, base, opened = wanted
        request.headers["accept-encoding"] = "identity"
        try:
            return self.samples.request(
                key,
                path=request.url.raw_path.decode("ascii"),
                url=str(request.url),
                headers=request.headers.multi_items(),
                body=request.content,
                base=base,
                opened=opened if opened is not None and opened.key == key else None,
            )
        except RecordingFailed:
            raise  # strict: the caller asked for it
        except Exception as error:
            _logger.warning(
                "a request to %s goes unrecorded: %s: %s", request.url.path, type(error).__name__, error
            )
            return None


class _AsyncTap(httpx.AsyncByteStream):
    def __init__(self, inner: Any, exchange: Exchange) -> None:
        self._inner = inner
        self._exchange = exchange

    async def __aiter__(self) -> AsyncIterator[bytes]:
        exchange = self._exchange
        try:
            async for chunk in self._inner:
                exchange.put(chunk)
                yield chunk
        except BaseException as error:
            _end(exchange, error)
            raise
        exchange.end("eof")
        await exchange.settle()

    async def aclose(self) -> None:
        try:
            self._exchange.end("cancelled")
        finally:  # also where a strict log refuses that
            await self._inner.aclose()


class _SyncTap(httpx.SyncByteStream):
    def __init__(self, inner: Any, exchange: Exchange) -> None:
        self._inner = inner
        self._exchange = exchange

    def __iter__(self) -> Iterator[bytes]:
        exchange = self._exchange
        try:
            for chunk in self._inner:
                exchange.feed(chunk)
                yield chunk
        except BaseException as error:
            _end(exchange, error)
            raise
        exchange.end("eof")
        exchange.sample.settle_sync()

    def close(self) -> None:
        try:
            self._exchange.end("cancelled")
        finally:
            self._inner.close()


def _respond(exchange: Exchange, response: httpx.Response, tap: type[_AsyncTap | _SyncTap]) -> None:
    exchange.respond(response.status_code, response.headers.multi_items(), _version(response))
    if response.is_closed:  # made up by the transport, body and all: no client iterates its stream
        exchange.feed(response.content)
        exchange.end("eof")
    else:
        response.stream = tap(response.stream, exchange)


def _end(exchange: Exchange, error: BaseException) -> None:
    """End an exchange as the error says: the consumer left, the peer did, or nothing came for too long."""
    detail = f"{type(error).__name__}: {error}".rstrip(": ")
    if isinstance(error, httpx.TimeoutException):
        exchange.end("timeout", detail)
    elif isinstance(error, Exception):
        exchange.end("reset", detail)
    else:
        exchange.end("cancelled", detail if str(error) else None)


def _version(response: httpx.Response) -> str:
    version = response.extensions.get("http_version", b"HTTP/1.1")
    return version.decode("ascii", "replace") if isinstance(version, bytes) else str(version)
