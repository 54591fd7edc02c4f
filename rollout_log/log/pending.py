"""Events on their way to disk: what waits of a sample, and the rows that a commit makes of it."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from rollout_log.events import Body, Closed, Delta, Event, Marked, Opened, Requested, Responded, Tail
from rollout_log.log.block import encode_blocks
from rollout_log.log.environment import Row
from rollout_log.log.segment import sample_rows, step_rows
from rollout_log.log.summary import Summary

__all__ = ["Part", "summary_of", "weigh"]


class Part(msgspec.Struct, gc=False):  # one a stream and commit: the garbage collector need not look
    """What waits of one sample, and then its share of a commit: events `[first, end)`."""

    ordinal: int
    first: int
    events: list[Event] = []
    summary: Summary | None = None
    """To be written with the events."""
    weight: int = 0
    """Bytes of the events, roughly."""
    segment: int = 0
    """The segment that has the sample's row so far; 0: none. Known once it is taken into a commit."""

    @property
    def end(self) -> int:
        """The number of the event that comes next."""
        return self.first + len(self.events)

    @property
    def opens(self) -> str | None:
        """The key of the sample that begins here."""
        return self.events[0].key if self.events and isinstance(self.events[0], Opened) else None

    def blocks(self) -> list[tuple[int, int, bytes]]:
        """Return the events as blocks: first sequence, number of events, payload."""
        return encode_blocks(self.first, self.events) if self.events else []

    def rows(self, known: Summary | None) -> list[Row]:
        """Return the rows that make the sample known, where they are new.

        `known` is the summary to use where the part brings none, None to leave it.
        """
        summary = self.summary or known
        rows = [] if summary is None else sample_rows(self.ordinal, summary)
        for step in _steps(self.events):
            rows += step_rows(self.ordinal, step)
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
    found = {  # nearly all events are Deltas
        event.step
        for event in events
        if type(event) is not Delta and isinstance(event, (Opened, Requested, Closed))
    }
    return {step for step in found if step is not None}
