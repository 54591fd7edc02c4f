"""One request of a call: it is sent, its response taken in as it comes, and its end written down."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping
from typing import Any

import httpx
import msgspec

from rollout_log.fold import Rollout
from rollout_log.record.call import Call
from rollout_log.record.errors import GenerationFailed
from rollout_log.record.exchange import Exchange
from rollout_log.record.headers import BASE_HEADER, KEY_HEADER
from rollout_log.record.transport import EXTENSION
from rollout_log.record.watchdog import Watchdog, take_back_cancel

__all__ = ["encode", "is_finished", "send"]

_NOT_OURS = (KeyboardInterrupt, SystemExit, GeneratorExit)
"""What ends the process or gives up a task; all else that a caller's function raises ends its call alone."""


async def send(
    client: httpx.AsyncClient, call: Call, exchange: Exchange, body: bytes, *, stall_s: float
) -> None:
    """Make one request and take its response in; returns however it ended, but for a cancellation.

    A cancellation that comes after the finish was read is taken back. Raises `GenerationFailed` where the
    response could not be folded, `RecordingFailed` where a strict log does not take it, and whatever
    `call.on_chunk` and `call.on_read` do.
    """
    sending = _Sending(client, call, exchange, body, stall_s)
    watchdog = sending.watchdog
    watchdog.start()
    try:
        if call.on_read is not None:
            call.on_read(exchange.rollout)  # the request's base may have cut the response
        await _cancel_once(sending.run())
        if watchdog.fired:
            await asyncio.sleep(0)  # its cancellation is on the way; it must not hit the caller
    except asyncio.CancelledError:
        its_own = watchdog.absorb()
        if sending.error is not None:
            exchange.end("reset", _name(sending.error))
            raise sending.error from None
        if its_own:
            how, detail = watchdog.verdict()
            exchange.end(how, detail)
        else:
            exchange.end("cancelled")
            if not is_finished(exchange.rollout):
                raise
            take_back_cancel()
    except httpx.TimeoutException as error:
        exchange.end("timeout", _name(error))
    except httpx.TransportError as error:
        exchange.end("reset", _name(error))
    except _NOT_OURS:
        raise
    except BaseException as error:
        exchange.end("reset", _name(error))
        raise
    finally:
        watchdog.close()
    if exchange.broken is not None:
        message = f"sample {exchange.key!r}: a response could not be folded: {exchange.broken}"
        raise GenerationFailed(message, exchange.rollout) from exchange.broken


class _Sending:
    """A request on its way."""

    def __init__(
        self,
        client: httpx.AsyncClient,
        call: Call,
        exchange: Exchange,
        body: bytes,
        stall_s: float,
    ) -> None:
        self._client = client
        self._call = call
        self._exchange = exchange
        self._rollout = exchange.rollout
        self._body = body
        self._stops = call.stopper()
        self._told = self._rollout.events
        """How many events were folded when `on_read` was called last."""
        self.error: BaseException | None = None
        """What ends the call, raised where nobody waits for it; never what ends the process."""
        self.watchdog = Watchdog(
            stall_s,
            exchange.last_read,
            healthy=self._is_healthy,
            stop=self._stops and self._has_to_stop,
            finished=self._is_finished,
        )

    async def run(self) -> None:
        """Send, and read to the end."""
        exchange, on_chunk, stops = self._exchange, self._call.on_chunk, self._stops
        async with self._client.stream(
            "POST",
            self._call.url,
            content=self._body,
            headers=self._headers(),
            timeout=_no_read_limit(self._client),
            extensions={EXTENSION: {"recorded": True}},
        ) as response:
            exchange.respond(response.status_code, response.headers.multi_items(), response.http_version)
            stream = response.stream  # as it comes: `aiter_raw`, which can cut it to size, costs 3 µs a read
            assert isinstance(stream, httpx.AsyncByteStream)  # noqa: S101 - the client is an asynchronous one
            try:
                async for chunk in stream:
                    folded = exchange.put(chunk)
                    if on_chunk is not None:
                        on_chunk(chunk)
                    if folded:
                        self._tell()
                    if stops is not None and stops():
                        self._take()
                        if not is_finished(self._rollout):
                            exchange.end("cancelled", "the run aborts")
                            return
            finally:
                self._take()
        exchange.end("eof")
        self._tell()

    def _tell(self) -> None:
        """Call `on_read`, where something was folded since it was called last, whoever had that done."""
        if self._call.on_read is not None and self._rollout.events != self._told:
            self._told = self._rollout.events
            self._call.on_read(self._rollout)

    def _take(self) -> None:
        """Take in all that was read. On a cancellation, nobody is told what this raises but by `error`."""
        try:
            self._exchange.take()
            self._tell()
        except _NOT_OURS:
            raise
        except BaseException as error:
            self.error = self.error or error
            raise

    def _is_finished(self) -> bool:
        """Whether nothing more is to come than the usage and `[DONE]`; what was read is taken in."""
        try:
            self._take()
        except _NOT_OURS:
            raise
        except BaseException:
            self.watchdog.fire("failed")
        return is_finished(self._rollout)

    def _has_to_stop(self) -> bool:
        """As the caller says; where it cannot say, what it raises ends the call."""
        try:
            return self._stops is not None and self._stops()
        except _NOT_OURS:
            raise
        except BaseException as error:
            self.error = error
            return True

    def _headers(self) -> httpx.Headers:
        headers = httpx.Headers({"content-type": "application/json"})
        headers.update(self._call.headers)
        headers["accept-encoding"] = "identity"
        for ours in (KEY_HEADER, BASE_HEADER):
            headers.pop(ours, None)
        return headers

    async def _is_healthy(self) -> bool:
        try:
            response = await self._client.get(httpx.URL(self._call.url).join("/health"), timeout=10.0)
        except httpx.PoolTimeout:  # the streams have every connection: that says nothing of the engine
            return True
        except httpx.HTTPError:
            return False
        return response.status_code < 400


async def _cancel_once(work: Coroutine[Any, Any, None]) -> None:
    """Run a coroutine as a task of its own; a cancellation is passed on to it once, however often it comes.

    httpx loses a connection of its pool for good when what it does on a cancel is cancelled again; and an
    engine generates on for a client that has not hung up.
    """
    task = asyncio.ensure_future(work)
    task.add_done_callback(lambda done: done.cancelled() or done.exception())
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        if task.cancel():
            await asyncio.wait((task,))
        raise


def encode(body: Mapping[str, Any]) -> bytes:
    """Return a body as it is sent."""
    return msgspec.json.encode(body)


def is_finished(rollout: Rollout) -> bool:
    """Whether the engine has given every choice a finish reason other than an abort."""
    for choice in rollout.choices.values():
        if choice.finish_reason is None or choice.finish_reason in ("abort", "cancelled"):
            return False
    return True


def _no_read_limit(client: httpx.AsyncClient) -> httpx.Timeout:
    """The client's own limits, but for reads: a stream may stand still, and the watchdog knows better."""
    own = client.timeout
    return httpx.Timeout(connect=own.connect, read=None, write=own.write, pool=own.pool)


def _name(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".rstrip(": ")
