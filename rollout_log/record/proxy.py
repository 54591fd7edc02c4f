"""The reverse proxy: a recorder for clients of any language, between them and the engine.

    async with serve_proxy(log, "http://engine:8000") as server:
        print(server.url)

Each read of a response goes to the client at once and unchanged; only the last chunk (the last bytes of
a body with a content-length) waits until the log has the request. However the engine's response ends, the
client's ends the same way, and when the client hangs up, so does the proxy.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncIterator, Iterable
from typing import TYPE_CHECKING

import httpx

from rollout_log.engines import dialect_for
from rollout_log.errors import RecordingFailed
from rollout_log.events import End
from rollout_log.http_server import Header, Request, Responder, Server, serve
from rollout_log.record.headers import BASE_HEADER, KEY_HEADER, safe_url
from rollout_log.record.samples import Samples

if TYPE_CHECKING:
    from rollout_log.log import Log
    from rollout_log.record.exchange import Exchange

__all__ = ["Proxy", "serve_proxy", "upstream_url"]

SESSION_HEADER = "x-session-id"
"""Names the sample where no key header does; routers use it too, so it is forwarded."""

_HOP_BY_HOP = {
    "connection",
    "keep-alive",
    "proxy-connection",
    "te",
    "trailer",
    "transfer-encoding",
    "upgrade",
}
_REWRITTEN = {"host", "content-length", "expect", KEY_HEADER, BASE_HEADER}
# Engines close idle connections after 5 s; leaving first avoids sending into a close.
_LIMITS = httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=2.0)
_TIMEOUTS = {"connect": 10.0, "read": None, "write": None, "pool": None}

logger = logging.getLogger(__name__)


@contextlib.asynccontextmanager
async def serve_proxy(
    log: Log | None, upstream: str, host: str = "127.0.0.1", port: int = 0
) -> AsyncIterator[Server]:
    """Serve a proxy of the engine at `upstream` until the block is left; open requests are then cut."""
    proxy = Proxy(Samples(log), upstream)
    try:
        async with serve(proxy, host, port) as server:
            yield server
    finally:
        await proxy.aclose()


def upstream_url(upstream: str) -> str:
    """Return the address of an engine: an http or https URL, with a path prefix or without.

    Raises `ValueError` for anything else.
    """
    try:
        url = httpx.URL(upstream)
        if url.scheme in {"http", "https"} and url.host and not (url.userinfo or url.query):
            return str(url).rstrip("/")
    except httpx.InvalidURL:
        pass
    raise ValueError(f"{safe_url(upstream)!r} is no upstream: give a URL like http://127.0.0.1:8000")


class Proxy:
    """A handler for `serve` that passes every request on, and records those that generate tokens.

    Recorded are POSTs to a path of an engine dialect, and any POST with the key header.
    """

    def __init__(self, samples: Samples, upstream: str) -> None:
        self._upstream = upstream_url(upstream)
        self._samples = samples
        https = self._upstream.startswith("https:")  # without it, no time goes into loading certificates
        self._transport = httpx.AsyncHTTPTransport(verify=https, trust_env=False, limits=_LIMITS)

    async def aclose(self) -> None:
        """Close the connections to the engine."""
        await self._transport.aclose()

    async def __call__(self, request: Request, responder: Responder) -> None:
        """Pass one request on, and its response back."""
        exchange = self._record(request)
        # At once, so that a request that comes right after finds this one ended. Only the first end counts.
        responder.on_disconnect = lambda: exchange.end("cancelled")
        try:
            await self._relay(request, responder, exchange)
        except asyncio.CancelledError:
            exchange.end("cancelled", "the proxy was stopped")
            raise
        except httpx.TransportError as error:
            await self._end_badly(error, responder, exchange)
        finally:
            exchange.end("reset", "the proxy failed")

    def _record(self, request: Request) -> Exchange | _Unrecorded:
        named = request.header(KEY_HEADER)
        if request.method != "POST" or not (named or dialect_for(request.path)):
            return _Unrecorded()
        try:
            return self._begin(request, named)
        except RecordingFailed:
            raise  # strict: the caller asked for it
        except Exception as error:
            logger.warning(
                "a request to %s goes unrecorded: %s: %s", request.path, type(error).__name__, error
            )
            return _Unrecorded()

    def _begin(self, request: Request, named: str | None) -> Exchange:
        return self._samples.request(
            _to_text(named or request.header(SESSION_HEADER)),
            method=request.method,
            path=request.path,
            url=self._upstream + request.target,
            headers=[
                (name, value) for name, value in request.headers if name not in {KEY_HEADER, BASE_HEADER}
            ],
            body=request.body,
            base=_to_base(request.header(BASE_HEADER)),
        )

    async def _relay(self, request: Request, responder: Responder, exchange: Exchange | _Unrecorded) -> None:
        response = await self._transport.handle_async_request(self._forwarded(request, exchange))
        async with contextlib.aclosing(response):
            headers = _end_to_end([(_latin(name), _latin(value)) for name, value in response.headers.raw])
            exchange.respond(response.status_code, headers, _latin(response.extensions["http_version"]))
            await responder.start(response.status_code, [*headers, *_key_header(exchange)])
            left = int(response.headers.get("content-length", -1))
            last = b""
            async for chunk in response.aiter_raw():
                left -= len(chunk)
                if left == 0:
                    last = chunk
                else:
                    responder.send(chunk)
                exchange.put(chunk)
                await responder.drain()
        exchange.end("eof")
        await exchange.settle()
        responder.send(last)
        await responder.finish()

    def _forwarded(self, request: Request, exchange: Exchange | _Unrecorded) -> httpx.Request:
        headers = [(name, value) for name, value in _end_to_end(request.headers) if name not in _REWRITTEN]
        if exchange.key is not None:  # compressed frames could not be read
            headers = [(name, value) for name, value in headers if name != "accept-encoding"]
            headers.append(("accept-encoding", "identity"))
        target = request.target.encode("latin-1")
        if target.startswith(b"/"):
            target = httpx.URL(self._upstream).raw_path.rstrip(b"/") + target
        return httpx.Request(  # not through a client, which would add headers and keep cookies
            request.method,
            self._upstream,
            headers=[(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers],
            content=request.body,
            extensions={"target": target, "timeout": _TIMEOUTS},
        )

    async def _end_badly(
        self, error: httpx.TransportError, responder: Responder, exchange: Exchange | _Unrecorded
    ) -> None:
        """Do to the client what the engine did; an engine that cannot be reached is a 502."""
        detail = (
            f"{type(error).__name__}: {error}"
            if str(error)
            else f"{type(error).__name__} at {self._upstream}"
        )
        exchange.end("reset", detail)
        await exchange.settle()
        if isinstance(error, (httpx.ReadError, httpx.WriteError)):
            responder.reset()
        elif isinstance(error, httpx.RemoteProtocolError) or responder.status is not None:
            responder.cut()
        else:
            logger.warning("cannot reach %s: %s", self._upstream, detail)
            message = f"rollout-log cannot reach the upstream {self._upstream}: {detail}. Is the engine up?"
            body = {"error": {"message": message, "type": "upstream_unreachable", "code": 502}}
            headers = [("content-type", "application/json"), *_key_header(exchange)]
            await responder.answer(502, json.dumps(body).encode(), headers)


class _Unrecorded:
    """Stands where an exchange would, for what is only passed on."""

    key: None = None

    def respond(self, status: int, headers: list[Header], http_version: str) -> None: ...

    def put(self, chunk: bytes) -> bool:
        return False

    def end(self, how: End, detail: str | None = None) -> None: ...

    async def settle(self) -> None: ...


def _end_to_end(headers: Iterable[Header]) -> list[Header]:
    """Leave out the headers that are about one connection, and those that `connection` names."""
    headers = list(headers)
    named = {
        word.strip().lower()
        for name, value in headers
        if name.lower() == "connection"
        for word in value.split(",")
    }
    return [(name, value) for name, value in headers if name.lower() not in _HOP_BY_HOP | named]


def _key_header(exchange: Exchange | _Unrecorded) -> list[Header]:
    if exchange.key is None:
        return []
    return [("X-Rollout-Log-Key", exchange.key.encode("utf-8", "replace").decode("latin-1"))]


def _to_text(value: str | None) -> str | None:
    """Read a header as UTF-8, which is what a client that sends more than ASCII means."""
    return value.encode("latin-1").decode("utf-8", "replace") if value else None


def _to_base(value: str | None) -> int | None:
    if value is None:
        return None
    if not (value.isascii() and value.isdigit() and len(value) < 19):
        logger.warning("%s is no number of tokens: %.100r; the base is inferred", BASE_HEADER, value)
        return None
    return int(value)


def _latin(value: bytes) -> str:
    return value.decode("latin-1")
