"""The rig itself: clean runs are clean, faults arrive as ordered, and no mistake goes unseen."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import httpx
import pytest

from trainer.checks import open_spans
from trainer.engine_double import EngineDouble
from trainer.faults import EVERY_FAULT, Fault, InOrder, Seeded
from trainer.reference import BUGS, reference
from trainer.sample_double import FIELDS, Sample, Status
from trainer.trainer_double import LAYOUTS, NEW_VIME, OLD_VIME, SLIME, Layout, Stuck, TrainerDouble
from trainer.truth import (
    EOS,
    Tokenizer,
    ends_at,
    expected_logprob,
    expected_tokens,
    prompt_text,
    split_prompt,
    version_of,
)

TWO_END_TWO_HOLD = [
    prompt_text(0, tokens=30),
    prompt_text(1, tokens=25),
    prompt_text(2, hold=20),
    prompt_text(3, tokens=50, hold=31),
]


# Truth


def test_tokens_are_a_function_of_prompt_and_absolute_position():
    prompt = Tokenizer().encode(prompt_text(7, tokens=40))
    whole = expected_tokens(prompt, 0, 100)
    assert len(whole) == 40
    assert whole[-1] == EOS
    assert EOS not in whole[:-1]
    assert expected_tokens(prompt, 13, 9) == whole[13:22]
    assert whole != expected_tokens(Tokenizer().encode(prompt_text(8, tokens=40)), 0, 100)


def test_a_log_prob_belongs_to_one_position_and_version():
    prompt = Tokenizer().encode(prompt_text(7))
    logprob = expected_logprob(prompt, 5, "1")
    assert version_of(prompt, 5, logprob, ["0", "1"]) == "1"
    assert version_of(prompt, 6, logprob, ["0", "1"]) is None
    assert version_of(prompt, 5, 0.0, ["0", "1"]) is None
    assert json.loads(json.dumps(logprob)) == logprob


def test_some_cuts_split_a_character():
    tokenizer = Tokenizer()
    response = expected_tokens(tokenizer.encode(prompt_text(7)), 0, 60)
    whole = tokenizer.decode(response)
    split = [
        cut
        for cut in range(60)
        if tokenizer.decode(response[:cut]) + tokenizer.decode(response[cut:]) != whole
    ]
    assert "�" not in whole
    assert 10 < len(split) < 40


def test_the_tokenizer_knows_where_a_prompt_ends():
    ids = Tokenizer().encode(prompt_text(7, tokens=12) + "ab")
    prompt, response = split_prompt(ids)
    assert Tokenizer().decode(prompt, skip_special_tokens=False) == prompt_text(7, tokens=12)
    assert Tokenizer().decode(response) == "ab"
    assert ends_at(prompt) == 12


# The engine


async def test_vllm_frames_have_the_shape_of_the_real_ones():
    prompt = Tokenizer().encode(prompt_text(1, tokens=5))
    with EngineDouble(frame_tokens=2) as engine:
        frames = await _stream(engine, prompt)
    *deltas, usage = frames
    assert set(deltas[0]) == {"request_id", "usage", "output_mode", "choices"}
    assert set(deltas[0]["choices"][0]) == {
        "index", "finish_reason", "stop_reason", "token_ids", "routed_experts", "sampling_mask",
        "weight_versions", "logprobs",
    }  # fmt: skip
    assert [token for each in deltas for token in each["choices"][0]["token_ids"]] == expected_tokens(
        prompt, 0, 5
    )
    assert [each["choices"][0]["finish_reason"] for each in deltas][-1] == "stop"
    assert [each["choices"][0]["weight_versions"] for each in deltas[:-1]] == [None] * (len(deltas) - 1)
    assert deltas[-1]["choices"][0]["weight_versions"] == [{"version": "0", "start": 0, "end": 5}]
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == 5


async def test_a_version_change_in_mid_stream_makes_two_spans():
    prompt = Tokenizer().encode(prompt_text(1, tokens=9, hold=4))
    with EngineDouble() as engine:
        stream = asyncio.ensure_future(_stream(engine, prompt))
        await _until(lambda: engine.holding == 1)
        engine.set_version("1")
        engine.release()
        frames = await stream
    last = frames[-2]["choices"][0]
    assert last["weight_versions"] == [
        {"version": "0", "start": 0, "end": 4},
        {"version": "1", "start": 4, "end": 9},
    ]
    assert last["logprobs"]["content"][-1]["logprob"] == expected_logprob(prompt, 8, "1")


async def test_a_resumed_request_goes_on_at_the_absolute_position():
    prompt = Tokenizer().encode(prompt_text(1, tokens=9))
    with EngineDouble() as engine:
        frames = await _stream(engine, prompt + expected_tokens(prompt, 0, 6))
        assert engine.violations == []
        await _stream(engine, prompt + [77] * 3)
        assert "token 0 is 77" in engine.violations[0]
    assert [token for each in frames[:-1] for token in each["choices"][0]["token_ids"]] == expected_tokens(
        prompt, 6, 3
    )


@pytest.mark.parametrize("incremental", [False, True])
async def test_sglang_repeats_the_output_unless_it_is_incremental(incremental: bool):
    prompt = Tokenizer().encode(prompt_text(1, tokens=7))
    body = {
        "input_ids": prompt,
        "sampling_params": {"max_new_tokens": 20},
        "return_logprob": True,
        "stream": True,
    }
    with EngineDouble(incremental=incremental, frame_tokens=2) as engine:
        frames = await _stream(engine, prompt, "/generate", body)
    shown = [[token for _, token, _ in each["meta_info"]["output_token_logprobs"]] for each in frames]
    said = expected_tokens(prompt, 0, 7)
    assert ([token for each in shown for token in each] if incremental else shown[-1]) == said
    assert frames[-1]["meta_info"]["finish_reason"] == {"type": "stop", "matched": EOS}
    assert frames[-1]["meta_info"]["completion_tokens"] == 7


async def test_the_whole_answer_is_the_stream_in_one():
    prompt = Tokenizer().encode(prompt_text(1, tokens=7))
    body = {"token_ids": prompt, "sampling_params": {"max_tokens": 4, "logprobs": 1}}
    with EngineDouble() as engine:
        answer = (await _ask(engine, "POST", "/inference/v1/generate", body)).json()
    assert answer["choices"][0]["token_ids"] == expected_tokens(prompt, 0, 4)
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 4


async def test_stop_tokens_and_strings_cut_the_frame():
    prompt = Tokenizer().encode(prompt_text(1))
    said = expected_tokens(prompt, 0, 60)
    token = next(each for each in said[10:] if each not in said[:10])
    for params in (
        {"stop_token_ids": [token]},
        {"stop": Tokenizer().decode(said[: said.index(token) + 1])[-3:]},
    ):
        with EngineDouble() as engine:
            frames = await _stream(engine, prompt, params=params)
        tokens = [each for frame in frames[:-1] for each in frame["choices"][0]["token_ids"]]
        assert frames[-2]["choices"][0]["finish_reason"] == "stop"
        if "stop_token_ids" in params:
            assert tokens == said[: said.index(token) + 1]
            assert frames[-2]["choices"][0]["stop_reason"] == token
        else:
            assert Tokenizer().decode(tokens).endswith(params["stop"])


ENDS: dict[str, Any] = {
    "fin": httpx.RemoteProtocolError,
    "fin at once": httpx.RemoteProtocolError,
    "rst": httpx.ReadError,
    "crash": httpx.RemoteProtocolError,
    "500": 500,
    "429": 429,
    "error 400": "error",
    "error 500": "error",
    "no terminal": None,
    "no terminal, no [DONE]": None,
    "slow loris": "stop",
    "coalesced": "stop",
    "split": "stop",
    "coalesced and split": "stop",
    "stall": httpx.ReadTimeout,
    "stall, then on": httpx.ReadTimeout,
    "stall, dead engine": httpx.ReadTimeout,
}


@pytest.mark.parametrize("name", ENDS)
async def test_each_fault_arrives_as_what_it_is(name: str):
    prompt = Tokenizer().encode(prompt_text(1, tokens=12))
    with EngineDouble(plan=InOrder([EVERY_FAULT[name]])) as engine:
        match ENDS[name]:
            case int(status):
                with pytest.raises(httpx.HTTPStatusError) as caught:
                    await _stream(engine, prompt)
                assert caught.value.response.status_code == status
                assert caught.value.response.headers.get("retry-after") == ("0" if status == 429 else None)
            case "error":
                frames = await _stream(engine, prompt)
                assert frames[-1]["error"]["code"] == EVERY_FAULT[name].code
            case "stop":
                frames = await _stream(engine, prompt)
                assert frames[-2]["choices"][0]["finish_reason"] == "stop"
            case None:
                frames = await _stream(engine, prompt)
                assert frames[-1]["choices"][0]["finish_reason"] is None
            case error:
                with pytest.raises(error):
                    await _stream(engine, prompt, timeout=0.3 if error is httpx.ReadTimeout else None)
        await _until(lambda: not engine.running)
        if name == "crash":
            await _until_answers(engine)
        assert engine.served[0].finish in {EVERY_FAULT[name].kind, "stop", "dropped"}
        frames = await _stream(engine, prompt)  # a fault is one request's
        assert frames[-2]["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("kind", "finish", "tokens"),
    [
        ("none", "abort", 4),
        ("token_on_abort", "abort", 5),
        ("finish_on_abort", "stop", 12),
        ("silent_abort", None, 4),
    ],
)
async def test_an_abort_ends_in_four_ways(kind: Any, finish: str | None, tokens: int):
    prompt = Tokenizer().encode(prompt_text(1, tokens=12, hold=4))
    with EngineDouble(plan=InOrder([Fault(kind)])) as engine:
        stream = asyncio.ensure_future(_stream(engine, prompt))
        await _until(lambda: engine.holding == 1)
        await _ask(engine, "POST", "/abort_requests", {})
        frames = [frame for frame in await stream if frame["choices"]]
    assert frames[-1]["choices"][0]["finish_reason"] == finish
    assert sum(len(frame["choices"][0]["token_ids"]) for frame in frames) == tokens


async def test_the_control_endpoints_answer():
    prompt = Tokenizer().encode(prompt_text(1, tokens=12, hold=4))
    with EngineDouble() as engine:
        async with httpx.AsyncClient(base_url=engine.url, trust_env=False) as client:
            assert (await client.get("/workers")).json() == {"workers": [{"url": engine.url}]}
            stream = asyncio.ensure_future(_stream(engine, prompt))
            await _until(lambda: engine.holding == 1)
            assert (await client.get("/load")).json() == {"server_load": 1}
            assert (await client.get("/v1/loads")).json()["loads"][0]["num_running_reqs"] == 1
            other = await client.post("/inference/v1/abort_requests", json={"request_ids": ["another"]})
            assert other.json()["aborted"] == 0
            assert (await client.post("/pause?mode=keep")).status_code == 200
            engine.release()
            await client.post("/update_weight_version", json={"new_version": "7"})
            assert (await client.get("/get_weight_version")).json() == {"weight_version": "7"}
            await client.post("/resume")
            assert (await stream)[-2]["choices"][0]["weight_versions"][-1]["version"] == "7"
            part = {"type": "image_url", "image_url": {"url": "data:,"}}
            body = {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}, part]}]}
            rendered = (await client.post("/v1/chat/completions/render", json=body)).json()
            place = rendered["features"]["mm_placeholders"]["image"][0]
            assert set(rendered["token_ids"][place["offset"] :][: place["length"]]) == {2}
            assert engine.violations == []
            assert (await client.get("/nowhere")).status_code == 404
            assert engine.violations == ["GET /nowhere does not exist"]


async def test_a_crash_cuts_every_stream_and_refuses_connections():
    prompt = Tokenizer().encode(prompt_text(1, tokens=12, hold=4))
    with EngineDouble() as engine:
        stream = asyncio.ensure_future(_stream(engine, prompt))
        await _until(lambda: engine.holding == 1)
        engine.crash()
        with pytest.raises(httpx.RemoteProtocolError):
            await stream
        with pytest.raises(httpx.ConnectError):
            await _stream(engine, prompt)
        engine.restart()
        await _until_answers(engine)


async def test_health_tells_a_dead_engine_from_a_slow_one():
    prompt = Tokenizer().encode(prompt_text(1, tokens=12))
    for name, status in (("stall", 200), ("stall, dead engine", 503)):
        with EngineDouble(plan=InOrder([EVERY_FAULT[name]])) as engine:
            stream = asyncio.ensure_future(_stream(engine, prompt))
            await _until(lambda: engine.stalling == 1)
            assert (await _ask(engine, "GET", "/health")).status_code == status
            stream.cancel()
            await asyncio.wait([stream])
            await _until(lambda: engine.stalling == 0)
            assert (await _ask(engine, "GET", "/health")).status_code == 200


async def test_a_stream_that_stalls_once_goes_on_when_asked_for_its_health():
    prompt = Tokenizer().encode(prompt_text(1, tokens=12))
    with EngineDouble(plan=InOrder([EVERY_FAULT["stall, then on"]])) as engine:
        stream = asyncio.ensure_future(_stream(engine, prompt))
        await _until(lambda: engine.stalling == 1)
        await _ask(engine, "GET", "/health")
        frames = await stream
    assert frames[-2]["choices"][0]["finish_reason"] == "stop"


def test_a_seeded_plan_is_reproducible_and_leaves_prompts_in_peace():
    plan = Seeded(3, [Fault("fin"), Fault("rst")], every=2, limit=10)
    kinds = [plan([1, 2], attempt).kind for attempt in range(20)]
    assert kinds == [plan([1, 2], attempt).kind for attempt in range(20)]
    assert {"fin", "rst", "none"} == set(kinds[:10])
    assert set(kinds[10:]) == {"none"}


# The loop


@pytest.mark.parametrize("abort_mode", ["request", None])
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
@pytest.mark.parametrize("mask_offpolicy", [False, True])
def test_a_clean_run_of_three_steps_has_no_problem(
    rig, layout: Layout, abort_mode: str | None, mask_offpolicy: bool
):
    engine, trainer = rig(
        layout,
        engine={"versions": "field"},
        generate=reference(layout.root, abort_mode=abort_mode),
        questions=TWO_END_TWO_HOLD,
        over_sampling=4,
        mask_offpolicy=mask_offpolicy,
        abort_when=lambda: trainer.holding == 4 or bool(trainer.delivered),
    )
    first = trainer.step(0)
    assert {sample.prompt for sample in first} == set(TWO_END_TWO_HOLD[:2])
    assert {sample.status for sample in first} == {Status.COMPLETED}
    dropped = [served for served in engine.served if served.finish == "dropped"]
    assert len(dropped) == (4 if layout.cancels and abort_mode == "request" else 0)
    held = [sample for group in trainer.data_source.buffer for sample in group]
    assert sorted((sample.index, sample.response_length) for sample in held) == [
        (4, 20),
        (5, 20),
        (6, 31),
        (7, 31),
    ]
    assert {sample.status for sample in held} == {Status.ABORTED}
    assert {sample.metadata["start_rollout_id"] for sample in held} == {0}
    engine.set_version("1")
    trainer.args.over_sampling_batch_size = 2
    second = trainer.step(1)
    assert {id(sample) for sample in second} == {id(sample) for sample in held}
    assert {sample.status for sample in second} == {Status.TRUNCATED, Status.COMPLETED}
    assert {tuple(sample.weight_versions) for sample in second} == {("0", "1")}
    masked = {sample.index: sample.loss_mask.count(0) for sample in second}
    assert masked == ({4: 20, 5: 20, 6: 31, 7: 31} if mask_offpolicy else dict.fromkeys(range(4, 8), 0))
    trainer.args.over_sampling_batch_size = 4
    engine.set_version("2")
    trainer.step(2)
    trainer.evaluate(2, {"easy": TWO_END_TWO_HOLD[:1], "hard": TWO_END_TWO_HOLD[:2]}, repeats=2)
    assert trainer.problems == []
    assert trainer.watch.looks > 50


def test_groups_that_a_filter_drops_are_replaced(rig):
    questions = [prompt_text(number, tokens=10 + number) for number in range(12)]
    _, trainer = rig(
        engine={"versions": "field"},
        generate=reference(),
        questions=questions,
        keep_group=lambda group: group[0].group_index % 2 == 1,
    )
    samples = trainer.step(0)
    assert [sample.group_index % 2 for sample in samples] == [1] * 4
    assert trainer.logged[0]["rollout/dropped"] >= 2
    assert trainer.problems == []


def test_evaluation_restarts_its_index_in_every_data_set(rig):
    for layout in (NEW_VIME, OLD_VIME):
        _, trainer = rig(
            layout, engine={"versions": "field"}, generate=reference(), questions=TWO_END_TWO_HOLD
        )
        data = trainer.evaluate(0, {"a": TWO_END_TWO_HOLD[:2], "b": TWO_END_TWO_HOLD[:1]}, repeats=2)
        assert [sample.index for sample in data["a"]["samples"]] == [0, 1, 2, 3]
        assert [sample.index for sample in data["b"]["samples"]] == [0, 1]
        assert all(
            (sample.session_id is not None) == layout.evaluation_sessions for sample in data["a"]["samples"]
        )
        assert trainer.problems == []
        trainer.__exit__()


def test_hooks_and_log_functions_are_called_as_in_the_real_loop(rig):
    seen: list[Any] = []
    _, trainer = rig(
        engine={"versions": "field"},
        generate=reference(),
        questions=TWO_END_TWO_HOLD[:2],
        rollout_sample_hook_path=["a_test.hook"],
        custom_rollout_log_function_path="a_test.log",
    )
    trainer.functions["a_test.hook"] = lambda args, sample, **more: seen.append(
        (sample.index, sample.reward, more)
    )
    trainer.functions["a_test.log"] = lambda step, args, samples, extra, seconds: extra.update(
        rewards=len(samples)
    )
    trainer.step(5)
    assert min(seen, key=lambda each: each[0]) == (0, None, {"rollout_id": 5, "evaluation": False})
    assert trainer.logged == [{"rollout/dropped": 0, "rewards": 4, "rollout/step": 5}]


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_the_modules_are_there_for_as_long_as_the_trainer(rig, layout: Layout):
    other = type(sys)("vime.left_alone")
    sys.modules["vime.left_alone"] = other
    try:
        _, trainer = rig(layout, generate=reference(), questions=TWO_END_TWO_HOLD)
        for name in (layout.rollout, layout.trace, layout.data, f"{layout.root}.utils.http_utils"):
            assert trainer.modules[name] is __import__(name, fromlist=["x"])
        absent = OLD_VIME if layout is NEW_VIME else NEW_VIME
        with pytest.raises(ImportError):
            __import__(absent.trace)
        trainer.__exit__()
        assert not [name for name in sys.modules if name.startswith("slime")]
        assert [name for name in sys.modules if name.split(".")[0] == "vime"] == ["vime.left_alone"]
    finally:
        del sys.modules["vime.left_alone"]


def test_a_sample_survives_its_dictionary():
    sample = Sample(prompt="x", tokens=[1, 2], response_length=1, status=Status.ABORTED)
    sample.spec_info.add({"spec_accept_token_num": 2, "completion_tokens": 3})
    sample.trace = {"events": []}
    again = Sample.from_dict(json.loads(json.dumps(sample.to_dict())))
    assert all(getattr(again, name) == getattr(sample, name) for name in FIELDS)
    assert again.trace == {"events": []}


def test_a_checkpoint_of_the_data_source_forgets_the_buffer(rig, tmp_path):
    """As after a kill: another trainer, an older checkpoint, the same engine."""
    engine, first = rig(
        engine={"versions": "field"},
        generate=reference(),
        questions=TWO_END_TWO_HOLD,
        over_sampling=4,
        abort_when=lambda: first.holding == 4,
        save=tmp_path,
    )
    first.data_source.save(-1)
    first.step(0)
    first.data_source.save(0)
    assert first.data_source.get_buffer_length() == 2
    first.__exit__()
    for checkpoint, index in ((-1, 0), (0, 8)):
        with TrainerDouble(
            engine.url, generate=reference(), questions=TWO_END_TWO_HOLD, versions=["0"], load=tmp_path
        ) as second:
            second.data_source.load(checkpoint)
            assert second.data_source.get_buffer_length() == 0
            assert {sample.index for sample in second.step(1)} == set(range(index, index + 4))
            assert second.problems == []


# What the rig must not let pass


@pytest.mark.parametrize("bug", BUGS)
def test_the_rig_sees(rig, bug: str):
    engine, trainer = rig(
        engine={"versions": "field"},
        generate=reference(bug=bug),
        questions=[prompt_text(0, tokens=30), prompt_text(1), *TWO_END_TWO_HOLD[2:]],
        over_sampling=4,
        mask_offpolicy=True,
        versions=["0", "1"],
        settle=0.2,
        abort_when=lambda: engine.holding == 4 or bool(trainer.delivered),
    )
    if bug == "truncated by an abort":  # only a stream that says so ends that way
        trainer.functions["a_test.generate"] = reference(abort_mode=None, bug=bug)
    trainer.step(0)
    if bug in {"old mask forgotten", "whole budget again"}:
        trainer.step(1)
    assert [problem for problem in trainer.problems if BUGS[bug] in problem]


@pytest.mark.parametrize(
    "after", [0, 1, 2], ids=["before the usage", "before [DONE]", "before the last chunk"]
)
def test_the_rig_sees_a_finished_sample_that_a_late_cancel_aborts(rig, after: int):
    ends = TWO_END_TWO_HOLD[:2]
    engine, trainer = rig(
        engine={
            "versions": "field",
            "plan": lambda prompt, attempt: Fault("linger" if ends_at(prompt) == 7 else "none", after=after),
        },
        generate=reference(),
        questions=[*ends, prompt_text(2, tokens=7), prompt_text(3, tokens=7)],
        over_sampling=4,
        abort_when=lambda: engine.lingering == 4 and trainer.ended == 4,
    )
    trainer.step(0)
    late = [problem for problem in trainer.problems if "aborted, though its last token is EOS" in problem]
    assert len(late) == len(trainer.problems) == 4


def test_a_function_that_never_returns_is_stuck(rig):
    async def generate(args, sample, sampling_params):
        await asyncio.Event().wait()

    _, trainer = rig(generate=generate, questions=TWO_END_TWO_HOLD, timeout=1.0)
    with pytest.raises(Stuck, match="0 at 0"):
        trainer.step(0)


def test_the_reference_leaves_no_span_open_and_the_stand_in_would(rig):
    _, trainer = rig(generate=reference(), questions=TWO_END_TWO_HOLD)
    sample = Sample()

    async def cancelled() -> None:
        with trainer.modules[NEW_VIME.trace].trace_span(sample, "vllm_generate"):
            await asyncio.Event().wait()

    async def cancel() -> None:
        task = asyncio.ensure_future(cancelled())
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])

    trainer.run(cancel())
    assert open_spans(sample) == ["vllm_generate"]


def test_slime_cuts_are_those_of_the_engine(rig):
    """An abort of the whole engine leaves cumulative frames that repeat the output."""
    _, trainer = rig(
        SLIME,
        engine={"plan": Seeded(1, [EVERY_FAULT["token on abort"], EVERY_FAULT["finish on abort"]], every=1)},
        generate=reference("slime"),
        questions=TWO_END_TWO_HOLD,
        over_sampling=4,
        abort_when=lambda: trainer.holding == 4 or bool(trainer.delivered),
    )
    trainer.step(0)
    lengths = {sample.response_length for group in trainer.data_source.buffer for sample in group}
    assert lengths <= {21, 32, 50, 64}
    assert lengths & {21, 32}
    trainer.step(1)
    assert trainer.problems == []


async def _stream(
    engine: EngineDouble,
    token_ids: list[int],
    path: str = "/inference/v1/generate",
    body: dict[str, Any] | None = None,
    *,
    params: dict[str, Any] | None = None,
    timeout: float | None = None,
) -> list[dict[str, Any]]:
    """The data frames of a whole stream, without [DONE]."""
    body = body or {
        "token_ids": token_ids,
        "sampling_params": {"max_tokens": 80, "logprobs": 1, **(params or {})},
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    async with (
        httpx.AsyncClient(trust_env=False, timeout=httpx.Timeout(5, read=timeout)) as client,
        client.stream("POST", engine.url + path, json=body) as response,
    ):
        response.raise_for_status()
        return [json.loads(line[6:]) async for line in response.aiter_lines() if line.startswith("data: {")]


async def _ask(engine: EngineDouble, method: str, path: str, body: Any = None) -> httpx.Response:
    async with httpx.AsyncClient(trust_env=False) as client:
        return await client.request(method, engine.url + path, json=body)


async def _until(condition: Any) -> None:
    async def wait() -> None:
        while not condition():  # noqa: ASYNC110 - it happens in the engine's thread
            await asyncio.sleep(0.001)

    await asyncio.wait_for(wait(), 10)


async def _until_answers(engine: EngineDouble) -> None:
    async with httpx.AsyncClient(trust_env=False) as client:
        for _ in range(1000):
            try:
                await client.get(f"{engine.url}/health")
            except httpx.TransportError:
                await asyncio.sleep(0.01)
            else:
                return
    raise AssertionError("the engine stayed away")
