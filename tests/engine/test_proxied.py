"""The recording proxy before a real engine: what a client reads is what the log has, whatever ends it."""

from __future__ import annotations

import time

import httpx
import pytest

from engine.folded import told
from engine.wire import GENERATE, GREEDY, PROMPT, ask, body, frames, read
from rollout_log.record.headers import KEY_HEADER

pytestmark = pytest.mark.engine

LONG = GREEDY | {"max_tokens": 8000}


@pytest.mark.parametrize("how", ["inference", "all", "pause", "sleep"])
def test_an_abort_that_goes_through_the_proxy_as_well(http, engine, proxy, how):
    got = []
    with http.stream("POST", proxy.url + GENERATE, json=body(**LONG), headers={KEY_HEADER: how}) as response:
        for at, frame in enumerate(frames(response)):
            got.append(frame)
            if at == 20:
                _abort(http, proxy.url, how, frame["request_id"])
    seen, rollout = read(got), proxy.rollout(how)
    assert told(rollout) == seen
    assert seen[0].finish_reason == "abort"
    assert (rollout.status, rollout.ended_of(rollout.requests[-1])) == ("aborted", "aborted")
    kept = {"max_tokens": len(seen[0].token_ids)}
    whole = ask(http, engine.url, body(**LONG | kept))[0]
    assert (seen[0].token_ids, seen[0].logprobs) == (whole.token_ids, whole.logprobs)


def test_a_client_that_leaves_is_a_cancel_and_frees_the_engine(http, proxy):
    got = []
    with http.stream(
        "POST", proxy.url + GENERATE, json=body(**LONG), headers={KEY_HEADER: "left"}
    ) as response:
        reading = frames(response)  # kept, since dropping it would close the connection
        got += [next(reading) for _ in range(20)]
        assert _running(http, proxy.url) == 1
    deadline = time.monotonic() + 15
    while _running(http, proxy.url):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    rollout = proxy.rollout("left")
    assert (rollout.status, rollout.ended_of(rollout.requests[-1])) == ("aborted", "cancelled")
    seen = read(got)[0].token_ids
    assert rollout.choice().token_ids[: len(seen)] == seen


@pytest.mark.parametrize(
    ("name", "changed", "status"),
    [
        ("unknown model", {"model": "nope"}, 404),
        ("no tokens", {"token_ids": []}, 400),
        ("negative token", {"token_ids": [-1]}, 400),
        ("no parameters", {"sampling_params": None}, 400),
        ("negative budget", {"sampling_params": {"max_tokens": -1}}, 400),
        ("temperature", {"sampling_params": {"temperature": -1.0}}, 400),
        ("top_p", {"sampling_params": {"top_p": 2.0}}, 400),
        ("min over max", {"sampling_params": {"min_tokens": 9, "max_tokens": 4}}, 400),
        ("too many choices", {"sampling_params": {"n": 1000}}, 400),
        ("stop without text", {"sampling_params": {"stop": ["a"], "detokenize": False}}, 400),
        ("out of vocabulary", {"token_ids": [999999]}, 200),
        ("too long", {"token_ids": PROMPT * 432}, 200),
        ("fills the context", {"token_ids": (PROMPT * 432)[:8192]}, 200),
        ("too many log-probs", {"sampling_params": {"logprobs": 21}}, 200),
        ("bad grammar", {"sampling_params": {"structured_outputs": {"regex": "("}}}, 200),
    ],
)
def test_an_error_comes_through_as_it_is_and_fails_the_sample(http, engine, proxy, name, changed, status):  # noqa: PLR0917 - fixtures
    request = body(max_tokens=4) | changed
    direct = http.post(engine.url + GENERATE, json=request)
    proxied = http.post(proxy.url + GENERATE, json=request, headers={KEY_HEADER: name})
    assert (proxied.status_code, proxied.content) == (direct.status_code, direct.content)
    assert proxied.status_code == status
    rollout = proxy.rollout(name)
    assert rollout.status == "failed"
    assert rollout.ended_of(rollout.requests[-1]) == ("engine_error" if status == 200 else "http_error")
    assert rollout.requests[-1].http_status == status


@pytest.mark.parametrize(
    ("how", "content", "content_type", "status"),
    [
        ("malformed", b'{"model": ', "application/json", 400),
        ("plain", b"{}", "text/plain", 400),
        ("empty", b"", "application/json", 400),
    ],
)
def test_a_body_that_is_no_request_is_kept_too(http, engine, proxy, how, content, content_type, status):  # noqa: PLR0917 - fixtures
    headers = {"content-type": content_type}
    direct = http.post(engine.url + GENERATE, content=content, headers=headers)
    proxied = http.post(proxy.url + GENERATE, content=content, headers=headers | {KEY_HEADER: how})
    assert (proxied.status_code, proxied.content) == (direct.status_code, direct.content)
    assert proxied.status_code == status
    assert proxy.rollout(how).status == "failed"


def _abort(http: httpx.Client, url: str, how: str, request_id: str) -> None:
    calls = {
        "inference": [("/inference/v1/abort_requests", {"json": {"request_ids": [request_id]}})],
        "all": [("/abort_requests", {"json": {}})],
        "pause": [("/pause", {"params": {"mode": "abort"}}), ("/resume", {})],
        "sleep": [("/sleep", {"params": {"level": 1}}), ("/wake_up", {})],
    }
    for path, arguments in calls[how]:
        http.post(url + path, **arguments).raise_for_status()


def _running(http: httpx.Client, url: str) -> float:
    lines = http.get(f"{url}/metrics").text.splitlines()
    return sum(
        float(line.rpartition(" ")[2]) for line in lines if line.startswith("vllm:num_requests_running")
    )
