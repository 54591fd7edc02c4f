"""Events on their way to disk: what waits for each sample, and what one commit takes of it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rollout_log.events import Body, Closed, Delta, Event, Marked, Opened, Requested, Responded, Tail
from rollout_log.log.block import pack_blocks
from rollout_log.log.environment import Row
from rollout_log.log.segment import BLOCKS, block_key, sample_rows, step_rows
from rollout_log.log.summary import Summary

__all__ = ["Part", "Sample", "summary_of", "weigh"]


class Sample:
    """The writer's view of one sample. Events `[durable, next)` are `taken + pending`."""

    __slots__ = ("durable", "next", "ordinal", "pending", "segment", "summary", "taken", "weight")

    def __init__(self, ordinal: int) -> None:
        self.ordinal = ordinal
        self.next = 0
        self.durable = 0
        self.taken: Sequence[Event] = ()
        """In the commit that is under way."""
        self.pending: list[Event] = []
        self.summary: Summary | None = None
        """To be written with the pending events."""
        self.weight = 0
        """Bytes of the pending events, roughly."""
        self.segment = 0
        """The segment that has the sample's row; 0 before its first commit."""

    def take(self) -> Part:
        """Move what is pending into a commit."""
        part = Part(self, self.next - len(self.pending), self.pending, self.summary, self.weight)
        self.taken, self.pending, self.summary, self.weight = self.pending, [], None, 0
        return part


class Part:
    """One sample's share of a commit."""

    __slots__ = ("events", "first", "sample", "summary", "weight")

    def __init__(
        self, sample: Sample, first: int, events: Sequence[Event], summary: Summary | None, weight: int
    ) -> None:
        self.sample = sample
        self.first = first
        self.events = events
        self.summary = summary
        self.weight = weight

    def rows(self, writer: bytes, known: Summary | None) -> list[Row]:
        """Return what to put. `known` is the summary to use where the part brings none, None to leave it."""
        ordinal = self.sample.ordinal
        rows: list[Row] = []
        if self.events:
            for first, data in pack_blocks(writer, ordinal, self.first, self.events):
                rows.append((BLOCKS, block_key(ordinal, first), data))
        summary = self.summary or known
        if summary is not None:
            rows += sample_rows(ordinal, summary)
        for step in _steps(self.events):
            rows += step_rows(ordinal, step)
        return rows


def summary_of(events: Iterable[Event]) -> Summary | None:
    """Return the summary that an `Opened` amounts to, where the caller gave none."""
    for event in events:
        if isinstance(event, Opened):
            return Summary(
                key=event.key,
                run=event.run,
                incarnation=event.incarnation,
                parent=event.parent,
                step=event.step,
                evaluation=event.evaluation,
                group_index=event.group_index,
                index=event.index,
                events=1,
                opened_unix_ns=event.opened_unix_ns,
                updated_unix_ns=event.opened_unix_ns,
                prompt_tokens=len(event.prompt_token_ids),
            )
    return None


def weigh(events: Iterable[Event]) -> int:
    """Return about how many bytes of memory events hold, without encoding them."""
    total = 0
    for event in events:
        if type(event) is Delta or isinstance(event, (Body, Tail)):
            total += 160 + len(event.data)
        elif isinstance(event, Requested):
            total += 1000 + len(event.body)
        elif isinstance(event, Responded):
            total += 1000
        elif isinstance(event, Opened):
            total += 1000 + 36 * len(event.prompt_token_ids) + _weight_of(event.metadata)
        elif isinstance(event, Closed):
            total += 500 + _weight_of(event.sample) + _weight_of(event.reward)
        elif isinstance(event, Marked):
            total += 200 + _weight_of(event.fields)
        else:
            lists = (getattr(event, name, None) for name in ("token_ids", "sizes", "times", "fields"))
            total += 200 + sum(36 * len(found) for found in lists if found is not None)
    return total


def _weight_of(value: object, depth: int = 3) -> int:
    if isinstance(value, (str, bytes)):
        return 60 + len(value)
    if isinstance(value, dict):
        return 200 + (
            sum(_weight_of(item, depth - 1) for item in value.values()) if depth else 60 * len(value)
        )
    if isinstance(value, (list, tuple)):
        plain = not depth or not value or isinstance(value[0], (int, float))
        return 60 + (36 * len(value) if plain else sum(_weight_of(item, depth - 1) for item in value))
    return 40


def _steps(events: Iterable[Event]) -> set[int]:
    found = {event.step for event in events if isinstance(event, (Opened, Requested, Closed))}
    return {step for step in found if step is not None}
