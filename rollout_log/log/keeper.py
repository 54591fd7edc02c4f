"""Whoever looks after a writer's folder: has rotated segments sealed, archived and, above the cap, deleted.

All of it is done by a child process of low priority (`keeping`), one at a time and on a share of one core,
so that it takes no time of the trainer's and dies alone. What fails stays as it is and is tried again after
the next rotation.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import msgspec

from rollout_log.child import command_of
from rollout_log.log.retention import size_of

__all__ = ["Done", "Keeper", "Plan", "run_child"]

SLACK = 1.25
"""How far above the cap a log may be while it is being sealed; beyond that, deleting does not wait for it."""
ENDED = 143
"""Exit status of a child that was told to end."""
_PATIENCE_S = 10
"""For a child that was told to end."""

_logger = logging.getLogger("rollout_log")


class Plan(msgspec.Struct, frozen=True):
    """What to do for one folder."""

    folder: Path
    active: int | None = None
    """The segment that is being written; None: the writer is gone, and all can be sealed."""
    archive: Path | None = None
    max_bytes: int | None = None
    """Of the whole log."""
    cpu: float | None = None
    """How much of one core it may take; None: what there is."""


class Done(msgspec.Struct, frozen=True):
    """One thing that was done, or failed."""

    what: Literal["sealed", "archived", "pruned", "failed"]
    path: str
    bytes: int = 0
    """Of the file now."""
    before: int = 0
    """Of the file it was made of."""
    detail: str | None = None


class Keeper:
    """Looks after a folder while its writer runs."""

    def __init__(self, plan: Plan, *, seals: bool) -> None:
        """`plan`: what to do, again and again; its `active` segment is the one that `tend` names."""
        self.plan = plan
        self.seals = seals
        self._lock = threading.Lock()
        self._active: int | None = None
        """What `tend` asked for last, until a child takes it."""
        self._busy = False
        self._stopped = False
        self._child: subprocess.Popen[bytes] | None = None
        self._thread: threading.Thread | None = None
        self._said: set[str] = set()

    def begin(self) -> None:
        """A writer begins: make room, where older writers of the log left more than the cap."""
        with contextlib.suppress(OSError):
            if self._is_above(1):
                self.tend(1)

    def tend(self, active: int) -> None:
        """Look after everything before the active segment, soon and elsewhere. Never raises."""
        if not self.seals:
            return
        with self._lock:
            self._active = active
            if self._child is not None and self._is_behind():
                self._child.terminate()  # the next one deletes first
            if self._busy or self._stopped:
                return
            thread = threading.Thread(target=self._run, name="rollout-log-keeper", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:
                self._warn(f"cannot seal segments of {self.plan.folder}: {error}")
                return
            self._busy, self._thread = True, thread

    def stop(self) -> None:
        """End the child, if there is one: what it has not finished is as it was."""
        with self._lock:
            self._stopped = True
            child, thread = self._child, self._thread
        if child is not None:
            child.terminate()
        if thread is not None:
            thread.join(_PATIENCE_S)

    def wait(self) -> None:
        """Block until everything that was asked for is done."""
        if self._thread is not None:
            self._thread.join()

    def _is_behind(self) -> bool:
        with contextlib.suppress(OSError):
            return self._is_above(SLACK)
        return False

    def _is_above(self, slack: float) -> bool:
        cap = self.plan.max_bytes
        return cap is not None and size_of(self.plan.folder.parent) > cap * slack

    def _run(self) -> None:
        while True:
            with self._lock:
                active, self._active = self._active, None
                if active is None or self._stopped:
                    self._busy = False
                    return
            try:
                self._keep(msgspec.structs.replace(self.plan, active=active))
            except Exception as error:
                self._warn(f"cannot seal segments of {self.plan.folder}: {type(error).__name__}: {error}")

    def _keep(self, plan: Plan) -> None:
        child = _start(plan)
        with self._lock:
            self._child = child
            if self._stopped:
                child.terminate()
        for done in _read(child):
            self._tell(done)
        with self._lock:
            self._child = None

    def _tell(self, done: Done) -> None:
        if done.what == "failed":
            if not self._stopped:
                self._warn(f"{done.path}: {done.detail}")
        elif done.what == "pruned":
            _logger.warning("deleted %s (%d bytes): %s", done.path, done.before, done.detail)
        else:
            _logger.info("%s %s (%d bytes, from %d)", done.what, done.path, done.bytes, done.before)

    def _warn(self, message: str) -> None:
        """Say it once: a folder that cannot be sealed would say it after every rotation."""
        if message not in self._said:
            self._said.add(message)
            _logger.warning("%s; recording goes on", message)


def run_child(plan: Plan) -> Iterator[Done]:
    """Do what a plan says in a process of its own, and yield what it did. For the command line."""
    child = _start(plan)
    try:
        yield from _read(child)
    finally:
        child.kill()
        child.wait()


def _start(plan: Plan) -> subprocess.Popen[bytes]:
    plain = msgspec.json.encode(plan, enc_hook=os.fspath).decode()
    return subprocess.Popen(  # noqa: S603 - a module of this package, with paths that are passed as they are
        command_of("rollout_log.log.keeping:main", plain),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        cwd="/",
    )


def _read(child: subprocess.Popen[bytes]) -> Iterator[Done]:
    """Yield what the child says, and how it ended where that was badly."""
    last = b""
    assert child.stdout is not None  # noqa: S101 - a pipe was asked for
    with child.stdout:
        for line in child.stdout:
            try:
                yield msgspec.json.decode(line, type=Done)
            except msgspec.DecodeError:  # a traceback
                last = line
    status = child.wait()
    if status not in {0, -signal.SIGTERM, ENDED}:
        detail = f"the process that seals ended with {status}: {last.decode(errors='replace').strip()}"
        yield Done("failed", str(child.args[-1]), detail=detail)  # type: ignore[index]  # a list, see `_start`
