"""Folding a sealed sample from its columns equals folding its frames, whatever was streamed."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import captures
import cases
from fold.test_laws import events as odd_events
from fold.test_laws import histories
from rollout_log.events import Delta, Ended, Event, Opened, Reads, Requested, encode_events
from rollout_log.fold import Rollout, fold
from rollout_log.log import group_reader
from rollout_log.log.group import Run, pack_group, split_events
from rollout_log.log.group_reader import GroupReader
from rollout_log.record.samples import Samples
from rollout_log.sse import FrameSplitter

PATHS = {"vllm": "/inference/v1/generate", "sglang": "/generate", "openai": "/v1/completions"}


def all_of(rollout: Rollout) -> str:
    """Everything there is in a rollout, integers and floats told apart."""
    return repr({name: value for name, value in vars(rollout).items() if name != "_dialect"})


def sealed(samples: Sequence[Sequence[Event]], cuts: Iterable[int] = ()) -> list[GroupReader]:
    """Return all samples sealed, in several chunks where they are cut."""
    inner = sorted({cut for cut in cuts if 0 < cut < max(map(len, samples))})
    chunks = []
    for start, end in pairwise([0, *inner, max(map(len, samples))]):
        parts = [(ordinal, events[start:end]) for ordinal, events in enumerate(samples)]
        runs = [Run(ordinal, start, split_events(encode_events(part))) for ordinal, part in parts if part]
        chunks.append(GroupReader(pack_group(runs)))
    return chunks


def fold_sealed(chunks: Iterable[GroupReader], ordinal: int) -> tuple[Rollout, int]:
    """Fold one sample, as a reader of the log does; also count the Deltas that were not rendered."""
    rollout, unrendered = Rollout(), 0
    for chunk in chunks:
        for place, (owner, first, _) in enumerate(chunk.places):
            if owner != ordinal:
                continue
            assert first == rollout.events
            for part in chunk.parts(place):
                rollout.apply_piece(rollout.events, part)
                if not isinstance(part, list):
                    unrendered += sum(found.count for found in part.parts() if found.frames is not None)
    return rollout, unrendered


@pytest.fixture(autouse=True)
def nothing_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short samples are read as long ones are."""
    monkeypatch.setattr(group_reader, "_SHORT", 0)


def assert_same(samples: Sequence[Sequence[Event]], cuts: Iterable[int] = ()) -> None:
    chunks = sealed(samples, cuts)
    for ordinal, events in enumerate(samples):
        assert all_of(fold_sealed(chunks, ordinal)[0]) == all_of(fold(enumerate(events)))


def requested(dialect: str, number: int = 0, base: int = 0) -> Requested:
    body = {"sampling_params": {"n": 1, "logprobs": 1}, "return_logprob": True, "logprobs": 1}
    return Requested(number, base, "first", dialect, "POST", PATHS[dialect], json.dumps(body).encode())


# Real streams


def recorded(path: str, body: Any, response: bytes) -> list[Event]:
    """Return the events of one recorded stream."""
    samples = Samples(None)
    exchange = samples.request("k", path=path, body=json.dumps(body).encode())
    begun = exchange.rollout.requests[0]
    frames = FrameSplitter().feed(response)
    assert exchange.rollout.opened is not None
    return [
        exchange.rollout.opened,
        Requested(0, 0, "first", begun.dialect, "POST", path, json.dumps(body).encode()),
        *(Delta(0, frame.data, 100 * place, frame.raw) for place, frame in enumerate(frames)),
        Reads(0, [len(response)], [7]),
        Ended(0, "eof", None, 10**6),
    ]


@cache
def real_streams() -> dict[str, list[Event]]:
    found = {}
    for name in captures.names():
        capture = captures.load(name)
        if capture.is_sse:
            found[name] = recorded(capture.request["path"], capture.request.get("body"), capture.body)
    for name in cases.names():
        case = cases.load(name)
        for place, request in enumerate(case.requests):
            found[f"{name} {place}"] = recorded(case.path, request["body"], case.streams()[place])
    return found


@pytest.mark.parametrize("name", real_streams())
def test_a_real_stream(name: str) -> None:
    events = real_streams()[name]
    assert_same([events])
    assert_same([events, events[: len(events) // 2], events], cuts=(3, 20, len(events) - 4))


def test_real_streams_share_their_chunks() -> None:
    assert_same([events for events in real_streams().values() if len(events) < 200])


def test_a_long_stream_is_hardly_rendered() -> None:
    events = real_streams()["n1-long-4096"]
    _, unrendered = fold_sealed(sealed([events]), 0)
    assert unrendered == 4095  # all but the finish, the usage and `[DONE]`


# Streams like them


ids = st.integers(0, 200_000) | st.sampled_from([0, 2**31, 2**62, -1, 2**63, 17.0, None, "5"])
logprobs = st.floats(-20, 0, width=32) | st.sampled_from([0.0, -0.0, 0, -1, -9999.0, None, 1e-7, 1e300, "x"])
plain_ids = st.integers(0, 200_000)
plain_logprobs = st.floats(-20, 0, width=32)
extras: st.SearchStrategy[dict[str, Any]] = st.sampled_from(
    [
        {},
        {"request_id": "r", "usage": None},
        {"request_id": None, "weight_version": "7"},
        {"weight_version": 7, "created": 1_700_000_000},
        {"usage": {"completion_tokens": 3}},
        {"error": "boom"},
        {"prompt_token_ids": [1, 2]},
        {"cho\u0131ces": 1, "x y": {"z": [[], [1]]}},
    ]
)
of_choices: st.SearchStrategy[dict[str, Any]] = st.sampled_from(
    [
        {},
        {},
        {"finish_reason": None, "index": 0},
        {"finish_reason": "length"},
        {"index": 1},
        {"stop_reason": 5},
    ]
)


def vllm(tokens: Sequence[tuple[Any, Any]], at: int, choice: dict[str, Any]) -> dict[str, Any]:
    content = [{"token": f"token_id:{one}", "logprob": logprob, "rank": at} for one, logprob in tokens]
    return {
        "choices": [{"token_ids": [one for one, _ in tokens], "logprobs": {"content": content}, **choice}]
    }


def bare(tokens: Sequence[tuple[Any, Any]], at: int, choice: dict[str, Any]) -> dict[str, Any]:
    return {"choices": [{"token_ids": [one for one, _ in tokens], "logprobs": None, **choice}]}


def uneven(tokens: Sequence[tuple[Any, Any]], at: int, choice: dict[str, Any]) -> dict[str, Any]:
    content = [{"logprob": logprob} for _, logprob in tokens[at % 2 :]]
    return {
        "choices": [{"token_ids": [one for one, _ in tokens], "logprobs": {"content": content}, **choice}]
    }


def text(tokens: Sequence[tuple[Any, Any]], at: int, choice: dict[str, Any]) -> dict[str, Any]:
    told = {"tokens": [f"t{one}" for one, _ in tokens], "token_logprobs": [logprob for _, logprob in tokens]}
    choice = {"text": f"word {at}", "token_ids": [one for one, _ in tokens], "logprobs": told, **choice}
    return {"id": "cmpl-1", "created": 17, "choices": [choice]}


def chat(tokens: Sequence[tuple[Any, Any]], at: int, choice: dict[str, Any]) -> dict[str, Any]:
    content = [{"token": f"token_id:{one}", "logprob": logprob} for one, logprob in tokens]
    return {"choices": [{"delta": {"content": f"w{at}"}, "logprobs": {"content": content}, **choice}]}


def sglang(tokens: Sequence[tuple[Any, Any]], at: int, choice: dict[str, Any]) -> dict[str, Any]:
    pairs = [[logprob, one, None] for one, logprob in tokens]
    meta = {"id": "r", "output_token_logprobs": pairs, "completion_tokens": at + len(tokens)}
    meta |= {"finish_reason": None, "prompt_tokens": 3, "e2e_latency": at / 7, "weight_version": "default"}
    return {"text": f"w{at}", "output_ids": [one for one, _ in tokens], "meta_info": meta}


SHAPES = {"vllm": [vllm, bare, uneven], "sglang": [sglang], "openai": [text, chat, vllm]}


@st.composite
def stretches(draw: st.DrawFn, dialect: str) -> list[Event]:
    """Draw Deltas in a row that differ as those of one stream do, now and then with an odd one among them."""
    shape, extra = draw(st.sampled_from(SHAPES[dialect])), draw(extras)
    number = draw(st.sampled_from([0, 0, 0, 1]))
    lengths = draw(st.sampled_from([st.just(1), st.integers(1, 4), st.integers(0, 2)]))
    separators = draw(st.sampled_from([(",", ":"), (", ", ": ")]))
    frames: list[Event] = []
    at = 0
    for place in range(draw(st.integers(1, 40))):
        several = draw(lengths)
        tokens = [(draw(plain_ids), draw(plain_logprobs)) for _ in range(several)]
        data = json.dumps({**extra, **shape(tokens, at, {})}, separators=separators)
        at += several
        if draw(st.integers(0, 30)) == 0:
            data = draw(odd_frames(dialect, at))
        frames.append(Delta(number, data.encode("utf-8", "replace"), 10 * place + draw(st.integers(0, 9))))
        if draw(st.integers(0, 15)) == 0:
            frames.append(Reads(number, [1, 2], [3, 4]))
    return frames


@st.composite
def odd_frames(draw: st.DrawFn, dialect: str, at: int) -> str:
    tokens = draw(st.lists(st.tuples(ids, logprobs), max_size=3))
    shape = draw(st.sampled_from([*SHAPES[dialect], vllm]))
    frame = {**draw(extras), **shape(tokens, at, draw(of_choices))}
    printed = json.dumps(frame, separators=(",", ":"))
    return draw(
        st.sampled_from(
            [
                printed,
                printed,
                printed.replace('"token_ids"', '"token_ids":[3],"token_ids"'),
                printed.replace('"token_ids"', '"token\\u005fids"'),
                printed.replace("null", "nil"),
                printed.replace("word", "w\\ud800"),
                printed.replace("[", "[ ", 1),
                printed[:-1],
                "[DONE]",
                '{"choices":[],"usage":{"completion_tokens":9}}',
            ]
        )
    )


@st.composite
def samples_of(draw: st.DrawFn, dialect: str) -> list[Event]:
    events: list[Event] = [Opened("k", prompt_token_ids=[1, 2]), requested(dialect)]
    for _ in range(draw(st.integers(1, 4))):
        events += draw(stretches(dialect))
        if draw(st.integers(0, 3)) == 0:
            events.append(draw(odd_events))
        if draw(st.integers(0, 3)) == 0:
            events.append(requested(dialect, draw(st.integers(0, 1)), draw(st.integers(0, 9))))
    return events


@pytest.mark.parametrize("dialect", SHAPES)
@settings(max_examples=60, deadline=None)
@given(st.data())
def test_streams_of_every_dialect(dialect: str, data: st.DataObject) -> None:
    samples = data.draw(st.lists(samples_of(dialect), min_size=1, max_size=3))
    assert_same(samples, data.draw(st.lists(st.integers(0, 120), max_size=3)))


@settings(deadline=None)
@given(st.lists(histories, min_size=1, max_size=3), st.lists(st.integers(0, 24), max_size=2), st.data())
def test_any_history(samples: list[list[Event]], cuts: list[int], data: st.DataObject) -> None:
    least = data.draw(st.sampled_from([1, 2, 16]))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(group_reader, "_LEAST", least)
        assert_same(samples, cuts)


@pytest.mark.parametrize(
    "odd",
    [
        lambda frame: frame.replace(b'"token_ids"', b'"token\\u005fids":[7],"token_ids"'),
        lambda frame: frame.replace(b'"index":0', b'"index":1'),
        lambda frame: frame.replace(b'"version":"7"', b'"version":"8"'),
        lambda frame: frame.replace(b"-0.5", b"null"),
        lambda frame: frame.replace(b"-0.5", b"-0.50"),
        lambda frame: frame.replace(b"-0.5", b"0"),
        lambda frame: frame.replace(b"[5]", b"[5,6]"),
        lambda frame: frame.replace(b"[5]", b"[]"),
        lambda frame: frame.replace(b"[5]", b"[-5]"),
        lambda frame: frame.replace(b'"x"', b'"\xff"'),
        lambda frame: frame.replace(b'"x"', b"nil"),
    ],
)
@pytest.mark.parametrize("where", [0, 1, 30, 59])
def test_one_odd_frame_among_plain_ones(odd: Any, where: int) -> None:
    entry = b'{"token":"x","logprob":-0.5}'
    plain = b'{"version":"7","choices":[{"index":0,"token_ids":[5],"logprobs":{"content":[%b]}}]}' % entry
    frames = [plain] * 60
    frames[where] = odd(plain)
    events: list[Event] = [Opened("k"), requested("vllm"), *(Delta(0, frame, 3) for frame in frames)]
    assert_same([events])


def test_two_keys_that_are_one_after_the_first_frame() -> None:
    frame = rb'{"choices":[{"token_ids":[%d],"token\u005fids":[%d]}]}'
    frames = [frame % (place + 5, max(place * 2, 5)) for place in range(60)]
    assert_same([[Opened("k"), requested("vllm"), *(Delta(0, data, 3) for data in frames)]])


def test_as_many_logprobs_as_tokens_but_not_in_each_frame() -> None:
    entry = b'{"logprob":-0.5}'
    frame = b'{"choices":[{"token_ids":[1,2],"logprobs":{"content":[%b]}}]}'
    frames = [frame % b",".join([entry] * several) for several in [2, *[1, 3] * 30]]
    assert_same([[Opened("k"), requested("vllm"), *(Delta(0, data, 3) for data in frames)]])
