"""Every prefix is a sample: of each fixture's events, and of each stream's bytes (`record/test_captures.py`).

The short form takes a few cuts of every sample; the long form all of them.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable
from pathlib import Path

import pytest

import captures
from record.test_captures import body_of
from rollout_log.events import Event, Requested, decode_events, encode_events
from rollout_log.fold import Rollout, fold
from rollout_log.record.samples import Samples
from rollout_log.record.summary import summarize
from rollout_log.sources import open_source
from rollout_log.view import view

FIXTURES = sorted((Path(__file__).parent.parent.parent / "fixtures").rglob("*.jsonl*"))
STATUSES = {"pending", "completed", "truncated", "aborted", "failed"}


def captured(name: str) -> list[Event]:
    """Record a capture without a network, and keep what it writes."""
    capture, events = captures.load(name), []

    class Listening:
        run = "r"

        def create(self, opened: Event) -> int:
            return 0

        def append(self, sample: int, first: int, given: Iterable[Event], summary: object = None) -> bool:
            events.extend(given)
            return True

    exchange = Samples(Listening()).request("k", path=capture.request["path"], body=body_of(capture))  # type: ignore[arg-type]
    exchange.respond(capture.status or 200, capture.headers)
    for start in range(0, len(capture.body), 700):
        exchange.feed(capture.body[start : start + 700])
    exchange.end("eof" if capture.ended == "eof" else "reset")
    return events


def check(rollout: Rollout) -> None:
    """A rollout that a trainer could take: every list as long as the others, spans within."""
    assert rollout.status in STATUSES
    for choice in rollout.choices.values():
        length = len(choice.token_ids)
        assert len(choice.logprobs) == len(choice.loss_mask) == length
        assert [run.end for run in choice.runs[:-1]] == [run.start for run in choice.runs[1:]]
        assert (choice.runs[-1].end if choice.runs else 0) == length
        spans = choice.weight_versions(rollout.dispatched)
        assert all(0 <= span.start < span.end <= length for span in spans)
        assert all(a.end <= b.start for a, b in itertools.pairwise(spans))
    assert view(rollout).status == rollout.status
    assert summarize(rollout).events == rollout.events


def check_prefixes(events: list[Event], older: Rollout | None, cuts: set[int]) -> int:
    """Fold prefix after prefix; each grows the response, except where a request truncates it."""
    checked, length = 0, 0
    live = older.copy() if older is not None else Rollout()
    for number, event in enumerate(events, 1):
        live.apply(event)
        assert live.length >= min(length, event.base if isinstance(event, Requested) else length) or type(
            event
        ).__name__ in {"Observed", "Unrecorded"}
        length = live.length
        if number in cuts:
            prefix = decode_events(encode_events(events[:number]))
            again = fold(enumerate(prefix), older)
            check(again)
            assert view(again) == view(live), "what is read back is what was live"
            checked += 1
    return checked


def cuts_of(events: list[Event], seed: int, most: int | None) -> set[int]:
    every = range(1, len(events) + 1)
    return set(every if most is None else random.Random(seed).sample(every, min(most, len(every))))


def run_fixture(path: Path, most: int | None) -> None:
    reader = open_source(path)
    checked = 0
    for seed, entry in enumerate(reader.samples()):
        continued = reader.continued(entry.ref)
        older = None
        if continued is not None:
            older = Rollout.continue_from(reader.rollout(continued[0]), continued[1])
        events = [event for _, event in reader.events(entry.ref)]
        checked += check_prefixes(events, older, cuts_of(events, seed, most))
    print(f"{path.name}: {checked} prefixes")
    assert checked > 0


def run_capture(name: str, most: int | None) -> None:
    events = captured(name)
    checked = check_prefixes(events, None, cuts_of(events, 1, most))
    print(f"{name}: {checked} prefixes")
    assert checked > 0


@pytest.mark.parametrize("path", FIXTURES, ids=lambda path: path.name)
def test_some_prefixes_of_a_fixture(path):
    run_fixture(path, 3)


def test_some_prefixes_of_every_capture():
    for name in captures.names():
        run_capture(name, 3)


@pytest.mark.campaign
@pytest.mark.parametrize("path", FIXTURES, ids=lambda path: path.name)
def test_every_prefix_of_a_fixture(path):
    run_fixture(path, None)


@pytest.mark.campaign
@pytest.mark.parametrize("name", captures.names())
def test_every_prefix_of_a_capture(name):
    run_capture(name, None)
