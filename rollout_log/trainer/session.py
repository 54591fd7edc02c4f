"""What one process of a trainer records into: the log, the samples in flight, the counters of the step."""

from __future__ import annotations

import contextlib
import logging
import os
import tempfile
import threading
import time
import uuid
import weakref
from collections import OrderedDict
from pathlib import Path
from typing import Any, NamedTuple

import httpx

from rollout_log.errors import RolloutLogError
from rollout_log.log import Log
from rollout_log.log.retention import cap_of
from rollout_log.record import Recorder, RecordingTransport
from rollout_log.record.live import Closable, LiveSample
from rollout_log.record.retry import Backoff
from rollout_log.record.samples import Samples
from rollout_log.settings import Settings, read_settings
from rollout_log.trainer.closing import Fingerprint, fingerprints, folded
from rollout_log.trainer.recovery import Life, Recovery
from rollout_log.trainer.weights import Weights

__all__ = ["Session", "close_session", "session_for"]

_logger = logging.getLogger("rollout_log")
_lock = threading.Lock()
_session: Session | None = None
_KEPT_STEPS = 4
"""For how many steps a finished sample is kept for `log_metrics`; fully asynchronous runs lag behind."""
_OVER = ("completed", "truncated", "failed")
_MOST_ASIDE = 1 << 16
"""Samples out of memory that can still be closed, at about a kilobyte each."""


class Aside(NamedTuple):
    """A sample that left the memory before its step was closed."""

    closable: Closable
    known: dict[str, Fingerprint]
    """Of what the log has of it."""


class Session:
    """Everything a process keeps between calls of a plug-in."""

    def __init__(self, settings: Settings, run: str) -> None:
        self.settings = settings
        self.run = run
        self.log = _open_log(settings, run)
        self.samples = Samples(self.log, let_go=self._set_aside)
        self._aside: OrderedDict[str, Aside] = OrderedDict()
        self.pid = os.getpid()
        self._owners: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()
        self.weights = Weights()
        self._step: int | None = None
        self._recorder: Recorder | None = None
        self._said: set[str] = set()
        self._counted: dict[str, int] = {}
        self._recovery: Recovery | None = None
        self._recovered = False
        self._given_back: dict[str, Life] = {}
        self.gave_back = False
        """Whether groups went back to the trainer already."""
        self._tapped: list[tuple[weakref.ref[httpx.AsyncClient], httpx.AsyncBaseTransport]] = []

    def recorder(self, client: httpx.AsyncClient) -> Recorder:
        """Return the recorder over a client, into this session's log: one, so that it says things once."""
        if self._recorder is None or self._recorder.client is not client:
            settings = self.settings
            self._recorder = Recorder(
                self.log,
                client,
                on_retry=settings.on_retry,
                no_terminal="abort" if settings.no_terminal == "fail" else settings.no_terminal,
                backoff=Backoff(tries=settings.retries),
                stall_s=settings.stall_s,
                samples=self.samples,
            )
        return self._recorder

    def _set_aside(self, live: LiveSample) -> None:
        """A step may have more tokens than stay in memory: what leaves it is closed all the same."""
        try:
            if (closable := live.closable()) is not None:
                self._aside[live.key] = Aside(closable, fingerprints(folded(live.rollout)))
        except Exception as error:
            self.say_once("sample %r cannot be closed: %s: %s", live.key, type(error).__name__, error)
        while len(self._aside) > _MOST_ASIDE:
            self._aside.popitem(last=False)

    def take_aside(self, key: str) -> Aside | None:
        """Return what is left of a sample that is no longer in memory, once."""
        return self._aside.pop(key, None)

    def key_of(self, sample: Any, *, evaluation: bool) -> str:
        """Return a sample's key: it survives a resume, and no two samples that are alive share one."""
        known = (getattr(sample, "metadata", None) or {}).get("rollout_log") or {}
        key = known.get("key") if isinstance(known, dict) else None
        if not isinstance(key, str):
            session_id = getattr(sample, "session_id", None) or uuid.uuid4().hex
            index = getattr(sample, "index", None)
            key = f"{'e' if evaluation else 't'}{'' if index is None else index}-{str(session_id)[:12]}"
        other = self._owners.get(key)
        if other is not None and other is not sample:  # a copy that is generated beside its original
            key = f"{key}-{uuid.uuid4().hex[:6]}"
        with contextlib.suppress(TypeError):  # what cannot be watched cannot be told from its copies either
            self._owners[key] = sample
        return key

    def enter(self, step: int | None) -> None:
        """A call belongs to a step; the first one of a step lets go of what was finished long before."""
        if step is None or step == self._step:
            return
        self._step = step
        for live in self.samples.all():
            begun = live.rollout.step
            if (
                begun is not None
                and begun + _KEPT_STEPS < step
                and not live.busy
                and live.rollout.status in _OVER
            ):
                self.samples.forget(live.key)

    def recovery(self, step: int | None) -> Recovery | None:
        """Return what older processes left in this log; the first call's `step` is the first one after it.

        None unless `resume` says `continue`.
        """
        if self.settings.resume == "off" or self.log is None:
            return None
        if self._recovery is None and not self._recovered:
            self._recovered = True
            if step is None:
                self.say_once("nothing is gone on from: the trainer does not say which step it is in")
                return None
            try:
                self._recovery = Recovery(self.log.path, self.log.writer, step)
            except RolloutLogError as error:
                self.say_once("nothing is gone on from: %s", error)
        return self._recovery

    def take(self, life: Life) -> None:
        """A sample that goes back to the trainer will go on from this."""
        self._given_back[life.entry.summary.key] = life

    def given_back(self, key: str) -> Life | None:
        """Return what a sample that was given back goes on from, once."""
        return self._given_back.pop(key, None)

    def tap(self, client: httpx.AsyncClient) -> None:
        """Record what goes through a client inside `recording(…)`, until the session is closed."""
        inner = client._transport
        if isinstance(inner, RecordingTransport):
            return
        client._transport = RecordingTransport(self.log, inner, samples=self.samples, scoped=True)
        self._tapped.append((weakref.ref(client), inner))

    def new_counts(self) -> dict[str, int]:
        """Return what the log counted since the last call of this."""
        counters = self.log.counters if self.log is not None else None
        now = {
            "late_flushes": counters.late_flushes if counters else 0,
            "unrecorded_requests": self.samples.unrecorded,
        }
        new = {name: value - self._counted.get(name, 0) for name, value in now.items()}
        self._counted = now
        return new

    def say_once(self, message: str, *args: object, level: int = logging.WARNING) -> None:
        """Log a message the first time only."""
        if message not in self._said:
            self._said.add(message)
            _logger.log(level, message, *args)

    def tolerate(self, error: Exception, message: str, *args: object) -> None:
        """Warn, once, of an error of ours that must not end the run; a strict session raises it."""
        if self.settings.strict:
            raise error
        self.say_once(f"{message}: %s: %s", *args, type(error).__name__, error)

    def close(self) -> None:
        """Flush and close the log, and take the taps off."""
        for reference, inner in self._tapped:
            client = reference()
            if client is not None and isinstance(client._transport, RecordingTransport):
                client._transport = inner
        if self._recovery is not None:
            self._recovery.close()
        if self.log is not None:
            self.log.close()


def session_for(args: Any) -> Session:
    """Return this process's session; the first call reads the settings and opens the log."""
    global _session
    session = _session
    if session is not None and session.pid == os.getpid():
        return session
    with _lock:
        if _session is None or _session.pid != os.getpid():
            settings = read_settings(args)
            _session = Session(settings, _run_of(args))
            _announce(_session)
        return _session


def close_session() -> None:
    """Close this process's session; the next call begins another."""
    global _session
    with _lock:
        session, _session = _session, None
    if session is not None and session.pid == os.getpid():
        session.close()


def _open_log(settings: Settings, run: str) -> Log | None:
    if not settings.enabled:
        return None
    path = Path(settings.dir) if settings.dir else Path(tempfile.gettempdir()) / "rollout-log" / run
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return Log.open(
            path,
            run=run,
            window_ms=settings.window_ms,
            durability=settings.durability,
            strict=settings.strict,
            max_bytes=settings.max_bytes,
            archive=settings.archive,
            seal_cpu=settings.seal_cpu,
            keep=settings.keep,
        )
    except (RolloutLogError, OSError) as error:
        if settings.strict:
            raise
        _logger.warning("nothing is recorded: %s. The run goes on without a log.", error)
        return None


def _announce(session: Session) -> None:
    settings, log = session.settings, session.log
    if log is None:
        if not settings.enabled:
            _logger.info("recording is off (ROLLOUT_LOG_ENABLED)")
        return
    cap = settings.max_bytes if settings.max_bytes is not None else cap_of(log.path)
    _logger.info(
        "recording every delta to %s: at most %.3g GB, kill -9 loses %.0f ms, keys are t<index>-<session> "
        "and e<index>-<session> in evaluation; off: ROLLOUT_LOG_ENABLED=0",
        log.path,
        cap / 1e9,
        log.window_ms,
    )


def _run_of(args: Any) -> str:
    for name in ("wandb_group", "wandb_exp_name"):
        value = getattr(args, name, None)
        if isinstance(value, str) and value:
            return _file_name(value)
    save = getattr(args, "save", None)
    if isinstance(save, str) and save.strip("/"):
        return _file_name(Path(save).name)
    return time.strftime("run-%Y%m%d-%H%M%S")


def _file_name(text: str) -> str:
    return (
        "".join(letter if letter.isalnum() or letter in "-_." else "-" for letter in text).lstrip(".")
        or "run"
    )


def _after_fork_in_child() -> None:
    global _lock
    _lock = threading.Lock()  # another thread may have held it, which is not here


os.register_at_fork(after_in_child=_after_fork_in_child)
