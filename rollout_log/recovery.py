"""From a damaged log to a new one: whatever is intact, with a note wherever something is missing.

A gap in a sample's events becomes a mark, `events_lost`, and an `Unrecorded` without tokens, which the
fold takes for what it is: a `log_gap`, from which nothing may be trained on as if it were whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec

from rollout_log.errors import RecordingFailed, RolloutLogError
from rollout_log.events import Event, Marked, Opened, Unrecorded
from rollout_log.fold import Rollout
from rollout_log.log import Log
from rollout_log.log.directory import check_outside
from rollout_log.log.salvage import Salvage, Salvaged
from rollout_log.record.summary import summarize
from rollout_log.response import Origin
from rollout_log.times import sample_span_ns

__all__ = ["Recovery", "recover"]

_EVENTS_AT_ONCE = 1000
_NO_CAP = 1 << 62


class Recovery(msgspec.Struct):
    """What was recovered, and what is known to be lost."""

    files: int = 0
    bytes: int = 0
    """Of the files that were read."""
    unreadable_bytes: int = 0
    """That the disk did not give."""
    broken: int = 0
    """Batches and chunks that fail their checksum, and of which there is no whole copy either."""
    damaged_bytes: int = 0
    """Of the batches, and what of sealed files is in no whole chunk. How much was in there is not known."""
    cut_files: int = 0
    """Sealed files that were cut: they lack their end. How much there was behind the cut is not known."""
    samples: int = 0
    """Written to the new log."""
    events: int = 0
    """Of theirs, as they were."""
    damaged_samples: int = 0
    """Of those written, the ones that lost events."""
    nameless_samples: int = 0
    """Of those, the ones that lost their key; they are named after their writer and ordinal."""
    lost_events: int = 0
    """Known to be missing, by gaps in the numbers; at the end of a sample it cannot be told."""
    lost_samples: int = 0
    """Of which nothing is left but their summary."""


def recover(log: Path, new: Path, found: Recovery) -> Iterator[None]:
    """Salvage a log into a new one, counting into `found`. Yields now and then, for progress.

    Raises `RolloutLogError` where `new` exists, `LogNotFound` and `NotALog` where there is nothing to
    salvage or `new` is inside a log, `RecordingFailed` where the new log cannot be written.
    """
    if new.exists():
        raise RolloutLogError(f"{new} exists; recover into a new directory")
    check_outside(new)  # before the log is read
    salvage = Salvage(log)
    found.files = len(salvage.files)
    found.bytes = sum(path.stat().st_size for path in salvage.files)
    yield from salvage.scan()
    with Log.open(new, run=log.absolute().name, max_bytes=_NO_CAP) as writer:
        for sample in salvage.samples():
            _write(writer, sample, found)
            yield
    found.broken, found.damaged_bytes = salvage.broken, salvage.damaged
    found.cut_files, found.unreadable_bytes = salvage.cut, salvage.unreadable


def _write(log: Log, sample: Salvaged, found: Recovery) -> None:
    rollout = Rollout()
    ordinal: int | None = None
    written = expected = lost = 0
    waiting: list[Event] = []

    def hand_over() -> None:
        nonlocal written
        assert ordinal is not None  # noqa: S101 - the first event makes it
        summary = summarize(rollout)
        summary.updated_unix_ns = sample_span_ns(rollout)[1]
        accepted = log.append(ordinal, written, waiting, summary)
        if not (accepted and log.flush_sync(ordinal)):
            raise RecordingFailed(f"cannot write to {log.path}; is the disk full?")
        written += len(waiting)
        waiting.clear()

    for number, event in sample.events:
        if ordinal is None:
            opened = event if isinstance(event, Opened) else _stand_in(sample)
            found.nameless_samples += opened is not event and sample.summary is None
            ordinal, rollout = log.create(opened), _begin(opened)
            if opened is not event:
                waiting.append(opened)
                rollout.apply(opened)
        if number > expected:
            lost += number - expected
            for note in _gap(expected, number, rollout):
                waiting.append(note)
                rollout.apply(note)
        waiting.append(event)
        rollout.apply(event)
        expected = number + 1
        found.events += 1
        if len(waiting) >= _EVENTS_AT_ONCE:
            hand_over()
    if ordinal is None:
        found.lost_samples += 1
        return
    hand_over()
    found.samples += 1
    found.lost_events += lost
    found.damaged_samples += lost > 0


def _begin(opened: Opened) -> Rollout:
    """Return what the sample starts from. The tokens of an older life stand in for themselves."""
    if opened.continues is None:
        return Rollout()
    length = opened.continues[1]
    older = Rollout()
    older.choice().extend([0] * length, None, Origin.OBSERVED, None)
    return Rollout.continue_from(older, length)


def _gap(first: int, end: int, rollout: Rollout) -> list[Event]:
    longest = max(len(choice.token_ids) for choice in rollout.choices.values())
    return [Marked("events_lost", {"first": first, "count": end - first}), Unrecorded(longest, [])]


def _stand_in(sample: Salvaged) -> Opened:
    """Return a first event for a sample that lost its own."""
    summary = sample.summary
    metadata = {"recovered": "the first event was lost"}
    if summary is None:
        return Opened(key=f"{sample.folder}/{sample.ordinal}", metadata=metadata)
    return Opened(
        key=summary.key,
        run=summary.run,
        incarnation=summary.incarnation,
        parent=summary.parent,
        opened_unix_ns=summary.opened_unix_ns,
        step=summary.step,
        evaluation=summary.evaluation,
        group_index=summary.group_index,
        index=summary.index,
        metadata=metadata,
    )
