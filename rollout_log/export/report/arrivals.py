"""When each token came: a fold that is watched as it goes."""

from __future__ import annotations

from collections import Counter

from rollout_log.events import Delta, Event, Observed, Requested, Unrecorded
from rollout_log.fold import Rollout
from rollout_log.log import LogReader, Ref

__all__ = ["TICK_NS", "Followed", "follow"]

TICK_NS = 10_000_000
"""What arrivals are counted by: 10 ms."""


class Followed:
    """A sample, and when its tokens came."""

    def __init__(self, rollout: Rollout) -> None:
        self.rollout = rollout
        self.times: dict[int, list[int | None]] = {
            index: [None] * len(choice.token_ids) for index, choice in rollout.choices.items()
        }
        """By choice, for each token its arrival in ns since 1970; None where it did not come by a frame."""
        self.ticks: Counter[int] = Counter()
        """Tokens that came, kept or not, by ticks since 1970."""
        self.asked: bytes | None = None
        """Body of the first request."""

    def cut(self, base: int) -> None:
        """Forget the times of tokens from `base` on."""
        for times in self.times.values():
            del times[base:]

    def extend(self, now_ns: int | None) -> None:
        """Whatever tokens have no time yet came now."""
        for index, choice in self.rollout.choices.items():
            times = self.times.setdefault(index, [])
            del times[len(choice.token_ids) :]
            count = len(choice.token_ids) - len(times)
            if count:
                times += [now_ns] * count
                if now_ns is not None:
                    self.ticks[now_ns // TICK_NS] += count


def follow(reader: LogReader, ref: Ref) -> Followed:
    """Fold a sample as `LogReader.rollout` does. Raises `LogDamaged`."""
    older = reader.continued(ref)
    followed = Followed(
        Rollout() if older is None else Rollout.continue_from(reader.rollout(older[0]), older[1])
    )
    rollout = followed.rollout
    for number, event in reader.events(ref):
        if number > rollout.events:
            rollout.skip_to(number)
        if isinstance(event, (Requested, Observed, Unrecorded)):
            followed.cut(event.base)
        if followed.asked is None and isinstance(event, Requested):
            followed.asked = event.body
        rollout.apply(event)
        followed.extend(_arrival_ns(rollout, event))
    return followed


def _arrival_ns(rollout: Rollout, event: Event) -> int | None:
    sent_ns = rollout.request.sent_unix_ns if rollout.request is not None else 0
    return sent_ns + 1000 * event.time if isinstance(event, Delta) and sent_ns else None
