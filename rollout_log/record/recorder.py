"""The library tap: generate for a sample, with retry, resume and abort, everything recorded.

async with Recorder(log, client) as recorder:
    rollout = await recorder.generate("t1-abc", url, body)
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Mapping
from time import monotonic
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import urlsplit

import httpx
import msgspec

from rollout_log.engines import RequestInfo, dialect_for
from rollout_log.errors import RolloutLogError
from rollout_log.events import Cause, Closed, Opened
from rollout_log.fold import Rollout
from rollout_log.record.continuation import may_continue, request_from, strange_field
from rollout_log.record.errors import GenerationFailed, GenerationRefused
from rollout_log.record.evidence import Evidence, evidence_of_finish
from rollout_log.record.exchange import Exchange
from rollout_log.record.headers import BASE_HEADER, KEY_HEADER, safe_url
from rollout_log.record.retry import Backoff, judge
from rollout_log.record.samples import Samples
from rollout_log.record.transport import EXTENSION
from rollout_log.record.watchdog import Watchdog, take_back_cancel
from rollout_log.request import CAN_BE_INFERRED, Request

if TYPE_CHECKING:
    from typing_extensions import Self

    from rollout_log.log import Log

__all__ = ["Call", "Recorder"]

_logger = logging.getLogger("rollout_log")
_LINGER_S = 10.0
"""How long the usage frame and `[DONE]` may take once the finish has come."""

OnRetry = Literal["auto", "restart", "continue"]
NoTerminal = Literal["auto", "abort"]


class Call(msgspec.Struct, kw_only=True):
    """What is asked of the recorder for one sample; everything but the first three has a default."""

    key: str
    url: str
    body: Mapping[str, Any]
    headers: Mapping[str, str] = {}
    base: int | None = None
    """Explicit length of the response this call goes on from; None: inferred from the body's ids."""
    cause: Cause | None = None
    opened: Opened | None = None
    """What else is known of the sample: step, group, index, metadata."""
    weight_version: Callable[[], str | None] | str | None = None
    """Weights loaded at dispatch; a function is asked before every request."""
    masks_offpolicy: bool = False
    """The trainer masks tokens of older weights, so a retry may go on across an update."""
    eos_token_ids: Collection[int] = ()
    decode: Callable[[list[int]], str] | None = None
    """Tokens to text, where stop strings have to be judged."""
    should_stop: Callable[[], bool] | None = None
    """Whether the run aborts: asked between reads and at least every second. Nothing is retried then."""
    stop_grace_s: float = 0.0
    """How long a stream may go on once the run aborts, so that the engine can say its last word."""
    on_chunk: Callable[[bytes], None] | None = None
    """Called with every read of a response, before it is folded."""
    on_read: Callable[[Rollout], None] | None = None
    """Called when a request begins and after every read, before anything is awaited again."""


class Recorder:
    """Generates for samples over one httpx client, into one log (None: the same, without recording).

    `on_retry`: `auto` goes on from the tokens there are where that gives the same distribution, else
    starts again; `restart` always starts again; `continue` always goes on where the parameters allow it.
    `no_terminal`: what a clean end without finish reason and without evidence calls for: `auto` a retry,
    `abort` an aborted sample. `stall_s`: seconds between reads before `/health` is asked.
    """

    def __init__(
        self,
        log: Log | None,
        client: httpx.AsyncClient,
        *,
        on_retry: OnRetry = "auto",
        no_terminal: NoTerminal = "auto",
        backoff: Backoff | None = None,
        stall_s: float = 600.0,
        samples: Samples | None = None,
    ) -> None:
        self.samples = samples or Samples(log)
        self._log = log
        self._client = client
        self._on_retry = on_retry
        self._no_terminal = no_terminal
        self._backoff = backoff or Backoff()
        self._stall_s = stall_s
        self._warned: set[str] = set()
        """Why requests got no response at all, as far as that was said."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._log is not None:
            await self._log.flush()

    async def generate(self, key: str, url: str, body: Mapping[str, Any], **options: Any) -> Rollout:
        """Generate for one sample and return it when it is finished or aborted.

        `options` are those of `Call`. Raises `GenerationRefused` when the engine will not serve the request,
        `GenerationFailed` when the retries are used up; both carry the rollout. A cancellation raises
        `CancelledError` and leaves the sample aborted (or, between two tries, as the last one left it),
        unless the finish had come: then the finished sample is returned.
        """
        return await self.run(Call(key=key, url=url, body=body, **options))

    async def run(self, call: Call) -> Rollout:
        """Serve one call; see `generate`."""
        dialect = dialect_for(urlsplit(call.url).path)
        if dialect is None:
            url = safe_url(call.url)
            raise RolloutLogError(f"sample {call.key!r}: {url} is no path an engine generates on")
        key, base, cause, body = call.key, call.base, call.cause, call.body
        info = dialect.read_request(_encode(body))
        first_base: int | None = None
        attempt = fruitless = 0
        while True:
            exchange = self._begin(call, key, body, base, cause)
            key, rollout = exchange.key, exchange.rollout  # a retry stays with the sample, child or not
            request = rollout.requests[-1]
            if first_base is None:
                first_base = request.base
            if call.on_read is not None:
                call.on_read(rollout)  # the request's base may have cut the response
            await self._send(call, exchange, body)
            await self._settle(exchange)
            self._infer_finish(call, exchange, dialect.read_request(_encode(body)))
            verdict = judge(rollout, request, retry_without_terminal=self._no_terminal == "auto")
            if verdict.kind == "final" or (call.should_stop is not None and call.should_stop()):
                return rollout
            if verdict.kind == "refused":
                raise GenerationRefused(
                    f"sample {exchange.key!r}: the engine refused: {verdict.reason}", rollout
                )
            if attempt >= self._backoff.tries:
                raise GenerationFailed(
                    f"sample {exchange.key!r}: given up after {attempt + 1} requests, the last ended in "
                    f"{verdict.reason}. Is the engine at {safe_url(call.url)} up?",
                    rollout,
                )
            fruitless = 0 if request.tokens else fruitless + 1
            self._tell_retry(exchange.key, request, verdict.reason, call.url)
            if not await self._pause(call, self._backoff.delay(max(fruitless - 1, 0))):
                return rollout
            attempt += 1
            cause = "retry"
            base, body = first_base, call.body
            kept = rollout.choice_or_first().token_ids[first_base:]
            if kept and info.token_ids and self._may_go_on(call, rollout, info, kept):
                again = request_from(dialect.name, call.body, info.token_ids, kept)
                if again is not None:
                    base, body = first_base + len(kept), again

    def mark(self, key: str, name: str, **fields: object) -> None:
        """Write down something else that happened to a sample."""
        sample = self.samples.get(key)
        if sample is not None and sample.exchange is not None:
            sample.exchange.mark(name, **fields)

    def close(self, key: str, closed: Closed) -> None:
        """Write down what the trainer made of a sample."""
        sample = self.samples.get(key)
        if sample is not None:
            sample.close(closed)

    # Parts

    def _begin(
        self, call: Call, key: str, body: Mapping[str, Any], base: int | None, cause: Cause | None
    ) -> Exchange:
        version = call.weight_version() if callable(call.weight_version) else call.weight_version
        parts = urlsplit(call.url)
        return self.samples.request(
            key,
            path=parts.path + (f"?{parts.query}" if parts.query else ""),
            url=call.url,
            headers=call.headers.items(),
            body=_encode(body),
            base=base,
            cause=cause,
            weight_version=version,
            opened=call.opened,
        )

    async def _send(self, call: Call, exchange: Exchange, body: Mapping[str, Any]) -> None:
        """Make one request and take its response in; returns however it ended, but for a cancellation."""
        stops = _stopper(call)
        watchdog = Watchdog(self._stall_s, healthy=lambda: self._is_healthy(call.url), stop=stops)
        watchdog.start()
        try:
            await _cancel_once(asyncio.ensure_future(self._stream(call, exchange, body, watchdog, stops)))
            if watchdog.fired:
                await asyncio.sleep(0)  # its cancellation is on the way; it must not hit the caller
        except asyncio.CancelledError:
            if watchdog.absorb():
                self._end_watched(exchange, watchdog)
            else:
                exchange.end("cancelled")
                if not _is_finished(exchange.rollout):
                    raise
                take_back_cancel()
        except httpx.TimeoutException as error:
            exchange.end("timeout", _name(error))
        except httpx.TransportError as error:
            exchange.end("reset", _name(error))
        except Exception as error:
            exchange.end("reset", _name(error))
            raise
        finally:
            watchdog.close()
        if exchange.broken is not None:
            message = f"sample {exchange.key!r}: a response could not be folded: {exchange.broken}"
            raise GenerationFailed(message, exchange.rollout) from exchange.broken

    async def _stream(
        self,
        call: Call,
        exchange: Exchange,
        body: Mapping[str, Any],
        watchdog: Watchdog,
        stops: Callable[[], bool] | None,
    ) -> None:
        headers = httpx.Headers({"content-type": "application/json"})
        headers.update(call.headers)
        headers["accept-encoding"] = "identity"
        for ours in (KEY_HEADER, BASE_HEADER):
            headers.pop(ours, None)
        rollout, on_read = exchange.rollout, call.on_read
        finished = False
        async with self._client.stream(
            "POST",
            call.url,
            content=_encode(body),
            headers=headers,
            timeout=_no_read_limit(self._client),
            extensions={EXTENSION: {"recorded": True}},
        ) as response:
            exchange.respond(response.status_code, response.headers.multi_items(), response.http_version)
            async for chunk in response.aiter_raw():
                if call.on_chunk is not None:
                    call.on_chunk(chunk)
                exchange.feed(chunk)
                watchdog.touch()
                if on_read is not None:
                    on_read(rollout)
                if stops is not None and stops() and not _is_finished(rollout):
                    exchange.end("cancelled", "the run aborts")
                    return
                if not finished and _is_finished(rollout):
                    finished = True
                    watchdog.limit = min(watchdog.limit, _LINGER_S)
        exchange.end("eof")
        if on_read is not None:
            on_read(rollout)

    def _end_watched(self, exchange: Exchange, watchdog: Watchdog) -> None:
        if watchdog.fired == "stopped":
            exchange.end("cancelled", "the run aborts")
        else:
            exchange.end("timeout", f"no bytes for {watchdog.limit:g} s")

    def _tell_retry(self, key: str, request: Request, reason: str, url: str) -> None:
        """Warn once of each cause for which no engine answers; all else that is retried is daily life."""
        if request.http_status is not None or reason in self._warned:
            _logger.info("sample %r: request %d ended in %s; again", key, request.number, reason)
            return
        self._warned.add(reason)
        _logger.warning(
            "sample %r: no response from %s (%s); asking again, up to %d times, up to %g s apart",
            key,
            safe_url(url),
            reason,
            self._backoff.tries,
            self._backoff.longest,
        )

    async def _settle(self, exchange: Exchange) -> None:
        try:
            await exchange.settle()
        except asyncio.CancelledError:
            if not _is_finished(exchange.rollout):
                raise
            take_back_cancel()

    async def _pause(self, call: Call, delay: float) -> bool:
        """Wait before a retry; False when the run aborts meanwhile."""
        deadline = asyncio.get_running_loop().time() + delay
        while (left := deadline - asyncio.get_running_loop().time()) > 0:
            if call.should_stop is not None and call.should_stop():
                return False
            await asyncio.sleep(min(left, 0.5) if call.should_stop else left)
        return not (call.should_stop is not None and call.should_stop())

    def _may_go_on(self, call: Call, rollout: Rollout, info: RequestInfo, kept: list[int]) -> bool:
        if self._on_retry == "restart" or info.n != 1 or _evidence(call, info, kept) is not None:
            return False
        if may_continue(info.sampling_params, seam=_text(call, info, kept)) is not None:
            return False
        dialect = dialect_for(urlsplit(call.url).path)
        if dialect is None or strange_field(dialect.name, call.body) is not None:
            return False
        if self._on_retry == "continue" or call.masks_offpolicy:
            return True
        version = call.weight_version() if callable(call.weight_version) else call.weight_version
        choice = rollout.choice_or_first()
        start = len(choice.token_ids) - len(kept)
        spans = choice.weight_versions(rollout.dispatched)
        return len(kept) == sum(
            span.end - max(span.start, start)
            for span in spans
            if span.end > start and span.version == version
        )

    def _infer_finish(self, call: Call, exchange: Exchange, info: RequestInfo) -> None:
        rollout, request = exchange.rollout, exchange.rollout.requests[-1]
        if rollout.ended_of(request) not in CAN_BE_INFERRED or request.n != 1:
            return
        found = _evidence(call, info, rollout.choice_or_first().token_ids[request.base :])
        if found is not None:
            exchange.mark("finish_inferred", finish_reason=found.finish_reason, evidence=found.evidence)

    async def _is_healthy(self, url: str) -> bool:
        try:
            response = await self._client.get(httpx.URL(url).join("/health"), timeout=10.0)
        except httpx.HTTPError:
            return False
        return response.status_code < 400


async def _cancel_once(task: asyncio.Future[None]) -> None:
    """Await a task of its own; a cancellation is passed on to it once, however often it comes.

    httpx loses a connection of its pool for good when what it does on a cancel is cancelled again; and an
    engine generates on for a client that has not hung up.
    """
    task.add_done_callback(lambda done: done.cancelled() or done.exception())
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        if task.cancel():
            await asyncio.wait((task,))
        raise


def _stopper(call: Call) -> Callable[[], bool] | None:
    """Return what says that a stream has to stop: the run aborts, and its grace is over."""
    should_stop, grace = call.should_stop, call.stop_grace_s
    if should_stop is None or not grace:
        return should_stop
    since: list[float] = []

    def stops() -> bool:
        if not should_stop():
            return False
        if not since:
            since.append(monotonic())
        return monotonic() - since[0] >= grace

    return stops


def _is_finished(rollout: Rollout) -> bool:
    """Whether the engine has given every choice a finish reason other than an abort."""
    for choice in rollout.choices.values():  # asked at every read: `all(…)` costs twice as much
        if choice.finish_reason is None or choice.finish_reason in ("abort", "cancelled"):
            return False
    return True


def _evidence(call: Call, info: RequestInfo, tokens: list[int]) -> Evidence | None:
    text = _text(call, info, tokens)
    return evidence_of_finish(info, tokens, eos_token_ids=call.eos_token_ids, text=text)


def _text(call: Call, info: RequestInfo, tokens: list[int]) -> str | None:
    """Return the text of tokens, where it can be had and stop strings need it."""
    return call.decode(tokens) if call.decode is not None and info.sampling_params.get("stop") else None


def _encode(body: Mapping[str, Any]) -> bytes:
    return msgspec.json.encode(body)


def _no_read_limit(client: httpx.AsyncClient) -> httpx.Timeout:
    """The client's own limits, but for reads: a stream may stand still, and the watchdog knows better."""
    own = client.timeout
    return httpx.Timeout(connect=own.connect, read=None, write=own.write, pool=own.pool)


def _name(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".rstrip(": ")
