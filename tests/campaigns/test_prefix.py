"""Every prefix is a sample: of each fixture's events, and of each stream's bytes; and goes on to the whole.

For the bytes of captures see `record/test_captures.py`. The short form takes a few cuts of every sample; the
long form all of them.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Container, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

import captures
from record.test_captures import body_of
from replay.test_anywhere import drive
from rollout_log.events import Ended, Event, Requested, decode_events, encode_events
from rollout_log.fold import Rollout, fold
from rollout_log.log import Entry
from rollout_log.record.continuation import request_from
from rollout_log.record.samples import Samples
from rollout_log.record.summary import summarize
from rollout_log.replay.asking import Asked
from rollout_log.replay.checking import OneSample
from rollout_log.replay.desk import Desk
from rollout_log.replay.recording import RecordedExchange, read_exchanges
from rollout_log.response import Origin
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

        def append(self, sample: int, first: int, given: Iterable[Event], *_: object) -> bool:
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


def exchanges_of(path: Path) -> Iterator[tuple[OneSample, Entry, list[RecordedExchange]]]:
    reader = open_source(path)
    for entry in reader.samples():
        alone = OneSample(reader, entry)
        yield alone, entry, read_exchanges(alone, entry.ref, entry.name)


def check_bytes(exchange: RecordedExchange, cuts: Container[int]) -> int:
    """Feed a response byte by byte; wherever a frame ends or a cut is, it is a sample that only grew."""
    exchanging = Samples(None).request("k", path=exchange.requested.path, body=exchange.body)
    exchanging.respond(exchange.status or 200, exchange.headers)
    rollout, checked, before = exchanging.rollout, 0, -1
    for at in range(len(exchange.response) + 1):
        if rollout.events != before or at in cuts:
            check(rollout)
            cut = rollout.copy()
            cut.apply(Ended(exchange.number, "reset"))
            check(cut)
            before = rollout.events
        checked += 1
        exchanging.feed(exchange.response[at : at + 1])
    exchanging.end("eof")
    assert exchanging.broken is None
    tokens = [token for frame in exchange.decoded for delta in frame.choices for token in delta.token_ids]
    assert rollout.requests[0].tokens == len(tokens)
    return checked


def run_bytes(path: Path, most: int | None) -> None:
    checked = 0
    for _, _, exchanges in exchanges_of(path):
        for exchange in exchanges[:most]:
            if exchange.status is not None:
                checked += check_bytes(exchange, () if most else range(0, len(exchange.response), 97))
    print(f"{path.name}: {checked} byte prefixes")
    assert checked > 0


def is_deterministic(truth: Rollout) -> bool:
    """Whether replay has one answer to going on: one choice, nothing from the environment, to the end."""
    runs = truth.choice_or_first().runs
    return (
        truth.n == 1
        and truth.status in {"completed", "truncated"}
        and all(run.origin is Origin.GENERATED for run in runs)
    )


def go_on_after(alone: OneSample, truth: Rollout, first: RecordedExchange, cut: int) -> Rollout | None:
    """Leave the first response once `cut` bytes have come, and go on until it is finished."""
    assert first.dialect is not None
    desk, samples = Desk(alone), Samples(None)
    asked: dict[str, Any] | None = json.loads(first.body)
    path, cut_at = first.requested.path, cut
    while asked is not None:
        playback = desk.take(Asked.of("POST", path, json.dumps(asked).encode()))
        exchange = samples.request("k", path=path, body=json.dumps(asked).encode())
        exchange.respond(playback.script.status or 200, playback.script.headers)
        got = drive(playback, cut_at or None, abort=cut_at is None)
        exchange.feed(got)
        exchange.end("eof" if cut_at is None else "reset")
        desk.leave(playback)
        rollout, cut_at = exchange.rollout, None
        if rollout.status in {"completed", "truncated"}:
            return rollout
        kept = rollout.choice().token_ids
        asked = request_from(first.dialect.name, json.loads(first.body), truth.prompt_token_ids, kept)
    return None


def run_resumes(path: Path, most: int | None) -> None:
    """Whatever was kept of the first response: going on from it gives the tokens that were recorded."""
    resumed = 0
    for seed, (alone, entry, exchanges) in enumerate(exchanges_of(path)):
        truth, first = alone.rollout(entry.ref), exchanges[0]
        if not is_deterministic(truth) or first.dialect is None or first.info.token_ids is None:
            continue
        ends = list(itertools.accumulate(len(frame.wire) for frame in first.frames))
        cuts = [1, *ends[:-1]]
        for cut in cuts if most is None else random.Random(seed).sample(cuts, min(most, len(cuts))):
            rollout = go_on_after(alone, truth, first, cut)
            assert rollout is not None, (entry.name, cut)
            assert rollout.choice().token_ids == truth.choice().token_ids, (entry.name, cut)
            assert rollout.status == truth.status
            assert not [each for each in rollout.problems if each.severity == "error"]
            resumed += 1
    print(f"{path.name}: {resumed} resumes")


@pytest.mark.parametrize("path", FIXTURES, ids=lambda path: path.name)
def test_some_byte_prefixes_and_resumes_of_a_fixture(path):
    run_bytes(path, 1)
    run_resumes(path, 2)


@pytest.mark.campaign
@pytest.mark.parametrize("path", FIXTURES, ids=lambda path: path.name)
def test_every_byte_prefix_of_a_fixture(path):
    run_bytes(path, None)


@pytest.mark.campaign
@pytest.mark.parametrize("path", FIXTURES, ids=lambda path: path.name)
def test_a_resume_from_every_frame_of_a_fixture(path):
    run_resumes(path, None)
