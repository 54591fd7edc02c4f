"""When going on equals never having stopped."""

from __future__ import annotations

import pytest

from rollout_log.record.continuation import may_continue, request_from, strange_field

PLAIN = {"max_tokens": 10, "temperature": 1.0, "top_p": 0.9, "logprobs": 1, "repetition_penalty": 1.1}


def test_memoryless_parameters_may_go_on() -> None:
    assert may_continue({**PLAIN, "stop_token_ids": [9], "seed": None, "presence_penalty": 0.0}) is None


@pytest.mark.parametrize(
    ("params", "reason"),
    [
        ({"seed": 0}, "seed=0 does not survive a cut"),
        ({"frequency_penalty": 0.1}, "frequency_penalty=0.1 does not survive a cut"),
        ({"n": 2}, "n is not 1"),
        ({"bad_words": ["x"]}, "it is not known whether bad_words survives a cut"),
        ({"stop": "END"}, "a stop string may span the cut"),
    ],
)
def test_others_are_a_reason_not_to(params: dict[str, object], reason: str) -> None:
    assert may_continue({**PLAIN, **params}) == reason


def test_without_a_limit_of_its_own_a_request_may_not_go_on() -> None:
    assert (
        may_continue({"temperature": 1.0})
        == "without a limit of its own, the engine's default would count anew"
    )
    assert may_continue({"max_tokens": None}) is None  # vLLM: to the end of the model's length
    assert may_continue({"max_new_tokens": 5}) is None


@pytest.mark.parametrize(
    ("seam", "may"),
    [
        ("some text", True),
        ("the E in the middle", True),
        ("it may begin: E", False),
        ("it may begin: EN", False),
        ("it is there: END", False),
        ("half a character: \ufffd", False),
    ],
)
def test_no_stop_string_may_have_begun_at_the_cut(seam: str, may: bool) -> None:
    assert (may_continue({**PLAIN, "stop": ["END"]}, seam=seam) is None) is may
    assert (may_continue({**PLAIN, "stop": ["\n\n", "END"]}, seam=seam) is None) is may
    assert may_continue(PLAIN, seam=seam) is None


@pytest.mark.parametrize(
    ("dialect", "ids", "most", "least"),
    [
        ("vllm", "token_ids", "max_tokens", "min_tokens"),
        ("sglang", "input_ids", "max_new_tokens", "min_new_tokens"),
    ],
)
def test_the_request_that_goes_on_asks_for_the_rest(dialect: str, ids: str, most: str, least: str) -> None:
    body = {ids: [1, 2], "sampling_params": {most: 5, least: 2}}
    again = request_from(dialect, body, [1, 2], [11, 12, 13])
    assert again == {ids: [1, 2, 11, 12, 13], "sampling_params": {most: 2, least: 0}}
    assert body == {ids: [1, 2], "sampling_params": {most: 5, least: 2}}
    assert request_from(dialect, body, [1, 2], [11] * 4)["sampling_params"] == {most: 1, least: 0}
    assert request_from(dialect, body, [1, 2], [11] * 5) is None


def test_openai_has_its_parameters_at_top_level() -> None:
    body = {"prompt": [1], "max_tokens": 3, "stream": True}
    assert request_from("openai", body, [1], [11]) == {"prompt": [1, 11], "max_tokens": 2, "stream": True}


@pytest.mark.parametrize(
    ("dialect", "body", "strange"),
    [
        (
            "vllm",
            {"model": "m", "token_ids": [1], "sampling_params": {}, "stream": True, "priority": 1},
            None,
        ),
        ("vllm", {"token_ids": [1], "kv_transfer_params": {"x": 1}}, "kv_transfer_params"),
        ("sglang", {"input_ids": [1], "return_logprob": True, "session_params": None}, None),
        ("sglang", {"input_ids": [1], "custom_logit_processor": "p"}, "custom_logit_processor"),
        ("openai", {"prompt": [1], "anything": 1}, None),
    ],
)
def test_fields_beside_the_sampling_parameters_must_be_known_to_survive_a_cut(dialect, body, strange):
    assert strange_field(dialect, body) == strange
