from __future__ import annotations

import json
import math
from typing import Any

import pytest

from rollout_log.engines import EngineError, Frame, RequestInfo, VersionSpan, dialect_named

VLLM = dialect_named("vllm")


def frame(**fields: Any) -> Frame:
    return VLLM.decode_frame(json.dumps(fields).encode(), {})


@pytest.mark.parametrize("named", [{"token": "token_id:17"}, {"token_id": 17}, {"token": " text"}, {}])
def test_log_probs_are_read_in_order_whatever_names_their_token(named: dict[str, Any]) -> None:
    entries = [named | {"logprob": -0.5, "top_logprobs": [{"logprob": -9.0}]}, named | {"logprob": -1}]
    choice = frame(choices=[{"token_ids": [17, 18], "logprobs": {"content": entries}}]).choices[0]
    assert (choice.index, choice.token_ids, choice.logprobs) == (0, [17, 18], [-0.5, -1.0])


def test_a_null_or_absent_log_prob_is_nan() -> None:
    content = [{"logprob": None}, {}, {"logprob": -9999.0}]
    logprobs = frame(choices=[{"token_ids": [1, 2, 3], "logprobs": {"content": content}}]).choices[0].logprobs
    assert logprobs is not None
    assert [math.isnan(value) for value in logprobs] == [True, True, False]
    assert logprobs[2] == -9999.0


@pytest.mark.parametrize("logprobs", [None, {}, {"content": None}])
def test_absent_log_probs_are_none(logprobs: Any) -> None:
    choice = frame(choices=[{"token_ids": [1], "logprobs": logprobs}]).choices[0]
    assert (choice.token_ids, choice.logprobs) == ([1], None)


def test_fewer_log_probs_than_tokens_belong_to_the_first() -> None:
    said = frame(choices=[{"token_ids": [1, 2], "logprobs": {"content": [{"logprob": -0.5}]}}])
    assert (said.choices[0].logprobs, said.length_mismatch) == ([-0.5], None)


def test_more_log_probs_than_tokens_are_a_mismatch_and_all_missing() -> None:
    content = [{"logprob": -0.5}, {"logprob": -0.25}]
    said = frame(choices=[{"index": 3, "token_ids": [1], "logprobs": {"content": content}}])
    assert said.length_mismatch == "2 log-probs for 1 token of choice 3"
    assert said.choices[0].token_ids == [1]
    assert said.choices[0].logprobs is not None
    assert [math.isnan(value) for value in said.choices[0].logprobs] == [True]


def test_the_place_of_a_choice_is_not_its_index() -> None:
    said = frame(choices=[{"index": 1, "token_ids": [21]}, {"index": 0, "token_ids": [11]}])
    assert [(choice.index, choice.token_ids) for choice in said.choices] == [(1, [21]), (0, [11])]


@pytest.mark.parametrize(("version", "read"), [("7", "7"), (7, "7"), (None, None)])
def test_a_weight_version_is_text(version: Any, read: str | None) -> None:
    assert frame(choices=[], weight_version=version).weight_version == read


def test_version_spans_belong_to_a_choice() -> None:
    spans = [{"version": "a", "start": 0, "end": 2}, {"version": 8, "start": 2, "end": 5}]
    choice = frame(choices=[{"weight_versions": spans}]).choices[0]
    assert choice.weight_versions == [VersionSpan("a", 0, 2), VersionSpan("8", 2, 5)]
    assert frame(choices=[{"weight_versions": []}]).choices[0].weight_versions == []


@pytest.mark.parametrize(
    "fields",
    [
        {"metrics": {"speculative_decoding": {"num_spec_steps": 3}}},
        {"request_spec_decode_stats": {"num_spec_steps": 3}},
    ],
)
def test_speculative_decoding_figures_old_and_new(fields: dict[str, Any]) -> None:
    said = frame(choices=[], usage={"completion_tokens": 3}, **fields)
    assert (said.metrics, said.usage) == ({"num_spec_steps": 3}, {"completion_tokens": 3})
    assert frame(choices=[], metrics={"other": 1}).metrics is None


def test_the_prompt_is_read_from_the_answer_or_a_choice() -> None:
    assert frame(choices=[], prompt_token_ids=[1, 2]).prompt_token_ids == [1, 2]
    assert frame(choices=[{"prompt_token_ids": [1, 2]}]).prompt_token_ids == [1, 2]


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"error": {"message": "m", "type": "T", "param": None, "code": 500}}, EngineError("m", 500)),
        ({"error": {"message": "m", "code": "400"}}, EngineError("m", 400)),
        ({"error": {"message": "m", "code": "invalid_api_key"}}, EngineError("m", None)),
        ({"error": {"type": "BadRequestError"}}, EngineError("BadRequestError", None)),
        ({"error": "m"}, EngineError("m", None)),
        ({"error": "m", "code": 503}, EngineError("m", 503)),
        ({"object": "error", "message": "m", "type": "T", "code": 404}, EngineError("m", 404)),
        ({"detail": "Not Found"}, EngineError("Not Found", None)),
        ({"detail": [{"msg": "field required"}]}, EngineError('[{"msg": "field required"}]', None)),
    ],
)
def test_every_shape_of_error(fields: dict[str, Any], error: EngineError) -> None:
    assert frame(**fields) == Frame(error=error)
    assert VLLM.decode_body(json.dumps(fields).encode()) == Frame(error=error)


def test_an_error_beside_choices_keeps_both() -> None:
    said = frame(choices=[{"token_ids": [1]}], error={"message": "m", "code": 500})
    assert (said.choices[0].token_ids, said.error) == ([1], EngineError("m", 500))


@pytest.mark.parametrize("data", [b"[DONE]", b" [DONE] ", b"[DONE]\n"])
def test_done(data: bytes) -> None:
    assert VLLM.decode_frame(data, {}) == Frame(done=True)


@pytest.mark.parametrize("data", [b"{}", b'{"version": "0.32.0"}', b'{"choices": null}'])
def test_an_object_that_is_no_answer_is_undecodable(data: bytes) -> None:
    assert VLLM.decode_frame(data, {}) == Frame(undecodable="no choices, usage or error in it")


def test_a_request() -> None:
    params = {"max_tokens": "12", "n": 2, "logprobs": 0}
    body = {"model": "m", "token_ids": [1, 2], "sampling_params": params, "stream": True}
    assert VLLM.read_request(json.dumps(body).encode()) == RequestInfo([1, 2], "m", 2, True, 12, True, params)


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b"null", b"\xff", b"[" * 100_000, b'{"token_ids": [1, -1], "sampling_params": 3}'],
)
def test_a_malformed_request_reads_as_defaults(body: bytes) -> None:
    assert VLLM.read_request(body) == RequestInfo()


@pytest.mark.parametrize(
    ("params", "max_tokens"),
    [
        ({"max_tokens": 5}, 5),
        ({"max_tokens": None}, None),
        ({"max_tokens": "x"}, None),
        ({"max_tokens": True}, None),
    ],
)
def test_max_tokens(params: dict[str, Any], max_tokens: int | None) -> None:
    assert VLLM.read_request(json.dumps({"sampling_params": params}).encode()).max_tokens == max_tokens
