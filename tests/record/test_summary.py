"""What a sample's line says, and that keeping it up does not cost more with every turn."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from recorded import PATH, frame
from rollout_log.events import Delta, Ended, Observed, Opened, Requested
from rollout_log.fold import Rollout
from rollout_log.record.summary import summarize

BODY = b'{"token_ids": [], "sampling_params": {"logprobs": 1}}'
TOKENS = 20


class Watched(list[Any]):
    """A list that counts what is read of it, all lists together."""

    read = 0

    def __iter__(self) -> Iterator[Any]:
        for item in super().__iter__():
            Watched.read += 1
            yield item

    def __reversed__(self) -> Iterator[Any]:
        for item in super().__reversed__():
            Watched.read += 1
            yield item

    def __getitem__(self, place: Any) -> Any:
        found = super().__getitem__(place)
        Watched.read += len(found) if isinstance(place, slice) else 1
        return found


def turn(rollout: Rollout, number: int) -> None:
    """One turn: a token of the environment, and 20 of the model, with every other log-prob missing."""
    if number:
        rollout.apply(Observed(rollout.length, [7]))
    rollout.apply(Requested(number, rollout.length, "turn", "vllm", "POST", PATH, BODY, weight_version="3"))
    for place in range(TOKENS):
        finish = "stop" if place == TOKENS - 1 else None
        rollout.apply(Delta(number, frame(place, logprob=-0.5 if place % 2 else None, finish=finish)[6:-2]))
    rollout.apply(Ended(number, "eof"))


def watch(rollout: Rollout) -> None:
    choice = rollout.choice()
    for name in ("token_ids", "logprobs", "runs", "told", "absent"):
        setattr(choice, name, Watched(getattr(choice, name)))
    rollout.requests = Watched(rollout.requests)


def test_a_summary_of_many_turns_looks_at_the_last_one_alone():
    rollout = Rollout()
    rollout.apply(Opened("k"))
    turn(rollout, 0)
    watch(rollout)
    work = []
    for number in range(1, 60):
        turn(rollout, number)
        Watched.read = 0
        summary = summarize(rollout)
        work.append(Watched.read)
        assert summary.requests == number + 1
    assert len(set(work)) == 1, "as much for the sixtieth turn as for the second"
    assert 0 < work[0] < 4 * TOKENS


def test_a_summary_says_what_a_look_at_everything_finds():
    rollout = Rollout()
    rollout.apply(Opened("k"))
    for number in range(10):
        turn(rollout, number)
    summary = summarize(rollout)
    assert summary.problems == Counter(problem.code for problem in rollout.problems)
    assert summary.problems == {"null_logprob": 10, "version_assumed": 10}
    assert summary.versions == ["3"]
    assert summary.bytes == sum(request.bytes for request in rollout.requests) > 0
