"""Somebody else's generate function, recorded: whatever it posts through the trainer's shared HTTP client.

Turn by turn: tokens that a request adds to what the engine said are the environment's. Requests at the same
time, to other endpoints or with other prompts become children of the sample. Only what is posted inside the
call is recorded, by context variable, so calls at the same time do not mix.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, TypeVar

from rollout_log.events import Opened
from rollout_log.record.live import LiveSample
from rollout_log.record.transport import recording
from rollout_log.trainer.host import Host
from rollout_log.trainer.opening import opened_for
from rollout_log.trainer.session import Session, session_for
from rollout_log.trainer.tally import METADATA, facts_of, tally

__all__ = ["recorded_by"]

_Generate = TypeVar("_Generate", bound=Callable[..., Awaitable[Any]])

_PROXY = "record such requests with the proxy, `rollout-log record`, in front of the engine"


def recorded_by(host: Host) -> Callable[[_Generate], _Generate]:
    """Return the decorator for a trainer's generate functions.

    It mirrors the function's signature and attributes: `abort_mode` only where the function has one.
    """

    def recorded(function: _Generate) -> _Generate:
        names = list(inspect.signature(function).parameters)[:2]

        @functools.wraps(function)
        async def generate(*args: Any, **kwargs: Any) -> Any:
            given = dict(zip(names, args, strict=False))
            trainer_args, sample = ({**given, **kwargs}[name] for name in names)
            session = session_for(trainer_args)
            if session.log is None:
                return await function(*args, **kwargs)
            evaluation = bool(kwargs.get("evaluation", args[3] if len(args) > 3 else False))
            try:
                _tap(host, session, trainer_args)
                call = _Recorded(host, session, trainer_args, sample, evaluation=evaluation)
            except Exception as error:
                session.tolerate(error, "sample %s goes unrecorded", getattr(sample, "index", None))
                return await function(*args, **kwargs)
            result: Any = None
            try:
                with recording(call.opened):
                    result = await function(*args, **kwargs)
            finally:
                call.finish(result)
            return result

        return generate  # type: ignore[return-value]  # the same signature, as `wraps` says

    return recorded


def _tap(host: Host, session: Session, args: Any) -> None:
    """Put the recording transport around the shared client's own."""
    session.tap(host.client(args))
    http_utils = host.module("utils.http_utils")
    if getattr(http_utils, "_distributed_post_enabled", False) and getattr(http_utils, "_post_actors", None):
        session.say_once(
            "%s posts from Ray actors (--use-distributed-post), which is not seen here: turn it off, or %s",
            host.name,
            _PROXY,
        )


class _Recorded:
    """One call."""

    def __init__(self, host: Host, session: Session, args: Any, sample: Any, *, evaluation: bool) -> None:
        self.host, self.session, self.sample = host, session, sample
        self.start = sample.response_length
        key = session.key_of(sample, evaluation=evaluation)
        known = facts_of(sample)
        self.before = known if known.get("key") == key else {}
        self.opened: Opened = opened_for(
            args, sample, key=key, run=session.run, step=host.step(), evaluation=evaluation, start=self.start
        )
        live = session.samples.get(key)
        self.requests = len(live.rollout.requests) if live is not None else 0
        self.discarded = live.rollout.discarded if live is not None else 0
        self._set(sample, {**self.before, "key": key})

    def finish(self, result: Any) -> None:
        """Give every sample that came back the key of what was recorded for it."""
        try:
            self._finish(result)
        except Exception as error:
            self.session.tolerate(error, "sample %r does not get its counters", self.opened.key)

    def _finish(self, result: Any) -> None:
        lives = list(self._lives())
        if not lives:
            self._say_nothing_came(result)
            return
        samples = list(_flat(result)) if result is not None else [self.sample]
        longest_first = sorted(lives, key=lambda live: live.rollout.length, reverse=True)
        taken: set[str] = set()
        for sample in samples:
            of_it = (live for live in longest_first if live.key not in taken and _begins(sample, live))
            live = next(of_it, lives[0] if len(samples) == 1 else None)
            if live is None:
                self._set(sample, {})
                continue
            taken.add(live.key)
            own = live is lives[0] and live.key == self.opened.key
            counters = tally(
                self.before if own else {},
                live.rollout,
                live.rollout.requests[self.requests if own else 0 :],
                start=self.start if own else 0,
                discarded=self.discarded if own else 0,
                aborted=getattr(sample.status, "name", None) == "ABORTED",
            )
            self._set(sample, {"key": live.key, **counters})

    def _lives(self) -> Iterator[LiveSample]:
        """What was recorded by this call, children included."""
        samples = self.session.samples
        live = samples.get(self.opened.key)
        if live is None or len(live.rollout.requests) == self.requests:
            return
        yield live
        yield from samples.children(live)

    def _say_nothing_came(self, result: Any) -> None:
        if any(sample.response_length for sample in _flat(result if result is not None else [])):
            self.session.say_once(
                "sample %r was generated and nothing of it recorded: its function does not use %s's shared "
                "HTTP client; %s",
                self.opened.key,
                self.host.name,
                _PROXY,
            )

    def _set(self, sample: Any, facts: dict[str, Any]) -> None:
        metadata = {**(getattr(sample, "metadata", None) or {}), METADATA: facts}
        if not facts:
            del metadata[METADATA]
        sample.metadata = metadata


def _begins(sample: Any, live: LiveSample) -> bool:
    """Whether a sample has the tokens that were recorded, and perhaps more behind them."""
    rollout = live.rollout
    length = len(rollout.prompt_token_ids) + rollout.length
    return bool(rollout.length) and list(sample.tokens[:length]) == [
        *rollout.prompt_token_ids,
        *rollout.choice_or_first().token_ids,
    ]


def _flat(result: Any) -> Iterator[Any]:
    if isinstance(result, (list, tuple)):
        for each in result:
            yield from _flat(each)
    elif hasattr(result, "response_length"):
        yield result
