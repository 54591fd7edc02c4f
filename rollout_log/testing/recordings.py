"""The fixture file of a test module, and what in it belongs to one test.

A sample that a test recorded carries the test's name (`metadata["test"]`, and as its run). Samples without
one, exported from a log, belong to every test.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from msgspec.structs import replace

from rollout_log.events import Event, Marked, Opened
from rollout_log.fixture import FixtureReader, write_fixture
from rollout_log.fixture.lines import decode_line, encode_line
from rollout_log.sources import open_source
from rollout_log.undated import EPOCH_NS

__all__ = ["Recordings"]

_MADE_UP = re.compile(r"(?P<key>[0-9a-f]{16})(?P<child>(~\d+)*)")
"""A key that the recorder made for a request without one: another each time."""


class Recordings:
    """What one test may replay, and where what it records goes."""

    def __init__(self, path: Path, test: str) -> None:
        self.path = path
        self.test = test

    def load(self) -> FixtureReader:
        """Read the test's samples; none where there is no file."""
        ours = (None, self.test)
        return FixtureReader(self.path, [events for events in self._all() if _test_of(events) in ours])

    def save(self, samples: Iterable[list[Event]], *, instead: bool) -> None:
        """Add samples to the file under the test's name, or put them in place of those it has."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with _locked(self.path.parent):
            kept = [events for events in self._all() if not (instead and _test_of(events) == self.test)]
            taken = sum(_test_of(events) == self.test for events in kept)
            reader = FixtureReader(self.path, [*kept, *self._named(samples, taken)])
            write_fixture(reader, reader.samples(), self.path)

    def _all(self) -> list[list[Event]]:
        if not self.path.exists():
            return []
        with open_source(self.path) as reader:
            return [[event for _, event in reader.events(entry.ref)] for entry in reader.samples()]

    def _named(self, samples: Iterable[list[Event]], taken: int) -> Iterator[list[Event]]:
        """Give samples the test's name, keys that stay the same, and the time of fixtures."""
        names: dict[str, str] = {}
        for events in samples:
            opened = events[0]
            assert isinstance(opened, Opened)  # noqa: S101 - the first event of a sample
            began = opened.opened_unix_ns or EPOCH_NS
            placed = [decode_line(encode_line(event, began)) for event in events]
            head = placed[0]
            assert isinstance(head, Opened)  # noqa: S101 - the same
            made_up = _MADE_UP.fullmatch(opened.key)
            if made_up and made_up["key"] not in names:
                names[made_up["key"]] = f"{self.test}-{taken + len(names) + 1}"
            placed[0] = replace(
                head,
                run=self.test,
                key=_renamed(opened.key, names),
                parent=opened.parent and _renamed(opened.parent, names),
                metadata={**opened.metadata, "test": self.test},
            )
            yield [_with_child(event, names) for event in placed]


def _test_of(events: list[Event]) -> str | None:
    opened = events[0]
    test = opened.metadata.get("test") if isinstance(opened, Opened) else None
    return test if isinstance(test, str) else None


def _renamed(key: str, names: dict[str, str]) -> str:
    made_up = _MADE_UP.fullmatch(key)
    return names[made_up["key"]] + made_up["child"] if made_up and made_up["key"] in names else key


def _with_child(event: Event, names: dict[str, str]) -> Event:
    if isinstance(event, Marked) and isinstance(child := event.fields.get("child"), str):
        return replace(event, fields={**event.fields, "child": _renamed(child, names)})
    return event


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Keep other processes of the test run from the folder's files."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
