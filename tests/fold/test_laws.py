"""What holds for every sequence of events: the laws that make the log append-only and retries safe."""

from __future__ import annotations

import itertools
from collections import Counter

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from rollout_log.events import (
    Body,
    Closed,
    Delta,
    Ended,
    Event,
    Marked,
    Observed,
    Opened,
    Reads,
    Requested,
    Responded,
    Tail,
    Unknown,
    Unrecorded,
    decode_events,
    encode_events,
)
from rollout_log.fold import Rollout, fold
from rollout_log.response import Settled
from rollout_log.view import view

numbers = st.integers(0, 3)
bases = st.integers(0, 6)
tokens = st.lists(st.integers(0, 99), max_size=4)
texts = st.sampled_from(["stop", "length", "abort", None, None, None])


@st.composite
def frames(draw: st.DrawFn) -> bytes:
    """Draw a data frame of the vLLM dialect, now and then one that is broken."""
    kind = draw(st.sampled_from(["tokens", "tokens", "tokens", "usage", "error", "done", "broken"]))
    if kind == "usage":
        return msgspec.json.encode({"choices": [], "usage": {"completion_tokens": draw(st.integers(0, 9))}})
    if kind == "error":
        return b'{"error": {"message": "boom", "code": 500}}'
    if kind == "done":
        return b"[DONE]"
    if kind == "broken":
        return draw(st.binary(max_size=8))
    ids = draw(tokens)
    logprobs = draw(st.lists(st.one_of(st.none(), st.just(-9999.0), st.floats(-9, 0)), max_size=len(ids)))
    choice = {
        "index": draw(st.integers(0, 1)),
        "token_ids": ids,
        "logprobs": {"content": [{"logprob": logprob} for logprob in logprobs]},
        "finish_reason": draw(texts),
    }
    if draw(st.booleans()):
        choice["weight_versions"] = [{"version": "9", "start": 0, "end": draw(bases)}]
    version, name = draw(st.sampled_from([None, "7", "8"])), draw(st.sampled_from([None, None, "r", "s"]))
    return msgspec.json.encode({"choices": [choice], "weight_version": version, "request_id": name})


def _requested(number: int, base: int, cause: str, n: int, version: str | None) -> Requested:
    body = msgspec.json.encode({"token_ids": [], "sampling_params": {"n": n, "logprobs": 1, "max_tokens": 9}})
    return Requested(number, base, cause, "vllm", "POST", "/x", body, weight_version=version)  # type: ignore[arg-type]


events = st.one_of(
    st.builds(Delta, numbers, frames(), st.integers(0, 99)),
    st.builds(Delta, numbers, frames(), st.integers(0, 99)),
    st.builds(Delta, numbers, frames(), st.integers(0, 99)),
    st.builds(
        _requested,
        numbers,
        bases,
        st.sampled_from(["first", "retry", "resume", "turn"]),
        st.integers(1, 2),
        st.sampled_from([None, "7"]),
    ),
    st.builds(Responded, numbers, st.sampled_from([200, 429, 500])),
    st.builds(Body, numbers, frames()),
    st.builds(Tail, numbers, st.binary(max_size=4)),
    st.builds(Reads, numbers, st.just([1, 2]), st.just([3, 4])),
    st.builds(Observed, bases, tokens),
    st.builds(Unrecorded, bases, tokens),
    st.builds(Ended, numbers, st.sampled_from(["eof", "cancelled", "reset", "timeout"])),
    st.builds(
        Closed, st.sampled_from([None, "completed"]), st.none(), st.one_of(st.none(), st.integers(0, 9))
    ),
    st.builds(Marked, st.sampled_from(["finish_inferred", "concurrent_request", "abort"])),
    st.builds(Unknown, st.integers(20, 30), st.just([1, "x"])),
)
histories = st.lists(events, max_size=24).map(
    lambda rest: [Opened(key="k", prompt_token_ids=[1, 2]), _requested(0, 0, "first", 1, "7"), *rest]
)


def seen(rollout: Rollout) -> bytes:
    """Return all that anyone can see of a rollout."""
    views = [view(rollout), *(view(rollout, choice=i) for i in sorted(rollout.choices))]
    return msgspec.json.encode([*views, rollout.discarded, rollout.unknown_events, rollout.requests])


@given(histories, st.data())
def test_folding_parts_one_after_the_other_equals_one_fold(history: list[Event], data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(history)), max_size=4)))
    numbered = list(enumerate(history))
    state: Rollout | None = None
    for start, end in zip([0, *cuts], [*cuts, len(history)], strict=True):
        before = seen(state) if state else b""
        newer = fold(numbered[start:end], state)
        assert state is None or seen(state) == before, "folding on must leave the state alone"
        state = newer
    assert state is not None
    assert seen(state) == seen(fold(numbered))


@given(histories, st.data())
def test_order_and_repetition_change_nothing(history: list[Event], data: st.DataObject) -> None:
    numbered = list(enumerate(history))
    repeated = numbered + data.draw(st.lists(st.sampled_from(numbered), max_size=10))
    assert seen(fold(data.draw(st.permutations(repeated)))) == seen(fold(numbered))


@given(histories)
def test_every_prefix_is_a_coherent_sample(history: list[Event]) -> None:
    rollout = Rollout()
    for event in history:
        rollout.apply(event)
        for choice in rollout.choices.values():
            length = len(choice.token_ids)
            assert len(choice.logprobs) == len(choice.loss_mask) == length
            assert [run.start for run in choice.runs] == [0, *(run.end for run in choice.runs)][
                : len(choice.runs)
            ]
            assert (choice.runs[-1].end if choice.runs else 0) == length
            spans = choice.weight_versions(rollout.dispatched)
            assert all(0 <= span.start < span.end <= length for span in spans)
            assert all(a.end <= b.start for a, b in itertools.pairwise(spans))
        assert rollout.status in ("pending", "completed", "truncated", "aborted", "failed")


@given(histories)
def test_what_is_written_reads_back_as_the_same_sample(history: list[Event]) -> None:
    again = decode_events(encode_events(history))
    assert again == history
    assert seen(fold(enumerate(again))) == seen(fold(enumerate(history)))


def _numbered(history: list[Event]) -> list[Event]:
    """Number the requests in order, as a recorder does."""
    numbers = itertools.count()
    return [
        msgspec.structs.replace(event, number=next(numbers)) if isinstance(event, Requested) else event
        for event in history
    ]


@given(histories.map(_numbered))
def test_what_was_settled_is_what_a_look_at_everything_finds(history: list[Event]) -> None:
    rollout = Rollout()
    for event in history:
        rollout.apply(event)
        assert rollout.count_problems() == Counter(problem.code for problem in rollout.problems)
        for choice in rollout.choices.values():
            afresh = msgspec.structs.replace(choice, settled=Settled())
            found = [one.problems(rollout.history.wanting, rollout.dispatched) for one in (choice, afresh)]
            assert Counter(found[0]) == Counter(found[1])
            spans = choice.weight_versions(rollout.dispatched)
            assert choice.versions(rollout.dispatched) == [
                version for version, _ in itertools.groupby(span.version for span in spans)
            ]
