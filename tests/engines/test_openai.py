from __future__ import annotations

import json
from typing import Any

import pytest

from rollout_log.engines import EngineError, Frame, RequestInfo, dialect_named

OPENAI = dialect_named("openai")


def frame(**fields: Any) -> Frame:
    return OPENAI.decode_frame(json.dumps(fields).encode(), {})


def test_token_ids_of_completions_from_either_place() -> None:
    logprobs = {"tokens": ["token_id:11", "token_id:12"], "token_logprobs": [-0.5, -0.25]}
    named = frame(choices=[{"text": "ab", "logprobs": logprobs}]).choices[0]
    assert (named.token_ids, named.logprobs, named.text) == ([11, 12], [-0.5, -0.25], "ab")
    stated = frame(choices=[{"text": "ab", "logprobs": logprobs, "token_ids": [1, 2]}]).choices[0]
    assert (stated.token_ids, stated.logprobs) == ([1, 2], [-0.5, -0.25])


@pytest.mark.parametrize("where", ["delta", "message"])
def test_token_ids_of_chat_from_either_place(where: str) -> None:
    logprobs = {"content": [{"token": "token_id:11", "logprob": -0.5}]}
    named = frame(choices=[{where: {"content": "a"}, "logprobs": logprobs}]).choices[0]
    assert (named.token_ids, named.logprobs, named.text) == ([11], [-0.5], "a")
    stated = frame(choices=[{where: {"content": "a"}, "logprobs": logprobs, "token_ids": [1]}]).choices[0]
    assert (stated.token_ids, stated.logprobs) == ([1], [-0.5])


@pytest.mark.parametrize(
    "tokens",
    [["a"], ["token_id:1", "b"], ["token_id:-1"], ["token_id:"], ["token_id:1x"], ["token_id:٣"], [None]],
)
def test_text_tokens_give_no_ids_and_so_no_log_probs(tokens: list[str | None]) -> None:
    logprobs = {"tokens": tokens, "token_logprobs": [-0.5] * len(tokens)}
    said = frame(choices=[{"text": "a", "logprobs": logprobs}])
    assert (said.choices[0].token_ids, said.choices[0].logprobs, said.choices[0].text) == ([], None, "a")
    assert said.length_mismatch is None


def test_more_log_probs_than_tokens_are_a_mismatch() -> None:
    logprobs = {"tokens": ["a", "b"], "token_logprobs": [-0.5, -0.25]}
    said = frame(choices=[{"logprobs": logprobs, "token_ids": [1]}])
    assert said.length_mismatch == "2 log-probs for 1 token of choice 0"
    assert said.choices[0].token_ids == [1]


def test_the_prompt_and_the_rest_of_an_answer() -> None:
    said = frame(
        id="c", choices=[{"prompt_token_ids": [1, 2]}], usage={"completion_tokens": 0}, weight_version=3
    )
    assert (said.request_id, said.prompt_token_ids, said.weight_version) == ("c", [1, 2], "3")
    assert said.usage == {"completion_tokens": 0}
    assert frame(choices=[], prompt_token_ids=[3]).prompt_token_ids == [3]
    assert frame(error={"message": "m", "code": 400}) == Frame(error=EngineError("m", 400))
    assert OPENAI.decode_frame(b"[DONE]", {}) == Frame(done=True)


def test_a_completions_request() -> None:
    body = {
        "model": "m",
        "prompt": [1, 2],
        "max_tokens": 8,
        "logprobs": 0,
        "stream": True,
        "n": 2,
        "top_p": 0.9,
    }
    params = {"max_tokens": 8, "logprobs": 0, "n": 2, "top_p": 0.9}
    assert OPENAI.read_request(json.dumps(body).encode()) == RequestInfo(
        [1, 2], "m", 2, True, 8, True, params
    )


@pytest.mark.parametrize("prompt", ["text", ["a"], [[1], [2]]])
def test_a_prompt_that_is_not_one_list_of_ids(prompt: Any) -> None:
    assert OPENAI.read_request(json.dumps({"prompt": prompt}).encode()) == RequestInfo()


@pytest.mark.parametrize(("logprobs", "wanted"), [(True, True), (False, False), (None, False)])
def test_a_chat_request(logprobs: bool | None, wanted: bool) -> None:
    body = {"messages": [], "max_completion_tokens": 8, "max_tokens": 9, "logprobs": logprobs}
    info = OPENAI.read_request(json.dumps(body).encode())
    assert (info.token_ids, info.max_tokens, info.wants_logprobs, info.stream) == (None, 8, wanted, False)
