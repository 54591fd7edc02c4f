"""The library tap: generate for a sample, with retry, resume and abort, everything recorded.

async with Recorder(log, client) as recorder:
    rollout = await recorder.generate("t1-abc", url, body)
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import urlsplit

import httpx

from rollout_log.counting import several
from rollout_log.engines import RequestInfo, dialect_for
from rollout_log.errors import RolloutLogError
from rollout_log.events import Cause, Closed
from rollout_log.fold import Rollout
from rollout_log.record.call import Call
from rollout_log.record.continuation import may_continue, request_from, strange_field
from rollout_log.record.errors import GenerationFailed, GenerationRefused
from rollout_log.record.evidence import Evidence, evidence_of_finish
from rollout_log.record.exchange import Exchange
from rollout_log.record.headers import safe_url
from rollout_log.record.live import LiveSample
from rollout_log.record.retry import Backoff, Verdict, judge
from rollout_log.record.samples import Samples
from rollout_log.record.sending import encode, send
from rollout_log.record.watchdog import take_back_cancel
from rollout_log.request import CAN_BE_INFERRED, Request

if TYPE_CHECKING:
    from typing_extensions import Self

    from rollout_log.log import Log

__all__ = ["Call", "Recorder"]

_logger = logging.getLogger("rollout_log")

OnRetry = Literal["auto", "restart", "continue"]
NoTerminal = Literal["auto", "stop", "abort"]


class Recorder:
    """Generates for samples over one httpx client, into one log (None: the same, without recording).

    `on_retry`: `auto` goes on from the tokens there are where that gives the same distribution, else
    starts again; `restart` always starts again; `continue` always goes on where the parameters allow it.
    `no_terminal`: what a clean end without finish reason and without evidence calls for: `auto` a retry,
    `stop` a finished sample, `abort` an aborted one. `stall_s`: seconds between reads before `/health` is
    asked.
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
        self.client = client
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
        `CancelledError` and leaves the sample aborted with the tokens it has, between two tries as well,
        unless the finish had come: then the finished sample is returned.
        """
        return await self.run(Call(key=key, url=url, body=body, **options))

    async def run(self, call: Call) -> Rollout:
        """Serve one call; see `generate`."""
        dialect = dialect_for(urlsplit(call.url).path)
        if dialect is None:
            url = safe_url(call.url)
            raise RolloutLogError(f"sample {call.key!r}: {url} is no path an engine generates on")
        base, cause, body = call.base, call.cause, encode(call.body)
        first = info = dialect.read_request(body)
        sample: LiveSample | None = None
        first_base: int | None = None
        attempt = fruitless = 0
        while True:
            exchange = self._begin(call, body, base, cause, sample)
            sample, rollout = exchange.sample, exchange.rollout  # a retry stays with it, child or not
            request = rollout.requests[-1]
            if first_base is None:
                first_base = request.base
            await send(self.client, call, exchange, body, stall_s=self._stall_s)
            self._infer_finish(call, exchange, info)
            verdict = judge(rollout, request, retry_without_terminal=self._no_terminal == "auto")
            try:
                await self._settle(exchange)
                if verdict.kind == "final":
                    return rollout
                if not _stops(call):
                    self._check(call, exchange, verdict, attempt)
                    fruitless = 0 if request.tokens else fruitless + 1
                    self._tell_retry(exchange.key, request, verdict.reason, call.url)
                    await self._pause(call, self._backoff.delay(max(fruitless - 1, 0)))
            except asyncio.CancelledError:
                _call_off(exchange, verdict, "cancelled")
                raise
            if _stops(call):
                _call_off(exchange, verdict, "the run aborts")
                await self._settle(exchange)
                return rollout
            attempt += 1
            cause = "retry"
            base, body, info = first_base, encode(call.body), first
            kept = rollout.choice_or_first().token_ids[first_base:]
            if kept and first.token_ids and self._may_go_on(call, rollout, first, kept):
                again = request_from(dialect.name, call.body, first.token_ids, kept)
                if again is not None:
                    base, body = first_base + len(kept), encode(again)
                    info = dialect.read_request(body)

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
        self,
        call: Call,
        body: bytes,
        base: int | None,
        cause: Cause | None,
        sample: LiveSample | None,
    ) -> Exchange:
        version = call.weight_version() if callable(call.weight_version) else call.weight_version
        parts = urlsplit(call.url)
        return self.samples.request(
            call.key if sample is None else sample.key,
            path=parts.path + (f"?{parts.query}" if parts.query else ""),
            url=call.url,
            headers=call.headers.items(),
            body=body,
            base=base,
            cause=cause,
            weight_version=version,
            opened=call.opened,
            sample=sample,
        )

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

    def _check(self, call: Call, exchange: Exchange, verdict: Verdict, attempt: int) -> None:
        """Raise where a request that did not finish is not made again."""
        if verdict.kind == "refused":
            message = f"sample {exchange.key!r}: the engine refused: {verdict.reason}"
            raise GenerationRefused(message, exchange.rollout)
        if attempt >= self._backoff.tries:
            raise GenerationFailed(
                f"sample {exchange.key!r}: given up after {several(attempt + 1, 'request')}, the last "
                f"ended in {verdict.reason}. Is the engine at {safe_url(call.url)} up?",
                exchange.rollout,
            )

    async def _settle(self, exchange: Exchange) -> None:
        try:
            await exchange.settle()
        except asyncio.CancelledError:
            if exchange.rollout.status not in {"completed", "truncated"}:
                raise
            take_back_cancel()

    async def _pause(self, call: Call, delay: float) -> None:
        """Wait before a retry, or until the run aborts."""
        deadline = asyncio.get_running_loop().time() + delay
        while (left := deadline - asyncio.get_running_loop().time()) > 0:
            if _stops(call):
                return
            await asyncio.sleep(min(left, 0.5) if call.should_stop else left)

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
        elif self._no_terminal == "stop" and rollout.ended_of(request) == "no_terminal" and not _stops(call):
            exchange.mark("finish_inferred", finish_reason="stop", evidence="setting")


def _stops(call: Call) -> bool:
    return call.should_stop is not None and call.should_stop()


def _call_off(exchange: Exchange, verdict: Verdict, reason: str) -> None:
    """Nobody tries again: what a passing failure had ended is an aborted sample, not a failed one."""
    if verdict.kind == "retry" and exchange.rollout.status == "failed":
        exchange.mark("called_off", reason=reason)


def _evidence(call: Call, info: RequestInfo, tokens: list[int]) -> Evidence | None:
    text = _text(call, info, tokens)
    return evidence_of_finish(info, tokens, eos_token_ids=call.eos_token_ids, text=text)


def _text(call: Call, info: RequestInfo, tokens: list[int]) -> str | None:
    """Return the text of tokens, where it can be had and stop strings need it."""
    if call.decode is None or not info.sampling_params.get("stop"):
        return None
    try:
        return call.decode(tokens)
    except Exception as error:  # of ids that it does not have, each tokenizer raises something else
        _logger.debug("sample %r: its tokens have no text: %s: %s", call.key, type(error).__name__, error)
        return None
