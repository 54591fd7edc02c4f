"""What the engine sends today, read by hand: direct and through the router."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate
from typing import Any

import httpx
import pytest

from engine.wire import GENERATE, PROMPT, ask, body, frames, read, stream

pytestmark = pytest.mark.engine

LENGTH = {"max_tokens": 32, "temperature": 1.0, "seed": 1234, "ignore_eos": True}
LONG = {"max_tokens": 8000, "temperature": 0.0, "ignore_eos": True}


@pytest.mark.parametrize(
    ("sampling", "finish"),
    [
        (LENGTH, "length"),
        (LENGTH | {"temperature": 0.0}, "length"),
        (LENGTH | {"logprobs": 0}, "length"),
        (LENGTH | {"logprobs": 5}, "length"),
        (LENGTH | {"logprobs": None}, "length"),
        (LENGTH | {"max_tokens": 1}, "length"),
        (LENGTH | {"stream_interval": 8}, "length"),
        (LENGTH | {"n": 2}, "length"),
        ({"max_tokens": 400, "temperature": 1.0, "seed": 1}, "stop"),
        (
            LENGTH
            | {
                "temperature": 0.0,
                "max_tokens": 200,
                "repetition_detection": {"max_pattern_size": 8, "min_pattern_size": 1, "min_count": 3},
            },
            "repetition",
        ),
    ],
    ids=lambda value: ",".join(f"{k}={v}" for k, v in value.items()) if isinstance(value, dict) else value,
)
def test_a_stream_adds_up_to_the_answer_that_is_not_streamed(http, url, sampling, finish):
    request = body(**sampling)
    streamed = read(stream(http, url, request))
    assert streamed == ask(http, url, request)
    assert sorted(streamed) == list(range(sampling.get("n", 1)))
    for answer in streamed.values():
        assert answer.finish_reason == finish
        assert len(answer.logprobs) == (0 if sampling.get("logprobs", 1) is None else len(answer.token_ids))
        if finish == "length":
            assert len(answer.token_ids) == sampling["max_tokens"]


def test_stop_token_and_stop_string_are_told_as_the_stop_reason(http, url):
    whole = ask(http, url, body(**LENGTH))[0].token_ids
    stop = next(token for at, token in enumerate(whole) if at > 4 and token not in whole[:at])
    length = whole.index(stop) + 1
    stopped = read(stream(http, url, body(**LENGTH, stop_token_ids=[stop])))[0]
    assert (stopped.token_ids, stopped.finish_reason, stopped.stop_reason) == (whole[:length], "stop", stop)

    text = http.post(f"{url}/detokenize", json={"model": "tiny", "tokens": [stop]}).json()["prompt"]
    answer = read(stream(http, url, body(**LENGTH, stop=[text])))[0]
    assert (answer.finish_reason, answer.stop_reason) == ("stop", text)
    assert answer.token_ids == whole[: len(answer.token_ids)]


def test_the_usage_frame_is_last_and_has_no_choices(http, url):
    *others, last = stream(http, url, body(**LENGTH))
    assert last["choices"] == []
    usage = last["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (19, 32, 51)
    assert all(frame["choices"] for frame in others)
    assert all(frame["usage"] is None for frame in others)


def test_continuous_usage_counts_in_every_frame(http, url):
    request = body(**LENGTH)
    request["stream_options"]["continuous_usage_stats"] = True
    got = stream(http, url, request)
    sent = [sum(len(choice["token_ids"]) for choice in frame["choices"]) for frame in got]
    assert [frame["usage"]["completion_tokens"] for frame in got] == list(accumulate(sent))


def test_a_frame_is_not_a_token(http, url):
    sizes = [
        len(choice["token_ids"])
        for frame in stream(http, url, body(**LENGTH, stream_interval=8))
        for choice in frame["choices"]
    ]
    assert sum(sizes) == 32
    assert max(sizes) >= 8


def test_text_waits_for_whole_characters(http, url):
    request = body(max_tokens=60, seed=1, structured_outputs={"choice": ["你好 🚀 é"]})
    request["output_mode"] = "text"
    choices = [choice for frame in stream(http, url, request) for choice in frame["choices"]]
    texts = [choice["text"] or "" for choice in choices]
    assert "".join(texts) == "你好 🚀 é"
    assert sum(len(choice["token_ids"]) for choice in choices) == 14
    assert not any("\ufffd" in text for text in texts)


def test_a_seed_gives_the_same_tokens_and_logprobs_in_a_crowd(http, url):
    alone = ask(http, url, body(**LENGTH))
    with ThreadPoolExecutor(64) as pool, httpx.Client(timeout=120.0, limits=httpx.Limits()) as many:
        requests = [body(**LENGTH | {"seed": 1234 if i % 16 == 5 else i}) for i in range(64)]
        answers = list(pool.map(lambda request: read(stream(many, url, request)), requests))
    assert [answers[i] for i in range(5, 64, 16)] == [alone] * 4
    assert all(len(answer[0].token_ids) == len(answer[0].logprobs) == 32 for answer in answers)


def test_weight_versions_come_on_the_last_frame_in_two_spans_after_a_change(http, engine, url):
    _control(http, f"{engine.url}/update_weight_version", json={"new_version": "before"})
    seen = []
    with http.stream("POST", url + GENERATE, json=body(**LONG | {"max_tokens": 1000})) as response:
        for at, frame in enumerate(frames(response)):
            seen += [choice["weight_versions"] for choice in frame["choices"]]
            if at == 20:
                _control(http, f"{engine.url}/pause", params={"mode": "keep"})
                _control(http, f"{engine.url}/update_weight_version", json={"new_version": "after"})
                _control(http, f"{engine.url}/resume")
    assert set(map(str, seen[:-1])) == {"None"}
    first, second = seen[-1]
    assert (first["version"], first["start"]) == ("before", 0)
    assert (second["version"], second["start"], second["end"]) == ("after", first["end"], 1000)


@pytest.mark.parametrize("how", ["inference", "all", "pause"])
def test_an_abort_is_the_finish_and_keeps_what_came_before(http, engine, url, how):
    got, at_abort = [], 0
    with http.stream("POST", url + GENERATE, json=body(**LONG)) as response:
        for at, frame in enumerate(frames(response)):
            got.append(frame)
            if at == 20:
                at_abort = len(read(got)[0].token_ids)
                _abort(http, engine.url, how, frame["request_id"])
    *_, last, usage = got
    aborted = read(got)[0]
    assert aborted.finish_reason == "abort"
    assert aborted.stop_reason is None
    assert at_abort <= len(aborted.token_ids) == len(aborted.logprobs) < LONG["max_tokens"]
    assert usage["usage"]["completion_tokens"] == len(aborted.token_ids)
    if how != "pause":
        assert last["choices"][0]["token_ids"] == []

    kept = {"max_tokens": len(aborted.token_ids)}
    whole = ask(http, engine.url, body(**LONG | kept))[0]
    assert (aborted.token_ids, aborted.logprobs) == (whole.token_ids, whole.logprobs)


def test_an_abort_of_an_unknown_request_changes_nothing(http, engine, url):
    got = []
    with http.stream("POST", url + GENERATE, json=body(**LENGTH)) as response:
        for frame in frames(response):
            if not got:
                _abort(http, engine.url, "inference", frame["request_id"].removeprefix("generate-tokens-"))
            got.append(frame)
    assert read(got)[0].finish_reason == "length"


def test_pause_keep_stalls_and_resume_goes_on(http, engine, url):
    got = []
    with http.stream("POST", url + GENERATE, json=body(**LONG | {"max_tokens": 500})) as response:
        for at, frame in enumerate(frames(response)):
            got.append(frame)
            if at == 20:
                _control(http, f"{engine.url}/pause", params={"mode": "keep"})
                assert http.get(f"{engine.url}/is_paused").json() == {"is_paused": True}
                _control(http, f"{engine.url}/resume")
    assert read(got) == ask(http, url, body(**LONG | {"max_tokens": 500}))


def test_a_client_that_leaves_ends_its_request(http, engine, url):
    finished = _counted(http, engine.url, "length")
    with http.stream("POST", url + GENERATE, json=body(**LONG)) as response:
        reading = frames(response)  # kept, since dropping it would close the connection
        next(reading)
        _wait_until_running(http, engine.url, 1)
    _wait_until_running(http, engine.url, 0)
    # Dropped, not finished: it is not among those that ended by their length.
    assert _counted(http, engine.url, "length") == finished


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"prompt": [999999]}, "Token id 999999 is out of vocabulary"),
        ({"prompt": PROMPT * 432}, "longer than the maximum model length"),
        ({"logprobs": 21}, "Requested sample logprobs of 21"),
        ({"structured_outputs": {"regex": "("}}, ""),
    ],
)
def test_a_refusal_after_the_head_is_an_error_frame_under_status_200(http, url, changed, message):
    (frame,) = stream(http, url, body(**{"max_tokens": 4, **changed}))
    assert frame.keys() == {"error"}
    assert message in frame["error"]["message"]
    assert (frame["error"]["type"], frame["error"]["code"]) == ("BadRequestError", 400)


@pytest.mark.parametrize(
    ("changed", "status", "message"),
    [
        ({"model": "nope"}, 404, "The model `nope` does not exist. Valid aliases: tiny."),
        ({"token_ids": []}, 400, "at least 1 item"),
        ({"sampling_params": {"max_tokens": -1}}, 400, "max_tokens must be at least 1"),
        ({"sampling_params": {"temperature": -1.0}}, 400, "temperature must be non-negative"),
        ({"sampling_params": None}, 400, "sampling_params"),
    ],
)
def test_a_refusal_before_the_head_is_json_whatever_the_router_calls_it(http, url, changed, status, message):
    response = http.post(url + GENERATE, json=body(max_tokens=4) | changed)
    assert response.status_code == status
    assert message in response.json()["error"]["message"]


def _abort(http: httpx.Client, url: str, how: str, request_id: str) -> None:
    if how == "inference":
        _control(http, f"{url}/inference/v1/abort_requests", json={"request_ids": [request_id]})
    elif how == "all":
        _control(http, f"{url}/abort_requests", json={})
    else:
        _control(http, f"{url}/pause", params={"mode": "abort"})
        _control(http, f"{url}/resume")


def _control(http: httpx.Client, url: str, **arguments: Any) -> None:
    http.post(url, **arguments).raise_for_status()


def _wait_until_running(http: httpx.Client, url: str, number: int) -> None:
    """Return when the engine says that it runs this many requests; it counts after each of its steps."""
    deadline = time.monotonic() + 15
    while (running := _sum(http, url, "vllm:num_requests_running")) != number:
        assert time.monotonic() < deadline, f"{running} requests run"
        time.sleep(0.05)


def _counted(http: httpx.Client, url: str, reason: str) -> float:
    """Return how many requests ended for this reason."""
    return _sum(http, url, "vllm:request_success_total", f'finished_reason="{reason}"')


def _sum(http: httpx.Client, url: str, name: str, label: str = "") -> float:
    return sum(value for line, value in _metrics(http, url) if line.startswith(name) and label in line)


def _metrics(http: httpx.Client, url: str) -> list[tuple[str, float]]:
    lines = http.get(f"{url}/metrics").text.splitlines()
    return [
        (line.rsplit(" ", 1)[0], float(line.rsplit(" ", 1)[1])) for line in lines if line[:1] not in ("", "#")
    ]
