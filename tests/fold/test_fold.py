"""The rule of the fold, one claim a test."""

from __future__ import annotations

import math

import msgspec
import pytest

from rollout_log.events import (
    Closed,
    Delta,
    Ended,
    Event,
    Marked,
    Observed,
    Opened,
    Requested,
    Responded,
    Unknown,
    Unrecorded,
)
from rollout_log.fold import Rollout, fold
from rollout_log.versions import version_order
from rollout_log.view import SampleView, view

PROMPT = [1, 2]


def opened() -> Opened:
    return Opened(key="k", prompt_token_ids=PROMPT)


def requested(number: int = 0, base: int = 0, cause: str = "first", **more: object) -> Requested:
    params = {"max_tokens": more.pop("max_tokens", 100), "logprobs": 1, **more.pop("params", {})}  # type: ignore[dict-item]
    body = msgspec.json.encode({"model": "m", "token_ids": [], "sampling_params": params, "stream": True})
    return Requested(
        number=number,
        base=base,
        cause=cause,  # type: ignore[arg-type]
        dialect="vllm",
        method="POST",
        path="/inference/v1/generate",
        body=body,
        **more,  # type: ignore[arg-type]
    )


def delta(
    ids: list[int], number: int = 0, *, logprobs: object = ..., index: int = 0, **more: object
) -> Delta:
    choice: dict[str, object] = {"index": index, "token_ids": ids, "finish_reason": more.pop("finish", None)}
    if logprobs is ...:
        logprobs = [-0.5] * len(ids)
    if logprobs is not None:
        choice["logprobs"] = {"content": [{"token_id": 0, "logprob": x} for x in logprobs]}  # type: ignore[attr-defined]
    if "spans" in more:
        choice["weight_versions"] = more.pop("spans")
    return Delta(number, msgspec.json.encode({"choices": [choice], **more}))


def error_frame(number: int = 0, code: int = 500) -> Delta:
    return Delta(number, msgspec.json.encode({"error": {"message": "boom", "code": code}}))


def ok(number: int = 0, status: int = 200) -> Responded:
    return Responded(number, status)


def rolled(*events: Event) -> Rollout:
    return fold(enumerate([opened(), *events]))


def codes(rollout: Rollout) -> list[str]:
    return [problem.code for problem in rollout.problems]


def test_a_request_truncates_to_its_base_and_deltas_append() -> None:
    rollout = rolled(
        requested(),
        ok(),
        delta([11, 12, 13]),
        Ended(0, "reset"),
        requested(1, 2, "retry"),
        ok(1),
        delta([21], 1),
    )
    assert rollout.choice().token_ids == [11, 12, 21]
    assert rollout.discarded == 1
    assert rollout.requests[0].tokens == 3


@pytest.mark.parametrize(
    ("finish", "how", "status", "ended"),
    [
        ("length", "eof", "truncated", "finished"),
        ("stop", "eof", "completed", "finished"),
        ("repetition", "reset", "completed", "finished"),
        ("abort", "eof", "aborted", "aborted"),
        ("cancelled", "eof", "aborted", "aborted"),
        (None, "eof", "aborted", "no_terminal"),
        (None, "cancelled", "aborted", "cancelled"),
        (None, "reset", "aborted", "reset"),
        (None, "timeout", "aborted", "timeout"),
        (None, None, "pending", None),
        ("stop", None, "completed", "finished"),
    ],
)
def test_how_a_request_ended_and_what_the_sample_is_then(
    finish: str | None, how: str | None, status: str, ended: str | None
) -> None:
    events = [requested(), ok(), delta([11], finish=finish)]
    if how:
        events.append(Ended(0, how))  # type: ignore[arg-type]
    rollout = rolled(*events)
    assert (rollout.status, rollout.ended_of(rollout.requests[0])) == (status, ended)
    assert ("no_terminal" in codes(rollout)) == (ended == "no_terminal")


@pytest.mark.parametrize("how", ["eof", "reset", "cancelled"])
def test_an_error_frame_fails_the_sample_whatever_ends_it(how: str) -> None:
    rollout = rolled(requested(), ok(), delta([11]), error_frame(), Ended(0, how))  # type: ignore[arg-type]
    assert (rollout.status, rollout.ended_of(rollout.requests[0])) == ("failed", "engine_error")
    assert view(rollout).requests[0].detail == "boom"


def test_an_error_after_the_finish_is_a_problem_not_an_end() -> None:
    rollout = rolled(requested(), ok(), delta([11], finish="stop"), error_frame(), Ended(0, "eof"))
    assert rollout.status == "completed"
    assert codes(rollout) == ["error_after_finish"]


def test_http_errors_fail_the_sample() -> None:
    rollout = rolled(requested(), ok(status=503), Ended(0, "eof"))
    assert (rollout.status, rollout.ended_of(rollout.requests[0])) == ("failed", "http_error")


def test_deltas_of_an_older_request_are_counted_and_never_appended() -> None:
    rollout = rolled(requested(), ok(), delta([11]), requested(1, 0, "retry"), delta([99], 0), delta([21], 1))
    assert rollout.choice().token_ids == [21]
    assert rollout.requests[0].late_deltas == 1
    late = [problem for problem in rollout.problems if problem.code == "late_delta"]
    assert [(problem.request, problem.message) for problem in late] == [
        (0, "1 frame came after a newer request")
    ]


def test_observed_tokens_have_mask_zero_and_no_logprob() -> None:
    rollout = rolled(
        requested(), ok(), delta([11], finish="stop"), Ended(0, "eof"),
        Observed(1, [40, 41]), requested(1, 3, "turn"), delta([12], 1),
    )  # fmt: skip
    choice = rollout.choice()
    assert choice.token_ids == [11, 40, 41, 12]
    assert choice.loss_mask == [1, 0, 0, 1]
    assert [math.isnan(x) for x in choice.logprobs] == [False, True, True, False]
    assert codes(rollout) == []


def test_a_trimmed_turn_is_noted_and_a_changed_past_is_an_error() -> None:
    finished = [requested(), ok(), delta([11, 12], finish="stop"), Ended(0, "eof")]
    assert codes(rolled(*finished, Observed(1, [40]))) == ["response_trimmed"]
    cut = [requested(), ok(), delta([11, 12]), Ended(0, "reset")]
    assert codes(rolled(*cut, Observed(1, [40]))) == ["prompt_mismatch"]


def test_missing_null_and_sentinel_logprobs_are_told_apart() -> None:
    rollout = rolled(
        requested(),
        ok(),
        delta([11, 12], logprobs=[-0.5]),
        delta([13], logprobs=[None]),
        delta([14], logprobs=[-9999.0]),
        delta([15], finish="stop"),
        Ended(0, "eof"),
    )
    found = {problem.code: (problem.severity, problem.position) for problem in rollout.problems}
    assert found == {
        "missing_logprobs": ("error", 1),
        "null_logprob": ("warning", 2),
        "sentinel_logprob": ("info", 3),
    }
    assert view(rollout).logprobs == [-0.5, None, None, -9999.0, -0.5]


def test_logprobs_that_nobody_asked_for_are_no_problem() -> None:
    rollout = rolled(requested(params={"logprobs": None}), ok(), delta([11], logprobs=None, finish="stop"))
    assert codes(rollout) == []


def test_problems_of_tokens_thrown_away_go_with_them() -> None:
    rollout = rolled(
        requested(), ok(), delta([11], logprobs=None), Ended(0, "reset"), requested(1, 0, "retry"),
        delta([21], 1, finish="stop"),
    )  # fmt: skip
    assert codes(rollout) == []


def test_versions_on_frames_and_as_spans_are_the_same_spans() -> None:
    frames = rolled(requested(), ok(), delta([11, 12], weight_version="7"), delta([13], weight_version="8"))
    spans = rolled(
        requested(),
        ok(),
        delta([11, 12]),
        delta([13], spans=[{"version": "7", "start": 0, "end": 2}, {"version": "8", "start": 2, "end": 3}]),
    )
    expected = [("7", 0, 2), ("8", 2, 3)]
    for rollout in (frames, spans):
        found = rollout.choice().weight_versions(rollout.dispatched)
        assert [(span.version, span.start, span.end) for span in found] == expected


def test_spans_count_from_the_request_and_skip_observed_tokens() -> None:
    rollout = rolled(
        requested(), ok(), delta([11], finish="stop", spans=[{"version": "7", "start": 0, "end": 1}]),
        Observed(1, [40]), requested(1, 2, "turn"),
        delta([12], 1, finish="stop", spans=[{"version": "8", "start": 0, "end": 1}]),
    )  # fmt: skip
    found = rollout.choice().weight_versions(rollout.dispatched)
    assert [(span.version, span.start, span.end) for span in found] == [("7", 0, 1), ("8", 2, 3)]


def test_routing_is_that_of_the_latest_request() -> None:
    def routed(experts: str | None, number: int, *ids: int) -> Delta:
        choice = {"index": 0, "token_ids": ids, "finish_reason": "abort", "routed_experts": experts}
        return Delta(number, msgspec.json.encode({"choices": [choice]}))

    first = rolled(requested(), ok(), routed("AAAA", 0, 11))
    assert first.choice().routed_experts == "AAAA"
    second = fold(enumerate([requested(1, 1, "resume"), routed(None, 1, 12)], first.events), first)
    assert (second.choice().token_ids, second.choice().routed_experts) == ([11, 12], None)


def test_the_version_known_at_dispatch_stands_where_the_engine_told_none() -> None:
    rollout = rolled(requested(weight_version="7"), ok(), delta([11]), Ended(0, "cancelled"))
    (span,) = view(rollout).weight_versions
    assert (span.version, span.start, span.end) == ("7", 0, 1)
    assert codes(rollout) == ["version_assumed"]


def test_versions_that_go_backwards_are_noticed() -> None:
    rollout = rolled(requested(), ok(), delta([11], weight_version="8"), delta([12], weight_version="7"))
    assert codes(rollout) == ["version_went_backwards"]
    assert rollout.problems[0].position == 1


def test_a_version_of_thousands_of_digits_is_a_text_like_any_other() -> None:
    versions = ["9" * 5000, "8" * 5000]
    rollout = rolled(requested(), ok(), *(delta([n], weight_version=v) for n, v in enumerate(versions)))
    assert rollout.problems == []
    assert [span.version for span in rollout.choice().told] == versions
    assert sorted([*versions, "10", "9"], key=version_order) == ["9", "10", *reversed(versions)]


def test_a_budget_that_was_not_reduced_is_noticed() -> None:
    cut = [requested(max_tokens=10), ok(), delta([11, 12]), Ended(0, "cancelled")]
    assert codes(rolled(*cut, requested(1, 2, "resume", max_tokens=8))) == []
    assert codes(rolled(*cut, requested(1, 2, "resume", max_tokens=9))) == ["budget_not_reduced"]


def test_usage_must_match_what_was_streamed() -> None:
    def ended(count: int) -> Rollout:
        usage = Delta(0, msgspec.json.encode({"choices": [], "usage": {"completion_tokens": count}}))
        return rolled(requested(), ok(), delta([11, 12], finish="stop"), usage, Ended(0, "eof"))

    assert codes(ended(2)) == []
    assert codes(ended(3)) == ["usage_mismatch"]


def test_an_inferred_finish_changes_the_status_and_not_the_end() -> None:
    rollout = rolled(
        requested(),
        ok(),
        delta([11]),
        Ended(0, "eof"),
        Marked("finish_inferred", {"finish_reason": "length"}),
    )
    assert (rollout.status, rollout.ended_of(rollout.requests[0])) == ("truncated", "no_terminal")
    assert codes(rollout) == ["no_terminal", "finish_inferred"]


def test_tokens_generated_while_recording_was_off_are_a_gap() -> None:
    rollout = rolled(requested(), ok(), delta([11]), Unrecorded(1, [12, 13]), requested(1, 3, "resume"))
    assert rollout.choice().token_ids == [11, 12, 13]
    assert rollout.choice().loss_mask == [1, 1, 1]
    assert "log_gap" in codes(rollout)


def test_the_trainer_adds_and_never_rewrites() -> None:
    rollout = rolled(
        requested(), ok(), delta([11], finish="length"), Ended(0, "eof"), Closed("failed", {"score": 1.0}, 3)
    )
    shown = view(rollout)
    assert (shown.status, shown.trainer_status, shown.reward, shown.step) == (
        "truncated",
        "failed",
        {"score": 1.0},
        3,
    )


def test_choices_are_folded_apart_and_the_sample_is_what_its_worst_choice_is() -> None:
    rollout = rolled(
        requested(params={"n": 2}),
        ok(),
        delta([21], index=1),
        delta([11], index=0, finish="stop"),
        error_frame(),
        Ended(0, "eof"),
    )
    assert [view(rollout, choice=i).status for i in (0, 1)] == ["completed", "failed"]
    assert [view(rollout, choice=i).token_ids for i in (0, 1)] == [[11], [21]]
    whole = view(rollout)
    assert (whole.status, whole.token_ids, whole.choices) == ("failed", [], 2)


def test_all_choices_of_a_request_begin_with_what_it_repeats() -> None:
    two = {"params": {"n": 2}}
    rollout = rolled(
        requested(**two),
        ok(),
        delta([11, 12], finish="stop"),
        delta([21], index=1, finish="stop"),
        Observed(2, [40]),
        requested(1, 3, "turn", **two),
        ok(1),
        delta([13], 1, finish="stop"),
        delta([23], 1, index=1, finish="stop"),
    )
    assert rollout.choice(0).token_ids == [11, 12, 40, 13]
    assert rollout.choice(1).token_ids == [11, 12, 40, 23]
    assert rollout.choice(1).loss_mask == [1, 1, 0, 1]
    assert [run.request for run in rollout.choice(1).runs] == [0, None, 1]
    assert codes(rollout) == []


def test_a_turn_may_trim_a_response_whose_finish_was_inferred() -> None:
    rollout = rolled(
        requested(),
        ok(),
        delta([11, 12]),
        Ended(0, "eof"),
        Marked("finish_inferred", {"finish_reason": "stop"}),
        Observed(1, [40]),
        requested(1, 2, "turn"),
    )
    assert [code for code in codes(rollout) if code != "no_terminal"] == [
        "response_trimmed",
        "finish_inferred",
    ]


def test_a_request_for_a_thousand_million_choices_costs_no_memory() -> None:
    rollout = rolled(requested(params={"n": 10**9}), ok(status=400), Ended(0, "eof"))
    assert rollout.status == "failed"
    assert len(rollout.choices) == 1024


def test_unknown_events_and_undecodable_frames_stop_nothing() -> None:
    rollout = rolled(requested(), ok(), Unknown(99, ["?"]), Delta(0, b"\xff{"), delta([11], finish="stop"))
    assert rollout.choice().token_ids == [11]
    assert rollout.unknown_events == 1
    assert codes(rollout) == ["undecodable_frame"]


def test_a_missing_event_is_a_gap() -> None:
    events = [(0, opened()), (1, requested()), (2, ok()), (4, delta([12]))]
    rollout = fold(events)
    assert rollout.choice().token_ids == [12]
    assert codes(rollout) == ["log_gap"]
    assert rollout.events == 5


def test_a_new_life_starts_from_the_kept_tokens_of_an_older_one() -> None:
    older = rolled(requested(weight_version="7"), ok(), delta([11, 12, 13]))
    state = Rollout.continue_from(older, 2)
    newer = fold(
        enumerate(
            [Opened(key="k", incarnation=1, continues=(0, 2)), requested(0, 2, "resume"), delta([14], 0)]
        ),
        state,
    )
    assert newer.choice().token_ids == [11, 12, 14]
    assert newer.choice().logprobs == [-0.5, -0.5, -0.5]
    assert [span.version for span in newer.choice().weight_versions(newer.dispatched)] == ["7"]
    assert older.choice().token_ids == [11, 12, 13]


def test_the_view_is_ascii_json_with_a_schema() -> None:
    shown = msgspec.json.encode(view(rolled(requested(), ok(), delta([11], logprobs=[None]))))
    assert b'"logprobs":[null]' in shown
    assert "SampleView" in msgspec.json.schema(SampleView)["$defs"]
