"""Logs for tests, made of events as they are: no recorder, no clock."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from rollout_log.events import Event, Opened
from rollout_log.fold import Rollout, fold
from rollout_log.log import Log, LogReader
from rollout_log.record.summary import summarize
from rollout_log.view import SampleView, view


def store(path: Path, samples: Iterable[Sequence[Event]]) -> Path:
    """Write samples, in this order; what one continues has to come before it."""
    folded: dict[tuple[str, str, int], Rollout] = {}
    with Log.open(path) as log:
        for events in samples:
            opened = events[0]
            assert isinstance(opened, Opened)
            state = None
            if opened.continues is not None:
                older = folded.get((opened.run, opened.key, opened.continues[0]))
                state = older and Rollout.continue_from(older, opened.continues[1])
            rollout = fold(enumerate(events), state)
            folded[opened.run, opened.key, opened.incarnation] = rollout
            log.append(log.create(opened), 0, events, summarize(rollout))
        assert log.flush_sync()
    return path


def views(reader: LogReader) -> dict[tuple[str, str, int], list[SampleView]]:
    """Every sample by run, key and incarnation: as a whole, and each of its choices."""
    found = {}
    for entry in reader.samples():
        rollout: Rollout = reader.rollout(entry.ref)
        whole = view(rollout)
        whole.incarnation = entry.ref.incarnation
        choices = [view(rollout, choice=index) for index in sorted(rollout.choices)]
        found[entry.ref.run, entry.ref.key, entry.ref.incarnation] = [whole, *choices]
    return found
