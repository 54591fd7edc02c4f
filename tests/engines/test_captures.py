"""Every captured exchange says the same to a decoder and to a plain reading of its JSON."""

from __future__ import annotations

import json
from base64 import b64decode
from typing import Any

import pytest

from captures import Capture, cases, load, names
from rollout_log.engines import Frame, dialect_for, dialect_named
from rollout_log.sse import FrameSplitter

STREAMS = [name for name in names() if load(name).is_sse]
REQUESTS = [
    name
    for name in names()
    if dialect_for(load(name).request["path"]) and isinstance(load(name).request.get("body"), dict)
]
ANSWERS = [name for name in names() if not load(name).is_sse and dialect_for(load(name).request["path"])]


def decoded(capture: Capture) -> list[Frame]:
    dialect = dialect_for(capture.request["path"])
    assert dialect is not None
    frames, so_far = [], dict[int, int]()
    for sse in FrameSplitter().feed(capture.body):
        frame = dialect.decode_frame(sse.data, so_far)
        for choice in frame.choices:
            so_far[choice.index] = so_far.get(choice.index, 0) + len(choice.token_ids)
        frames.append(frame)
    return frames


def assert_says(frame: Frame, said: dict[str, Any]) -> None:
    """Compare with a reading by hand of the answer's JSON."""
    assert frame.undecodable is None
    assert frame.length_mismatch is None
    if "error" in said:
        assert frame.error is not None
        assert (frame.error.message, frame.error.code) == (said["error"]["message"], said["error"]["code"])
        assert frame.choices == []
        return
    assert frame.error is None
    assert frame.request_id == said.get("request_id", said.get("id"))
    assert frame.usage == said.get("usage")
    figures = (said.get("metrics") or {}).get("speculative_decoding")
    assert frame.metrics == figures
    prompts = [said.get("prompt_token_ids")] + [choice.get("prompt_token_ids") for choice in said["choices"]]
    assert frame.prompt_token_ids == next((prompt for prompt in prompts if prompt is not None), None)
    assert len(frame.choices) == len(said["choices"])
    for choice, by_hand in zip(frame.choices, said["choices"], strict=True):
        assert choice.index == by_hand["index"]
        assert choice.token_ids == (by_hand.get("token_ids") or [])
        assert choice.logprobs == logprobs_by_hand(by_hand)
        assert choice.finish_reason == by_hand["finish_reason"]
        assert choice.stop_reason == by_hand.get("stop_reason")
        assert choice.routed_experts == by_hand.get("routed_experts")
        assert choice.sampling_mask == by_hand.get("sampling_mask")
        message = by_hand.get("delta") or by_hand.get("message") or {}
        assert choice.text == by_hand.get("text", message.get("content"))
        spans = by_hand.get("weight_versions")
        assert spans == (
            None
            if choice.weight_versions is None
            else [{"version": s.version, "start": s.start, "end": s.end} for s in choice.weight_versions]
        )


def logprobs_by_hand(choice: dict[str, Any]) -> list[float] | None:
    logprobs = choice["logprobs"]
    if logprobs is None:
        return None
    if "content" in logprobs:
        return [entry["logprob"] for entry in logprobs["content"]]
    return list(logprobs["token_logprobs"])


@pytest.mark.parametrize("name", STREAMS)
def test_a_stream_says_what_its_json_says(name: str) -> None:
    capture = load(name)
    frames = decoded(capture)
    payloads = [block[6:] for block in capture.body.split(b"\n\n") if block.startswith(b"data: ")]
    if capture.ended == "cut" and not capture.body.endswith(b"\n\n"):
        payloads.pop()
    assert len(frames) == len(payloads)
    for frame, payload in zip(frames, payloads, strict=True):
        if payload == b"[DONE]":
            assert frame == Frame(done=True)
        else:
            assert_says(frame, json.loads(payload))
    assert frames[-1].done == (capture.ended == "eof")


@pytest.mark.parametrize("name", ANSWERS)
def test_a_whole_answer_says_what_its_json_says(name: str) -> None:
    capture = load(name)
    dialect = dialect_for(capture.request["path"])
    assert dialect is not None
    frame = dialect.decode_body(capture.body)
    try:
        said = json.loads(capture.body)
    except ValueError:
        # A router's plain text, or nothing at all from a server that was killed.
        assert frame.undecodable is not None
        assert frame.undecodable.startswith("not JSON: ")
        return
    if "detail" in said:
        assert frame.error is not None
        assert (frame.error.message, frame.error.code) == (said["detail"], None)
    else:
        assert_says(frame, said)


@pytest.mark.parametrize("name", REQUESTS)
def test_a_request_says_what_its_json_says(name: str) -> None:
    request = load(name).request
    dialect = dialect_for(request["path"])
    body = request["body"]
    assert dialect is not None
    info = dialect.read_request(json.dumps(body).encode())
    params = body.get("sampling_params", {}) if dialect.name == "vllm" else body
    ids = body.get("token_ids") if dialect.name == "vllm" else body.get("prompt")
    natural = isinstance(ids, list) and all(token >= 0 for token in ids)
    assert info.token_ids == (ids if natural else None)
    assert info.model == body.get("model")
    assert info.n == params.get("n", 1)
    assert info.stream == body.get("stream", False)
    assert info.max_tokens == (int(params["max_tokens"]) if "max_tokens" in params else None)
    assert info.wants_logprobs == (params.get("logprobs") is not None)


CASES = [case for case in cases() if "token_ids" in case["expect"]]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_cases_decode_to_their_tokens(case: dict[str, Any]) -> None:
    dialect = dialect_named(case["engine"])
    for request in case["requests"]:
        info = dialect.read_request(json.dumps(request["body"]).encode())
        assert (info.token_ids or [])[:2] == case["prompt_token_ids"]
        assert (info.stream, info.wants_logprobs) == (True, True)
    last = case["requests"][-1]
    stream = b64decode(last["stream_base64"]) if "stream_base64" in last else last["stream"].encode()
    so_far: dict[int, int] = {}
    token_ids: list[int] = []
    for sse in FrameSplitter().feed(stream):
        frame = dialect.decode_frame(sse.data, so_far)
        assert frame.undecodable is None
        for choice in frame.choices:
            token_ids += choice.token_ids
            so_far[choice.index] = len(token_ids)
    assert token_ids
    assert token_ids == case["expect"]["token_ids"][-len(token_ids) :]


def test_known_answers() -> None:
    # The figures of the captures' own description, so that the reading by hand is checked, too.
    long = decoded(load("n1-long-4096"))
    assert sum(len(choice.token_ids) for frame in long for choice in frame.choices) == 4096
    stop = decoded(load("b2-stop-token-id"))[-2].choices[0]
    assert (stop.finish_reason, stop.stop_reason) == ("stop", 832)
    text = decoded(load("b3-stop-string"))[-2].choices[0]
    assert (text.finish_reason, text.stop_reason) == ("stop", " Eming")
    abort = decoded(load("f1-abort-inference-v1"))[-3].choices[0]
    assert (abort.finish_reason, abort.token_ids, abort.logprobs) == ("abort", [], [])
    two = [choice.index for frame in decoded(load("h1-n2")) for choice in frame.choices]
    assert two == [0, 1] * 8
    named = decoded(load("p2-completions-token-prompt"))[0].choices[0]
    assert (named.token_ids, named.logprobs) == ([11], [-3.189878463745117])
    spans = decoded(load("m1-weight-version-change"))[-2].choices[0].weight_versions
    assert spans is not None
    assert len(spans) == 2
    assert (spans[0].start, spans[0].end, spans[1].end) == (0, spans[1].start, 400)
    figures = decoded(load("j1-spec-ngram-greedy"))[-2].metrics
    assert figures is not None
    assert figures["num_accepted_draft_tokens"] == 68
    masks = [frame.choices[0].sampling_mask for frame in decoded(load("v2-moe-stream-interval"))[:-1]]
    assert [len(mask or []) for mask in masks] == [1, 4, 4, 3]
    error = decoded(load("g07-token-out-of-vocab"))[0].error
    assert error is not None
    assert (error.code, error.message) == (400, "Token id 999999 is out of vocabulary")
