"""Fold every sample of a log in another process, which a damaged file may kill.

The child writes a JSON line a sample: `[name, status, problems, null]`, or `[name, status, [], why not]`
where it cannot be read, with the status of its summary.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec

from rollout_log.child import command_of
from rollout_log.cli._output import print_json
from rollout_log.cli._progress import progress
from rollout_log.errors import RolloutLogError
from rollout_log.problems import Problem
from rollout_log.sources import open_source

__all__ = ["Folded", "Unreadable", "fold_all"]


class Folded(msgspec.Struct):
    """A sample that could be read."""

    name: str
    status: str
    problems: list[Problem]


class Unreadable(msgspec.Struct):
    """What could not be."""

    path: str
    what: str
    detail: str


def fold_all(log: Path, samples: int, seconds: float | None = None) -> Iterator[Folded | Unreadable]:
    """Yield each sample's problems, or why there are none to be had.

    `samples` is for the progress. After `seconds` the child is ended: damaged pages may lead in a circle.
    """
    yield from progress("samples", _fold_all(log, seconds), samples)


def _fold_all(log: Path, seconds: float | None) -> Iterator[Folded | Unreadable]:
    command = command_of("rollout_log.cli._folding:write_all", str(log))
    decode = msgspec.json.Decoder(tuple[str, str, list[Problem], str | None]).decode
    with (
        tempfile.TemporaryFile() as errors,
        subprocess.Popen(  # noqa: S603 - this very module, on a path that is passed as it is
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors
        ) as child,
    ):
        timer = threading.Timer(seconds or 0, child.kill)
        if seconds is not None:
            timer.start()
        name = None
        assert child.stdout is not None  # noqa: S101 - a pipe was asked for
        for line in child.stdout:
            try:
                name, status, problems, why = decode(line)
            except msgspec.DecodeError:  # the line in which the child died
                break
            if why is None:
                yield Folded(name, status, problems)
            else:
                yield Unreadable(str(log), f"sample {name}", why)
        child.stdout.close()
        code = child.wait()
        timer.cancel()
        if code == 0:
            return
        errors.seek(0)
        yield Unreadable(str(log), "samples", _death(code, name, errors.read()))


def _death(code: int, name: str | None, errors: bytes) -> str:
    after = "before the first sample" if name is None else f"after sample {name!r}"
    if code < 0:
        return f"the process that read them was killed by {signal.Signals(-code).name} {after}"
    last = errors.decode("utf-8", "replace").strip().rpartition("\n")[2]
    return f"the process that read them failed {after}: {last}"


def write_all(log: str) -> None:
    """What the child does."""
    try:
        _write_all(log)
    except RolloutLogError as error:
        sys.exit(str(error))


def _write_all(log: str) -> None:
    with open_source(log) as reader:
        for entry in reader.samples():
            try:
                rollout = reader.rollout(entry.ref)
                line = [entry.name, rollout.status, rollout.problems, None]
            except RolloutLogError as error:
                line = [entry.name, entry.summary.status, [], str(error)]
            print_json(line)
