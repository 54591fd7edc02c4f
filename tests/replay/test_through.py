"""A user's generate function against a recording: what it is given, and what is said of its samples."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest

from replay.memory import MemoryLog
from rollout_log.events import Closed, Opened
from rollout_log.fixture import FixtureReader
from rollout_log.record.samples import Samples
from rollout_log.replay.checking import CannotCheck, Difference
from rollout_log.replay.through import FunctionNotFound, PlainSample, load_function, run_through

PATH = "/inference/v1/generate"
PARAMS = {"temperature": 0.7, "top_p": 1.0, "top_k": -1, "max_tokens": 8, "logprobs": 1, "stop": ["\n"]}
PARAMS |= {"ignore_eos": True, "min_tokens": 2, "vendor": {"a": [1]}}


def sse(*ids: int, finish: str | None = None) -> bytes:
    logprobs = {"content": [{"token": f"token_id:{i}", "logprob": -i / 100} for i in ids]}
    choice = {"index": 0, "token_ids": list(ids), "logprobs": logprobs, "finish_reason": finish}
    return b"data: " + json.dumps({"choices": [choice], "weight_version": "7"}).encode() + b"\n\n"


def recorded(*requests: tuple[list[bytes], str], status: int = 200) -> FixtureReader:
    """One sample; each request goes on from all tokens so far, and ends as it says."""
    log = MemoryLog()
    samples = Samples(log)  # type: ignore[arg-type]
    for frames, how in requests:
        live = samples.get("k")
        so_far = live.rollout.choice().token_ids if live else []
        body = {
            "model": "tiny",
            "token_ids": [1, 2, *so_far],
            "sampling_params": {**PARAMS, "max_tokens": 8 - len(so_far)},
            "stream": True,
        }
        opened = Opened("k", group_index=3, index=12, metadata={"label": "4", "prompt": "2+2"})
        exchange = samples.request("k", path=PATH, body=json.dumps(body).encode(), opened=opened)
        exchange.respond(status, [("content-type", "text/event-stream")])
        for frame in frames:
            exchange.feed(frame)
        exchange.end(how)  # type: ignore[arg-type]
    return FixtureReader(Path("memory"), log.written)


async def generate(args, sample, sampling_params):
    """As a user would write it."""
    params = {**PARAMS, "max_tokens": sampling_params["max_new_tokens"] - sample.response_length}
    body = {
        "model": args.hf_checkpoint,
        "token_ids": sample.tokens,
        "sampling_params": params,
        "stream": True,
    }
    url = f"http://{args.vllm_router_ip}:{args.vllm_router_port}{PATH}"
    sample.rollout_log_probs = sample.rollout_log_probs or []
    async with (
        httpx.AsyncClient(timeout=None, trust_env=False) as client,
        client.stream("POST", url, json=body) as response,
    ):
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                [choice] = json.loads(line[6:])["choices"]
                sample.tokens += choice["token_ids"]
                sample.response_length += len(choice["token_ids"])
                sample.rollout_log_probs += [each["logprob"] for each in choice["logprobs"]["content"]]
                if choice["finish_reason"] is not None:
                    ends = {"stop": "COMPLETED", "length": "TRUNCATED", "abort": "ABORTED"}
                    sample.status = sample.Status[ends[choice["finish_reason"]]]
    return sample


WHOLE = ([sse(11, 12), sse(13, finish="stop"), b"data: [DONE]\n\n"], "eof")
RESUMED = [
    ([sse(11, 12), sse(13), sse(finish="abort"), b"data: [DONE]\n\n"], "eof"),
    ([sse(14, finish="stop"), b"data: [DONE]\n\n"], "eof"),
]


async def through(function, reader: FixtureReader) -> list[Difference]:
    return await run_through(function, reader, next(reader.samples()))


async def test_a_function_that_does_the_same_differs_in_nothing():
    assert await through(generate, recorded(WHOLE)) == []


async def test_it_is_given_what_the_trainer_would_give():
    given = SimpleNamespace()

    async def look(args, sample, sampling_params, evaluation=True):
        given.args, given.sample, given.params, given.evaluation = args, sample, sampling_params, evaluation
        given.before = (sample.prompt, list(sample.tokens), sample.label, sample.group_index, sample.index)
        return await generate(args, sample, sampling_params)

    assert await through(look, recorded(WHOLE)) == []
    assert given.before == ("2+2", [1, 2], "4", 3, 12)
    assert given.args.hf_checkpoint == "tiny"
    assert given.args.vllm_router_ip == given.args.sglang_router_ip == "127.0.0.1"
    assert given.evaluation is False
    assert given.params == {
        "temperature": 0.7,
        "top_p": 1.0,
        "top_k": -1,
        "max_new_tokens": 8,
        "stop": ["\n"],
        "ignore_eos": True,
        "min_new_tokens": 2,
        "vendor": {"a": [1]},
    }


async def test_it_is_aborted_where_the_recording_was_and_called_again():
    calls = []

    async def counted(args, sample, sampling_params):
        calls.append(list(sample.tokens))
        return await generate(args, sample, sampling_params)

    assert await through(counted, recorded(*RESUMED)) == []
    assert calls == [[1, 2], [1, 2, 11, 12, 13]]


async def test_it_is_cancelled_where_it_asks_for_that():
    async def cancellable(args, sample, sampling_params):
        try:
            return await generate(args, sample, sampling_params)
        except asyncio.CancelledError:
            cancelled.append(sample.response_length)
            raise

    cancelled: list[int] = []
    cancellable.abort_mode = "request"
    assert await through(cancellable, recorded(([sse(11, 12)], "cancelled"), RESUMED[1])) == []
    assert cancelled == [2]


async def test_differences_name_the_place():
    async def wrong(args, sample, sampling_params):
        sample = await generate(args, sample, sampling_params)
        sample.rollout_log_probs[1] = 0.0
        sample.loss_mask = [1, 1, 0]
        sample.weight_versions = ["8"]
        sample.status = PlainSample.Status.TRUNCATED
        return sample

    assert await through(wrong, recorded(WHOLE)) == [
        Difference("k", "status", "completed", "truncated"),
        Difference("k", "loss_mask[2]", 1, 0),
        Difference("k", "rollout_log_probs[1]", -0.12, 0.0),
        Difference("k", "weight_versions[0]", "7", "8"),
    ]


async def test_what_it_asks_otherwise_is_named():
    async def hotter(args, sample, sampling_params):
        url = f"http://{args.vllm_router_ip}:{args.vllm_router_port}{PATH}"
        params = {**PARAMS, "temperature": 1.5}
        body = {"model": "tiny", "token_ids": [1, 2], "sampling_params": params, "stream": True}
        async with httpx.AsyncClient(trust_env=False) as client:
            assert (await client.post(url, json=body)).status_code == 404
        return sample

    found = await through(hotter, recorded(WHOLE))
    assert [(each.field, each.recorded) for each in found] == [
        ("status", "completed"),
        ("tokens[2]", 11),
        ("requests", "not made"),
    ]
    assert "temperature is 1.5, recorded 0.7" in found[-1].replayed


async def test_what_it_raises_is_a_difference(caplog):
    found = await through(generate, recorded(([sse(11)], "reset")))
    assert [(each.sample, each.field) for each in found] == [("k", "raised")]
    assert found[0].replayed.startswith("RemoteProtocolError: ")
    assert "the function raised on sample 'k'" in caplog.text


async def test_what_it_raises_for_a_miss_names_the_miss_and_no_address():
    async def hotter(args, sample, sampling_params):
        url = f"http://{args.vllm_router_ip}:{args.vllm_router_port}{PATH}"
        body = {"model": "tiny", "token_ids": [1, 2], "stream": True}
        body["sampling_params"] = {**PARAMS, "top_k": 9}
        async with httpx.AsyncClient(trust_env=False) as client:
            (await client.post(url, json=body)).raise_for_status()

    raised, missed = await through(hotter, recorded(WHOLE))
    assert raised.replayed == f"HTTPStatusError: Client error '404 Not Found' for url '{PATH}'"
    assert missed.field == "requests"
    assert "top_k is 9, recorded -1" in missed.replayed


async def test_a_request_it_does_not_make_is_named():
    async def lazy(args, sample, sampling_params):
        sample = await generate(args, sample, sampling_params)
        sample.status = sample.Status.COMPLETED
        return sample

    assert Difference("k", "requests[1]", "made", "not made") in await through(lazy, recorded(*RESUMED))


async def test_a_sample_without_requests_is_passed_over():
    reader = FixtureReader(Path("memory"), [[Opened("k"), Closed("completed")]])
    with pytest.raises(CannotCheck, match="sample 'k' has no request for tokens"):
        await through(generate, reader)


def test_a_function_is_named_as_trainers_name_it(tmp_path, monkeypatch):
    (tmp_path / "users_module.py").write_text("async def generate(a, s, p): ...\ndef plain(): ...\nx = 5\n")
    monkeypatch.chdir(tmp_path)
    assert load_function("users_module:generate") is load_function("users_module.generate")
    for path in ("users_module:missing", "no_such_module:f", "users_module:plain", "generate", ""):
        with pytest.raises(FunctionNotFound):
            load_function(path)
