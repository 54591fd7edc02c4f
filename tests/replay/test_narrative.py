"""The story of a sample: what was asked, what came and when, where it was cut, what was kept."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arbitrary import later, opened
from rollout_log.events import (
    Body,
    Closed,
    Delta,
    Ended,
    Event,
    Marked,
    Observed,
    Opened,
    Requested,
    Responded,
    Tail,
    Unknown,
    Unrecorded,
)
from rollout_log.fold import Rollout, fold
from rollout_log.replay.narrative import narrate, until

PATH = "/inference/v1/generate"
SSE = [("content-type", "text/event-stream")]
SENT = 1_700_000_000_000_000_000


def asked(number: int = 0, base: int = 0, cause: str = "first", **more) -> Requested:
    body = json.dumps({"token_ids": [1, 2], "sampling_params": {"max_tokens": 8}, "stream": True}).encode()
    return Requested(number, base, cause, "vllm", "POST", PATH, body, sent_unix_ns=SENT, **more)


def frame(number: int, time: int, *ids: int, finish: str | None = None) -> Delta:
    choice = {"index": 0, "token_ids": list(ids), "finish_reason": finish}
    return Delta(number, json.dumps({"choices": [choice]}).encode(), time)


def story(*events: Event, **options) -> list[str]:
    return [
        line.what for line in narrate(enumerate([Opened("k", prompt_token_ids=[1, 2]), *events]), **options)
    ]


def test_an_aborted_sample_that_was_resumed():
    lines = list(
        narrate(
            enumerate(
                [
                    Opened("k", prompt_token_ids=[1, 2], step=1),
                    asked(step=1, weight_version="7"),
                    Responded(0, 200, SSE, 5_000),
                    frame(0, 20_000, 11, 12),
                    frame(0, 60_000, 13),
                    frame(0, 70_000, finish="abort"),
                    Delta(0, b"[DONE]", 70_000),
                    Ended(0, "eof", None, 71_000),
                    asked(1, 3, "resume", step=2),
                    Responded(1, 200, SSE, 4_000),
                    frame(1, 9_000, 14, finish="stop"),
                    Ended(1, "eof", None, 9_500),
                    Closed("completed", 1.0, 2),
                ]
            )
        )
    )
    assert [(line.request, line.time, line.what, line.token_ids) for line in lines] == [
        (None, None, "begins with a prompt of 2 tokens, in step 1", []),
        (0, 0, f"first: asks POST {PATH}, from token 0, for at most 8 tokens; weights 7; step 1", []),
        (0, 5_000, "HTTP 200, text/event-stream", []),
        (0, 20_000, "3 tokens in 2 frames within 0.04 s", [11, 12, 13]),
        (0, 70_000, "finish reason: abort", []),
        (0, 70_000, "[DONE]", []),
        (0, 71_000, "cut after token 3 by the engine, which was told to abort", []),
        (None, None, "kept: all 3 tokens", []),
        (1, 0, f"resume: asks POST {PATH}, from token 3, for at most 8 tokens; step 2", []),
        (1, 4_000, "HTTP 200, text/event-stream", []),
        (1, 9_000, "1 token", [14]),
        (1, 9_000, "finish reason: stop", []),
        (1, 9_500, "the response is whole", []),
        (None, None, "the trainer takes it as completed in step 2", []),
        (None, None, "the sample is completed, with 4 tokens", []),
    ]
    assert [line.event for line in lines] == [0, 1, 2, 4, 5, 6, 7, 8, 8, 9, 10, 10, 11, 12, 12]
    assert lines[3].clock_ns == SENT + 20_000_000


@pytest.mark.parametrize(
    ("end", "told"),
    [
        (
            Ended(0, "cancelled", "the run aborts"),
            "cut after token 1 by the client, which left: the run aborts",
        ),
        (Ended(0, "reset", "ReadError"), "cut after token 1 by the connection, which broke: ReadError"),
        (Ended(0, "timeout", "no bytes for 600 s"), "cut after token 1 by silence: no bytes for 600 s"),
        (Ended(0, "eof"), "ends after token 1 without a finish reason, as if it were whole"),
    ],
)
def test_where_it_was_cut_and_by_what(end, told):
    assert told in story(asked(), Responded(0, 200, SSE), frame(0, 9, 11), end)


@pytest.mark.parametrize("how", ["reset", "timeout"])
def test_an_engine_that_was_never_reached(how):
    told = story(asked(), Ended(0, how, "ConnectError: refused"))
    assert "reaches nobody: no connection could be made: ConnectError: refused" in told


def test_an_error_of_the_engine():
    error = Delta(0, b'{"error":{"message":"out of memory","code":500}}', 8)
    told = story(asked(), Responded(0, 200, SSE), frame(0, 5, 11), error, Ended(0, "eof"))
    assert told[-3:] == [
        "error frame: code 500: out of memory",
        "cut after token 1 by an error of the engine: code 500: out of memory",
        "the sample is failed, with 1 token",
    ]
    refused = Body(0, b'{"error":{"message":"no such model"}}', 7)
    assert "refused with HTTP 404: no such model" in story(
        asked(), Responded(0, 404), refused, Ended(0, "eof")
    )


def test_what_is_thrown_away_and_what_is_added():
    told = story(
        *(asked(), Responded(0, 200, SSE), frame(0, 5, 11, 12, 13), Tail(0, b"data: {"), Ended(0, "reset")),
        *(asked(1, 1, "retry"), Responded(1, 200, SSE), frame(1, 5, 14, finish="stop"), Ended(1, "eof")),
        *(Observed(2, [40, 41]), asked(2, 4, "turn"), Unrecorded(4, [50]), asked(3, 0, "retry")),
    )
    assert "7 bytes of a frame that was cut" in told
    assert "kept: 1 of 3 tokens; thrown away: 2" in told
    assert told.count("kept: all 2 tokens") == 1
    assert "the environment adds 2 tokens" in told
    assert "while recording was off came 1 token" in told
    assert "kept: 0 of 5 tokens; thrown away: 5" in told
    assert told[-1] == (
        "the sample is pending, with 0 tokens; thrown away on the way: 5 tokens; request 3 is still open"
    )


def test_a_silence_is_told():
    told = story(asked(), Responded(0, 200, SSE), frame(0, 10, 11), frame(0, 12_500_010, 12))
    assert told[3:6] == ["1 token", "nothing came for 12.5 s, then", "1 token"]


def test_each_frame_may_be_told():
    frames = [frame(0, time, 11) for time in (1, 2, 3)]
    assert story(asked(), *frames).count("3 tokens in 3 frames") == 1
    assert story(asked(), *frames, each_frame=True).count("1 token") == 3


def test_text_without_tokens_is_told_too():
    def said(time: int, text: str | None) -> Delta:
        choice = {"index": 0, "delta": {"role": "assistant", "content": text}}
        return Delta(0, json.dumps({"choices": [choice]}).encode(), time)

    body = b'{"messages":[]}'
    requested = Requested(0, 0, "first", "openai", "POST", "/v1/chat/completions", body, sent_unix_ns=SENT)
    told = story(requested, Responded(0, 200, SSE, 1), said(2, None), said(3, "Hel"), said(50_003, "lo"))
    assert "text without tokens in 2 frames within 0.05 s" in told
    assert "text without tokens" in story(requested, Responded(0, 200, SSE, 1), said(3, "Hi"))


def test_marks_and_what_is_not_known():
    told = story(
        Marked("finish_inferred", {"finish_reason": "length", "evidence": "the budget is used up"}),
        Marked("concurrent_request", {"child": "k~2"}),
        Marked("weights_updated", {"version": "8"}),
        Unknown(77, []),
    )
    assert told[1:-1] == [
        "taken as finished (length): the budget is used up",
        "another request came meanwhile; it is sample k~2",
        "weights updated: version 8",
        "an event of kind 77, which this version does not know",
    ]


@settings(max_examples=40)
@given(first=opened, rest=st.lists(later, max_size=12), each=st.booleans())
def test_any_events_make_a_story_that_ends_as_the_fold_does(first, rest, each):
    events = list(enumerate([first, *rest]))
    lines = list(narrate(events, each_frame=each))
    rollout = fold(events)
    tokens = sum(len(choice.token_ids) for choice in rollout.choices.values())
    plural = "" if tokens == 1 else "s"
    assert lines[-1].what.startswith(f"the sample is {rollout.status}, with {tokens:,} token{plural}")


def test_a_story_may_go_on_from_an_older_life():
    older = fold(enumerate([Opened("k", prompt_token_ids=[1, 2]), asked(), frame(0, 1, 11, 12)]))
    state = Rollout.continue_from(older, 2)
    told = [line.what for line in narrate([(0, Opened("k", continues=(0, 2))), (1, asked(0, 2))], state)]
    assert told[0] == "begins with a prompt of 0 tokens, going on from life 0 after 2 tokens"
    assert told[-1] == "the sample is pending, with 2 tokens; request 0 is still open"


def test_until_an_event_or_a_time():
    events = list(
        enumerate(
            [
                Opened("k", opened_unix_ns=SENT - 5_000_000),
                asked(),
                frame(0, 1_000, 11),
                Tail(0, b"x"),
                frame(0, 2_000, 12),
            ]
        )
    )
    assert list(until(events)) == events
    assert list(until(events, last=2)) == events[:3]
    assert list(until(events, last=-1)) == []
    assert list(until(events, clock_ns=SENT - 1)) == events[:1]
    assert list(until(events, clock_ns=SENT + 1_999_999)) == events[:4]
    assert list(until(events, clock_ns=SENT + 2_000_000)) == events
