"""Send recorded exchanges through the real client code again, and compare what comes of them.

    differences = await check_sample(reader, entry)

The client is `Recorder`, over a `ReplayTransport`, without a log. What does not come from an engine (who
cancelled, what the trainer made of it) is taken from the recording.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from typing import Any

import httpx
import msgspec

from rollout_log.engines.wire import object_in
from rollout_log.errors import RolloutLogError
from rollout_log.events import Closed, Ended, Event, Marked, Opened, Requested, Unrecorded
from rollout_log.fold import Rollout
from rollout_log.log import Entry, LogReader
from rollout_log.record import Recorder, recording
from rollout_log.record.call import Call
from rollout_log.record.errors import GenerationFailed, GenerationRefused
from rollout_log.record.live import LiveSample
from rollout_log.record.retry import Backoff
from rollout_log.record.samples import Samples
from rollout_log.replay.recording import RecordedExchange, read_exchanges
from rollout_log.replay.transport import ReplayTransport
from rollout_log.view import SampleView, view

__all__ = ["CannotCheck", "Difference", "OneSample", "check_sample", "differences", "first_place"]

_HOST = "http://recorded"
_OUR_MARKS = frozenset({"finish_inferred", "encoded_body"})
"""Marks that the client code makes by itself."""


class CannotCheck(RolloutLogError):
    """The client code would never have made such a request."""


class Difference(msgspec.Struct):
    """One field that came out differently."""

    sample: str
    field: str
    """As in `show --json`; `requests[1].tokens`, `token_ids[17]`."""
    recorded: Any
    replayed: Any


class OneSample:
    """A source of one sample of another."""

    def __init__(self, source: LogReader, entry: Entry) -> None:
        self._source = source
        self._entry = entry
        self.find, self.events, self.rollout = source.find, source.events, source.rollout

    def samples(self) -> Iterator[Entry]:
        yield self._entry


class _Only(Samples):
    """Every request belongs to one sample, as the recording says."""

    def __init__(self, sample: LiveSample) -> None:
        super().__init__(None)
        self._sample = sample

    def _place(self, *_: object, **__: object) -> LiveSample:
        return self._sample


async def check_sample(source: LogReader, entry: Entry) -> list[Difference]:
    """Return what differs, over the sample and its choices; nothing, where all is as recorded.

    Raises `CannotCheck` for requests that the client code does not make.
    """
    exchanges = read_exchanges(source, entry.ref, entry.name)
    events = [event for _, event in source.events(entry.ref)]
    _check_possible(entry.name, exchanges, events)
    recorded = source.rollout(entry.ref)
    older = source.continued(entry.ref)
    state = None if older is None else Rollout.continue_from(source.rollout(older[0]), older[1])
    replayed = await _replay(OneSample(source, entry), events, exchanges, state)
    found = list(differences(entry.name, _told(recorded), _told(replayed)))
    if len(recorded.choices) > 1 and recorded.choices.keys() == replayed.choices.keys():
        for index, choice in recorded.choices.items():
            if not (choice.token_ids or replayed.choices[index].token_ids):
                continue  # a refused request may have asked for thousands
            shown = (_told(rollout, choice=index) for rollout in (recorded, replayed))
            found += differences(f"{entry.name}#{index}", *shown)
    return found


def differences(name: str, recorded: SampleView, replayed: SampleView) -> Iterator[Difference]:
    """Yield the fields in which two views of a sample differ; of a list, the first place."""
    ours, theirs = msgspec.to_builtins(recorded), msgspec.to_builtins(replayed)
    for field in ours:
        if ours[field] != theirs[field]:
            path, before, after = first_place(field, ours[field], theirs[field])
            yield Difference(name, path, before, after)


async def _replay(
    source: OneSample, events: list[Event], exchanges: list[RecordedExchange], state: Rollout | None
) -> Rollout:
    opened = events[0]
    assert isinstance(opened, Opened)  # noqa: S101 - or `read_exchanges` had found no exchange
    sample = LiveSample(opened, None, state)
    sample.open()
    by_number = {each.number: each for each in exchanges}
    ended = {event.number for event in events if isinstance(event, Ended)}
    async with httpx.AsyncClient(transport=ReplayTransport(source), trust_env=False) as client:
        for event in events[1:]:
            if isinstance(event, Requested):
                await _send(client, sample, by_number[event.number], is_open=event.number not in ended)
            elif isinstance(event, Closed) or (isinstance(event, Marked) and not _is_told(event, sample)):
                sample.rollout.apply(event)
    return sample.rollout


async def _send(
    client: httpx.AsyncClient, sample: LiveSample, exchange: RecordedExchange, *, is_open: bool
) -> None:
    """Make one recorded request as the recorder makes it, and leave where the recorded client left.

    `is_open`: the recording stops in mid-response, and so does the sample then.
    """
    requested = exchange.requested
    recorder = Recorder(None, client, backoff=Backoff(tries=0), samples=_Only(sample))
    call = Call(
        key=sample.key,
        url=_HOST + requested.path,
        body=object_in(exchange.body),
        base=requested.base,
        cause=requested.cause,
        weight_version=requested.weight_version,
        opened=msgspec.structs.replace(sample.opened, step=requested.step),
    )
    with recording(sample.key):  # so that the transport need not guess whose request it is
        task = asyncio.ensure_future(recorder.run(call))
    transport = client._transport
    assert isinstance(transport, ReplayTransport)  # noqa: S101 - `_replay` made it
    so_far = None
    while not task.done():
        if any(playback.held for playback in transport.desk.playing):
            if sample.exchange is not None:
                sample.exchange.take()
            so_far = sample.rollout.copy()
            task.cancel()
        await asyncio.wait([task], timeout=0.001)
    if is_open and so_far is not None:
        sample.rollout = so_far
    error = None if task.cancelled() else task.exception()
    if error is not None and not isinstance(error, (GenerationFailed, GenerationRefused)):
        raise error


def _check_possible(name: str, exchanges: Iterable[RecordedExchange], events: Iterable[Event]) -> None:
    if any(isinstance(event, Unrecorded) for event in events):
        raise CannotCheck(f"{name!r}: some of its tokens came while recording was off")
    for exchange in exchanges:
        if exchange.dialect is None or exchange.requested.method != "POST":
            raise CannotCheck(f"{exchange.name}: {exchange.requested.path} is no path an engine generates on")
        if not object_in(exchange.body):
            raise CannotCheck(f"{exchange.name}: its body is no JSON object")


def _is_told(mark: Marked, sample: LiveSample) -> bool:
    """Whether the client code has written this mark by itself."""
    return mark.name in _OUR_MARKS and any(mine.name == mark.name for mine in sample.rollout.marks)


def _told(rollout: Rollout, choice: int | None = None) -> SampleView:
    """Return the view without what only the recording process could say: why it left, or lost patience."""
    shown = view(rollout, choice=choice)
    for request in shown.requests:
        if request.ended in ("cancelled", "timeout", "reset"):
            request.detail = None
    return shown


def first_place(path: str, before: Any, after: Any) -> tuple[str, Any, Any]:
    """Go down to the first place that differs."""
    if isinstance(before, dict) and isinstance(after, dict) and before.keys() == after.keys():
        name = next(name for name in before if before[name] != after[name])
        return first_place(f"{path}.{name}", before[name], after[name])
    if isinstance(before, list) and isinstance(after, list):
        place = next(
            (at for at, pair in enumerate(zip(before, after, strict=False)) if pair[0] != pair[1]),
            min(len(before), len(after)),
        )
        left = before[place] if place < len(before) else None
        right = after[place] if place < len(after) else None
        return first_place(f"{path}[{place}]", left, right)
    return path, before, after
