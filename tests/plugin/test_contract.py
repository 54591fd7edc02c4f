"""What a trainer may expect of a generate function, whatever else it does."""

from __future__ import annotations

import copy
import importlib
import inspect
import re
from contextvars import ContextVar
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from plugin.scripted import QUESTION, Scripted, delta, generate, new_sample, result
from rollout_log import slime, vime
from rollout_log.log import LogReader
from rollout_log.trainer.session import close_session
from rollout_log.vime.request import request_params
from trainer.conftest import Rig
from trainer.sample_double import Sample, Status
from trainer.trainer_double import NEW_VIME, OLD_VIME, SLIME
from trainer.truth import Tokenizer, expected_tokens

PROMPT = Tokenizer().encode(QUESTION)
TOKENS = expected_tokens(PROMPT, 0, 10)
WHOLE = [delta(TOKENS, 0, "stop"), "[DONE]"]
EITHER = pytest.mark.parametrize("plugin", [vime, slime], ids=["vime", "slime"])


@EITHER
def test_the_signature_and_the_way_to_abort(plugin: Any) -> None:
    assert list(inspect.signature(plugin.generate).parameters) == [
        "args",
        "sample",
        "sampling_params",
        "evaluation",
    ]
    assert inspect.iscoroutinefunction(plugin.generate)
    assert plugin.generate.abort_mode == "request"
    module, _, name = f"{plugin.__name__}.generate".rpartition(".")
    assert getattr(importlib.import_module(module), name) is plugin.generate


class SevenAttributes:
    """As in vime's contract tests: on the class, so that `vars(args)` is empty."""

    partial_rollout = False
    mask_offpolicy_in_partial_rollout = False
    group_rm = False
    custom_generate_function_path = None
    vllm_enable_deterministic_inference = False
    rollout_seed = 7
    n_samples_per_prompt = 2


class Args(SevenAttributes):
    vllm_router_ip = sglang_router_ip = "127.0.0.1"
    vllm_router_port = sglang_router_port = 1


@EITHER
def test_seven_attributes_a_temperature_and_a_state_without_a_tokenizer(
    rig: Rig, plugin: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = NEW_VIME if plugin is vime else SLIME
    _, trainer = rig(layout, generate=plugin.generate, questions=[QUESTION])
    # Looked up when it is called, as tests replace it in the module.
    monkeypatch.setattr(
        trainer.modules[layout.rollout], "GenerateState", lambda args: SimpleNamespace(args=args)
    )
    trainer.args, trainer.sampling_params = Args(), {"temperature": 0.3}
    sample = Sample(index=0, prompt=QUESTION, tokens=list(PROMPT), reward=0.5)
    params = trainer.sampling_params
    engine = Scripted(WHOLE if plugin is vime else [result(TOKENS, "stop"), "[DONE]"])
    returned = generate(trainer, plugin.generate, engine, sample)
    assert returned is sample
    assert params == {"temperature": 0.3}
    assert (sample.status, sample.tokens, sample.response_length) == (Status.COMPLETED, PROMPT + TOKENS, 10)
    assert isinstance(sample.response, str)
    assert sample.reward == 0.5
    wanted = {"temperature": 0.3, "logprobs": 1} if plugin is vime else {"temperature": 0.3}
    assert engine.bodies[0]["sampling_params"] == wanted


@EITHER
def test_without_engines_it_says_so(rig: Rig, plugin: Any) -> None:
    _, trainer = rig(NEW_VIME if plugin is vime else SLIME, generate=plugin.generate, questions=[QUESTION])
    trainer.args = SevenAttributes()
    with pytest.raises(Exception, match="router_ip"):
        generate(trainer, plugin.generate, Scripted(WHOLE), new_sample())


@EITHER
def test_shared_sampling_params_and_siblings_are_left_alone(rig: Rig, plugin: Any) -> None:
    _, trainer = rig(NEW_VIME if plugin is vime else SLIME, generate=plugin.generate, questions=[QUESTION])
    original = new_sample(metadata={"source": "a"}, tokens=list(PROMPT))
    sibling = copy.copy(original)  # a shallow one, which shares every list and dict
    params = copy.deepcopy(trainer.sampling_params)
    engine = Scripted(WHOLE if plugin is vime else [result(TOKENS, "stop")])
    generate(trainer, plugin.generate, engine, original)
    assert trainer.sampling_params == params
    assert (sibling.tokens, sibling.metadata) == (PROMPT, {"source": "a"})


def test_siblings_that_share_a_session_have_keys_of_their_own(rig: Rig) -> None:
    _, trainer = rig(generate=vime.generate, questions=[QUESTION])
    original = new_sample(session_id="12345678-90ab-cdef")
    twin = copy.deepcopy(original)
    for sample in (original, twin):
        generate(trainer, vime.generate, Scripted(WHOLE), sample)
    first, second = (sample.metadata["rollout_log"]["key"] for sample in (original, twin))
    assert first == "t0-12345678-90a"
    assert re.fullmatch(first + "-[0-9a-f]{6}", second)


def test_a_sample_without_a_session_keeps_its_random_key(rig: Rig) -> None:
    _, trainer = rig(OLD_VIME, generate=vime.generate, questions=[QUESTION])
    sample = new_sample(session_id=None)
    cut = [delta(TOKENS[:4], 0, "abort"), "[DONE]"]
    generate(trainer, vime.generate, Scripted(cut), sample)
    key = sample.metadata["rollout_log"]["key"]
    assert re.fullmatch("t0-[0-9a-f]{12}", key)
    generate(trainer, vime.generate, Scripted([delta(TOKENS[4:], 4, "stop")]), sample)
    assert sample.metadata["rollout_log"]["key"] == key
    assert sample.status is Status.COMPLETED


def test_nothing_left_of_the_budget_is_truncated_without_a_request(rig: Rig) -> None:
    _, trainer = rig(generate=vime.generate, questions=[QUESTION])
    engine = Scripted(WHOLE)
    sample = new_sample(tokens=PROMPT + TOKENS[:4], response_length=4, rollout_log_probs=[-1.0] * 4)
    assert generate(trainer, vime.generate, engine, sample, max_new_tokens=4) is sample
    assert (sample.status, engine.bodies) == (Status.TRUNCATED, [])


def test_the_map_of_parameters() -> None:
    trainer = {
        "max_new_tokens": 64,
        "min_new_tokens": 3,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 20,
        "seed": 7,
        "repetition_penalty": 1.1,
        "stop": ["a"],
        "no_stop_trim": True,
        "stop_token_ids": [5],
        "skip_special_tokens": 1,
        "spaces_between_special_tokens": False,
    }
    assert request_params(trainer, 60) == {
        "max_tokens": 60,
        "min_tokens": 3,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 20,
        "seed": 7,
        "repetition_penalty": 1.1,
        "stop": ["a"],
        "include_stop_str_in_output": True,
        "stop_token_ids": [5],
        "skip_special_tokens": True,
        "spaces_between_special_tokens": False,
        "logprobs": 1,
    }
    nothing: dict[str, Any] = {
        "temperature": 1.0,
        "top_k": 0,
        "stop": [],
        "stop_token_ids": None,
        "seed": None,
    }
    assert request_params(nothing, None) == {"temperature": 1.0, "logprobs": 1}
    assert request_params({"top_k": -1}, None) == {"top_k": -1, "logprobs": 1}


@pytest.mark.parametrize(
    ("plugin", "policy", "header"),
    [
        (vime, "consistent_hash", "x-session-id"),
        (slime, "consistent_hashing", "x-smg-routing-key"),
        (vime, "round_robin", None),
        (slime, None, None),
    ],
)
def test_the_session_is_told_where_the_router_hashes_it(
    rig: Rig, plugin: Any, policy: str | None, header: str | None
) -> None:
    layout = NEW_VIME if plugin is vime else SLIME
    _, trainer = rig(layout, generate=plugin.generate, questions=[QUESTION], router_policy=policy)
    engine = Scripted(WHOLE if plugin is vime else [result(TOKENS, "stop")])
    sample = new_sample()
    generate(trainer, plugin.generate, engine, sample)
    told = {name: value for name, value in engine.headers[0].items() if value == sample.session_id}
    assert told == ({header: sample.session_id} if header else {})
    assert not [name for name in engine.headers[0] if name.startswith("x-rollout-log")]


def test_the_step_is_the_trainers(rig: Rig, log: Path) -> None:
    _, trainer = rig(generate=vime.generate, questions=[QUESTION])
    hooks = trainer.modules["vime.rollout.sample_hooks"]
    hooks._task_rollout_id = ContextVar("step", default=None)

    async def in_step_seven(args: Any, sample: Sample, params: dict[str, Any]) -> Sample:
        hooks._task_rollout_id.set(7)
        return await vime.generate(args, sample, params)  # type: ignore[no-any-return]

    async def evaluating(args: Any, sample: Sample, params: dict[str, Any]) -> Sample:
        return await vime.generate(args, sample, params, evaluation=True)  # type: ignore[no-any-return]

    hooks.set_current_rollout_id(None)
    generate(trainer, vime.generate, Scripted(WHOLE), new_sample(session_id="unknown"))
    hooks.set_current_rollout_id(3)
    generate(trainer, vime.generate, Scripted(WHOLE), new_sample(session_id="global"))
    generate(trainer, in_step_seven, Scripted(WHOLE), new_sample(session_id="context"))
    generate(trainer, evaluating, Scripted(WHOLE), new_sample(session_id="evaluation"))
    close_session()
    with LogReader.open(log) as reader:
        steps = {entry.summary.key: entry.summary.step for entry in reader.samples()}
    assert steps == {"t0-unknown": None, "t0-global": 3, "t0-context": 7, "e0-evaluation": 3}
