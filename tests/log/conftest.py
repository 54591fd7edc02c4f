"""What the tests of the log share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rollout_log.events import Delta, Event, Opened
from rollout_log.log import Log, LogReader

Read = Callable[[str], list[Event]]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "log"


@pytest.fixture
def log(path: Path) -> Iterator[Log]:
    """A log whose window never ends by itself: what is on disk was asked for."""
    log = Log.open(path, window_ms=3_600_000)
    yield log
    log.close()


@pytest.fixture
def read(path: Path) -> Read:
    """Reads a sample's events with a reader of its own, and checks their numbers."""

    def read(name: str) -> list[Event]:
        with LogReader.open(path) as reader:
            numbered = list(reader.events(reader.find(name)))
        assert [number for number, _ in numbered] == list(range(len(numbered)))
        return [event for _, event in numbered]

    return read


@pytest.fixture
def begin() -> Callable[..., int]:
    """Creates a sample and appends its `Opened`."""

    def begin(log: Log, key: str, **fields: object) -> int:
        opened = Opened(key=key, **fields)  # type: ignore[arg-type]
        sample = log.create(opened)
        assert log.append(sample, 0, [opened])
        return sample

    return begin


@pytest.fixture
def deltas() -> Callable[[int, int], list[Event]]:
    """Makes deltas `[first, end)`, each with its number as data."""
    return lambda first, end: [Delta(0, b'{"n": %d}' % number, time=number) for number in range(first, end)]
