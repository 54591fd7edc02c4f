from __future__ import annotations

import json
import math
from typing import Any

import pytest

from rollout_log.engines import ChoiceDelta, EngineError, Frame, RequestInfo, dialect_named

SGLANG = dialect_named("sglang")


def result(pairs: list[Any] | None, completion_tokens: int | None, **fields: Any) -> dict[str, Any]:
    meta = {
        "id": "r",
        "output_token_logprobs": pairs,
        "completion_tokens": completion_tokens,
        "finish_reason": None,
    }
    known: dict[str, Any] = {
        name: fields.pop(name) for name in ("index", "output_ids", "error") if name in fields
    }
    return {"text": "t", "meta_info": meta | fields, **known}


def frame(said: Any, **so_far: int) -> Frame:
    return SGLANG.decode_frame(
        json.dumps(said).encode(), {int(name[1:]): count for name, count in so_far.items()}
    )


PAIRS = [[-0.1, 11, None], [-0.2, 12, "b"], [-0.3, 13]]


@pytest.mark.parametrize(
    ("pairs", "so_far", "token_ids"),
    [
        (PAIRS, 0, [11, 12, 13]),  # all new
        (PAIRS, 2, [13]),  # cumulative: two are repeated
        (PAIRS[2:], 2, [13]),  # incremental
        (PAIRS, 3, []),  # an abort chunk repeats everything
        (PAIRS[2:], 3, []),  # or the last one
        (PAIRS, 4, []),
    ],
)
def test_new_tokens_are_the_last_that_are_not_counted_yet(
    pairs: list[Any], so_far: int, token_ids: list[int]
) -> None:
    said = frame(result(pairs, 3), i0=so_far)
    assert said.choices[0].token_ids == token_ids
    assert said.choices[0].logprobs == ([-0.1, -0.2, -0.3][3 - len(token_ids) :] if token_ids else None)
    assert said.length_mismatch is None
    assert said.choices[0].text is None


def test_more_new_tokens_than_the_frame_carries_are_a_mismatch_and_none_are_added() -> None:
    said = frame(result(PAIRS[1:], 3), i0=0)
    assert said.length_mismatch == "choice 0 counts 3 new tokens and carries 2"
    assert (said.choices[0].token_ids, said.choices[0].logprobs) == ([], None)


def test_tokens_without_a_count_are_a_mismatch() -> None:
    said = frame(result(PAIRS, None))
    assert (
        said.length_mismatch == "choice 0 has tokens and no meta_info.completion_tokens to tell new ones by"
    )
    assert said.choices[0].token_ids == []


@pytest.mark.parametrize("pairs", [None, []])
def test_without_log_probs_the_ids_are_in_output_ids(pairs: Any) -> None:
    choice = frame(result(pairs, 3, output_ids=[11, 12, 13]), i0=1).choices[0]
    assert (choice.token_ids, choice.logprobs) == ([12, 13], None)


def test_a_null_log_prob_is_nan() -> None:
    choice = frame(result([[None, 11, None], [-0.5, 12, None]], 2)).choices[0]
    assert choice.logprobs is not None
    assert math.isnan(choice.logprobs[0])
    assert choice.logprobs[1] == -0.5


@pytest.mark.parametrize(
    ("wire", "finish", "stop"),
    [
        (None, None, None),
        ({"type": "length", "length": 8}, "length", None),
        ({"type": "stop", "matched": 151645}, "stop", 151645),
        ({"type": "stop", "matched": "\n\n"}, "stop", "\n\n"),
        ({"type": "abort", "message": "x", "status_code": 503}, "abort", None),
        ("stop", "stop", None),
    ],
)
def test_finish_reasons(wire: Any, finish: str | None, stop: int | str | None) -> None:
    said = frame(result(PAIRS, 3, finish_reason=wire))
    assert (said.choices[0].finish_reason, said.choices[0].stop_reason, said.error) == (finish, stop, None)


def test_what_a_result_says_beside_its_tokens() -> None:
    figures = {"spec_verify_ct": 2, "spec_accept_length": 1.5}
    usage = {"prompt_tokens": 2, "cached_tokens": 1}
    said = frame(result(PAIRS, 3, weight_version="7", routed_experts="AAAA", **usage, **figures))
    assert said.usage == {"prompt_tokens": 2, "completion_tokens": 3, "cached_tokens": 1}
    assert said.metrics == figures
    assert (said.request_id, said.weight_version, said.choices[0].routed_experts) == ("r", "7", "AAAA")


def test_a_chunk_of_one_choice_of_several_says_nothing_of_the_requests_usage() -> None:
    said = frame(result(PAIRS, 3, index=1), i0=3, i1=1)
    assert said.choices[0] == ChoiceDelta(1, [12, 13], [-0.2, -0.3])
    assert said.usage is None


def test_a_whole_answer() -> None:
    said = SGLANG.decode_body(json.dumps(result(PAIRS, 3, finish_reason={"type": "length"})).encode())
    assert said.choices == [ChoiceDelta(0, [11, 12, 13], [-0.1, -0.2, -0.3], "length")]
    assert said.usage == {"completion_tokens": 3}


def test_a_whole_answer_of_several_choices_is_a_list() -> None:
    answers = [result(PAIRS, 3, prompt_tokens=2), result(PAIRS[:1], 1, prompt_tokens=2)]
    said = SGLANG.decode_body(json.dumps(answers).encode())
    assert [(choice.index, choice.token_ids) for choice in said.choices] == [(0, [11, 12, 13]), (1, [11])]
    assert said.usage == {"prompt_tokens": 2, "completion_tokens": 4}


@pytest.mark.parametrize(
    ("said", "error"),
    [
        ({"error": {"message": "boom"}}, EngineError("boom", None)),
        ({"error": {"message": "boom", "code": 400}}, EngineError("boom", 400)),
        ({"object": "error", "message": "boom", "code": 500}, EngineError("boom", 500)),
        ({"detail": "Not Found"}, EngineError("Not Found", None)),
    ],
)
def test_errors(said: dict[str, Any], error: EngineError) -> None:
    assert frame(said) == Frame(error=error)


def test_neither_result_nor_error_is_undecodable() -> None:
    assert frame({"text": "a"}) == Frame(undecodable="no meta_info or error in it")
    assert SGLANG.decode_frame(b"[DONE]", {}) == Frame(done=True)


def test_a_request() -> None:
    params = {"max_new_tokens": 8, "temperature": 1.0}
    body = {"input_ids": [1, 2], "sampling_params": params, "return_logprob": True, "stream": True}
    assert SGLANG.read_request(json.dumps(body).encode()) == RequestInfo(
        [1, 2], None, 1, True, 8, True, params
    )
    assert SGLANG.read_request(b'{"text": "a", "return_logprob": false}') == RequestInfo()
    assert SGLANG.read_request(b'{"input_ids": [[1], [2]]}') == RequestInfo()
