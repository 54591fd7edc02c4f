"""Other generate functions, recorded: by decorator or by path, without a change to their code."""

from __future__ import annotations

import asyncio
import importlib
import inspect
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from plugin import user_functions
from plugin.user_functions import ANSWER_LENGTH, TOOL_OUTPUT
from rollout_log import slime, vime
from rollout_log.log import LogReader
from rollout_log.record import RecordingTransport
from rollout_log.trainer.session import close_session, session_for
from rollout_log.view import SampleView, view
from trainer.conftest import Rig
from trainer.faults import Fault, InOrder
from trainer.sample_double import Sample, Status
from trainer.trainer_double import TrainerDouble
from trainer.truth import Tokenizer, expected_tokens, prompt_text

QUESTION = prompt_text(1)
PROMPT = Tokenizer().encode(QUESTION)


@pytest.fixture(autouse=True)
def _by_name(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As if the module lay on the trainer's path."""
    package = ModuleType("users")
    package.__path__ = []
    package.functions = user_functions
    monkeypatch.setitem(importlib.sys.modules, "users", package)
    monkeypatch.setitem(importlib.sys.modules, "users.functions", user_functions)
    yield
    for name in [name for name in importlib.sys.modules if ".recording.users" in name]:
        del importlib.sys.modules[name]


def load(path: str) -> Any:
    """What trainers do with a path."""
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


def trainer_of(rig: Rig, function: Any, **settings: Any) -> TrainerDouble:
    settings = {"engine": {"versions": "field"}, "questions": [QUESTION], **settings}
    _, trainer = rig(generate=function, **settings)
    trainer.args.tokenizer = trainer.tokenizer
    return trainer


def call(trainer: TrainerDouble, function: Any, sample: Sample, **more: Any) -> Any:
    return trainer.run(function(trainer.args, sample, trainer.sampling_params, **more))


def logged(log: Path) -> dict[str, SampleView]:
    close_session()
    with LogReader.open(log) as reader:
        return {entry.name: view(reader.rollout(entry.ref)) for entry in reader.samples()}


# The function stays what it is


def test_the_wrapper_has_the_signature_and_the_attributes_of_the_function():
    wrapped = vime.recorded(user_functions.two_turns)
    assert list(inspect.signature(wrapped).parameters) == ["args", "sample", "sampling_params"]
    assert wrapped.abort_mode == "request"
    assert wrapped.__name__ == "two_turns"
    assert inspect.iscoroutinefunction(wrapped)
    other = vime.recorded(user_functions.fan_out)
    assert not hasattr(other, "abort_mode")
    assert "evaluation" in inspect.signature(other).parameters


@pytest.mark.parametrize("plugin", [vime, slime], ids=["vime", "slime"])
def test_a_path_needs_no_change_of_the_code(plugin: Any):
    function = load(f"{plugin.__name__}.recording.users.functions.two_turns")
    assert function.__wrapped__ is user_functions.two_turns
    assert function.abort_mode == "request"
    assert load(f"{plugin.__name__}.recording.users.functions.NotAFunction") is user_functions.NotAFunction
    with pytest.raises(ModuleNotFoundError, match="nowhere"):
        load(f"{plugin.__name__}.recording.users.nowhere.function")
    with pytest.raises(AttributeError, match="nothing"):
        load(f"{plugin.__name__}.recording.users.functions.nothing")


# What goes wrong in the wrapper is not the function's


@pytest.mark.parametrize("strict", [False, True], ids=["", "strict"])
def test_samples_that_cannot_be_looked_at_come_back_all_the_same(
    rig: Rig, strict: bool, caplog: pytest.LogCaptureFixture
) -> None:
    @vime.recorded
    async def odd(args: Any, sample: Any, sampling_params: dict[str, Any]) -> Any:
        await user_functions.two_turns(args, sample, sampling_params)
        sample.tokens = None
        return sample

    trainer = trainer_of(rig, odd, rollout_log_strict=strict)
    sample = Sample(index=4, prompt=QUESTION)
    if strict:
        with pytest.raises(TypeError):
            call(trainer, odd, sample)
        return
    assert call(trainer, odd, sample) is sample
    assert "does not get its counters: TypeError" in caplog.text


@pytest.mark.parametrize("strict", [False, True], ids=["", "strict"])
def test_a_call_that_cannot_be_recorded_is_made_all_the_same(
    rig: Rig, strict: bool, caplog: pytest.LogCaptureFixture
) -> None:
    @vime.recorded
    async def own_client(args: Any, sample: Any, sampling_params: dict[str, Any]) -> Any:
        sample.status = Status.COMPLETED
        return sample

    trainer = trainer_of(rig, own_client, rollout_log_strict=strict)
    sample = Sample(index=4, prompt=QUESTION, tokens=None)
    if strict:
        with pytest.raises(TypeError):
            call(trainer, own_client, sample)
        return
    assert call(trainer, own_client, sample).status is Status.COMPLETED
    assert "sample 4 goes unrecorded: TypeError" in caplog.text


# What is recorded


def test_turns_and_tool_output(rig: Rig, log: Path) -> None:
    function = load("rollout_log.vime.recording.users.functions.two_turns")
    trainer = trainer_of(rig, function)
    sample = Sample(index=4, prompt=QUESTION, session_id="turns", label="7")
    assert call(trainer, function, sample) is sample
    said = expected_tokens(PROMPT, 0, ANSWER_LENGTH)
    more = expected_tokens(PROMPT, ANSWER_LENGTH + len(TOOL_OUTPUT), ANSWER_LENGTH)
    assert sample.tokens == PROMPT + said + TOOL_OUTPUT + more
    facts = sample.metadata["rollout_log"]
    assert (facts["key"], facts["requests"], facts["retries"]) == ("t4-turns", 2, 0)
    extra: dict[str, Any] = {}
    sample.reward = 0.25
    vime.log_metrics(0, trainer.args, [sample], extra, 1.0)
    assert extra["perf/rollout_log/requests"] == 2
    (shown,) = logged(log).values()
    assert (shown.key, shown.reward, shown.status) == ("t4-turns", 0.25, "truncated")
    assert shown.prompt_token_ids == PROMPT
    assert shown.token_ids == said + TOOL_OUTPUT + more
    assert shown.loss_mask == sample.loss_mask
    assert [request.cause for request in shown.requests] == ["first", "turn"]
    assert [problem for problem in shown.problems if problem.severity == "error"] == []


def test_calls_at_the_same_time_do_not_mix(rig: Rig, log: Path) -> None:
    function = vime.recorded(user_functions.two_turns)
    trainer = trainer_of(rig, function)
    samples = [Sample(index=n, prompt=prompt_text(n), session_id=str(n)) for n in range(8)]

    async def all_at_once() -> None:
        await asyncio.gather(*(function(trainer.args, each, trainer.sampling_params) for each in samples))

    trainer.run(all_at_once())
    shown = logged(log)
    for sample in samples:
        ours = shown[f"t{sample.index}-{sample.index}"]
        assert ours.prompt_token_ids + ours.token_ids == sample.tokens
    assert len(shown) == 8


def test_siblings_of_a_fan_out_have_keys_of_their_own(rig: Rig, log: Path) -> None:
    function = vime.recorded(user_functions.fan_out)
    trainer = trainer_of(rig, function)
    sample = Sample(index=2, prompt=QUESTION, session_id="fan")
    siblings = call(trainer, function, sample, evaluation=True)
    assert siblings[0] is sample
    shown = logged(log)
    assert set(shown) == {"e2-fan", "e2-fan~2"}
    for each in siblings:
        ours = shown[each.metadata["rollout_log"]["key"]]
        assert ours.prompt_token_ids + ours.token_ids == each.tokens
        assert each.metadata["rollout_log"]["requests"] == 1
    assert len({each.metadata["rollout_log"]["key"] for each in siblings}) == 2


def test_requests_to_other_paths_are_children(rig: Rig, log: Path) -> None:
    function = vime.recorded(user_functions.with_a_judge)
    trainer = trainer_of(rig, function)
    call(trainer, function, Sample(index=1, prompt=QUESTION, session_id="judged"))
    shown = logged(log)
    assert set(shown) == {"t1-judged", "t1-judged~2"}
    assert shown["t1-judged"].token_ids == expected_tokens(PROMPT, 0, ANSWER_LENGTH)
    assert shown["t1-judged~2"].parent == "t1-judged"


def test_retries_of_the_trainers_own_helper(rig: Rig, log: Path) -> None:
    function = vime.recorded(user_functions.two_turns)
    plan = InOrder([Fault("status", code=500), Fault(), Fault("status", code=503)])
    trainer = trainer_of(rig, function, engine={"versions": "field", "plan": plan})
    sample = Sample(index=1, prompt=QUESTION, session_id="again")
    call(trainer, function, sample)
    assert sample.metadata["rollout_log"]["retried"] == {"http_error": 2}
    shown = logged(log)["t1-again"]
    assert [request.cause for request in shown.requests] == ["first", "retry", "turn", "retry"]
    assert shown.prompt_token_ids + shown.token_ids == sample.tokens


def test_a_generate_of_ours_inside_is_recorded_once(rig: Rig, log: Path) -> None:
    async def ours(args: Any, sample: Any, sampling_params: dict[str, Any]) -> Any:
        return await vime.generate(args, sample, sampling_params)

    function = vime.recorded(ours)
    trainer = trainer_of(rig, function, questions=[prompt_text(0, tokens=9)])
    sample = Sample(index=0, prompt=prompt_text(0, tokens=9), session_id="once")
    call(trainer, function, sample)
    assert list(logged(log)) == ["t0-once"]
    assert sample.metadata["rollout_log"]["requests"] == 1
    assert sample.status is Status.COMPLETED


def test_a_cancel_passes_and_leaves_the_key(rig: Rig, log: Path) -> None:
    function = vime.recorded(user_functions.two_turns)
    trainer = trainer_of(rig, function, questions=[prompt_text(0, hold=3)])
    sample = Sample(index=0, prompt=prompt_text(0, hold=3), session_id="left")

    async def leave() -> None:
        task = asyncio.ensure_future(function(trainer.args, sample, trainer.sampling_params))
        while not trainer.engine.holding:  # noqa: ASYNC110 - it happens in the engine's thread
            await asyncio.sleep(0.002)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    trainer.run(leave())
    assert sample.metadata["rollout_log"]["key"] == "t0-left"
    assert logged(log)["t0-left"].status == "aborted"


def test_outside_of_the_call_nothing_is_recorded(rig: Rig, log: Path) -> None:
    function = vime.recorded(user_functions.two_turns)
    trainer = trainer_of(rig, function)
    call(trainer, function, Sample(index=0, prompt=QUESTION, session_id="inside"))
    call(trainer, user_functions.two_turns, Sample(index=1, prompt=QUESTION, session_id="outside"))
    assert list(logged(log)) == ["t0-inside"]


def test_the_clients_transport_comes_back(rig: Rig) -> None:
    function = vime.recorded(user_functions.two_turns)
    trainer = trainer_of(rig, function)
    client = trainer.http._http_client
    before = client._transport
    for index in range(2):
        call(trainer, function, Sample(index=index, prompt=QUESTION))
    assert isinstance(client._transport, RecordingTransport)
    assert client._transport.inner is before
    close_session()
    assert client._transport is before


def test_switched_off_it_is_the_function_alone(rig: Rig, log: Path) -> None:
    function = vime.recorded(user_functions.two_turns)
    trainer = trainer_of(rig, function, rollout_log_enabled=False)
    before = trainer.http._http_client._transport
    sample = Sample(index=0, prompt=QUESTION)
    call(trainer, function, sample)
    assert trainer.http._http_client._transport is before
    assert "rollout_log" not in sample.metadata
    assert not log.exists()


# What is not


def test_what_bypasses_the_client_gets_one_warning_that_names_the_proxy(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    function = vime.recorded(user_functions.by_itself)
    trainer = trainer_of(rig, function)
    for index in range(3):
        call(trainer, function, Sample(index=index, prompt=QUESTION))
    (said,) = [record.getMessage() for record in caplog.records]
    assert "nothing of it recorded" in said
    assert "rollout-log record" in said


def test_ray_posters_get_one_warning(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    function = vime.recorded(user_functions.two_turns)
    trainer = trainer_of(rig, function)
    trainer.http._distributed_post_enabled, trainer.http._post_actors = True, [object()]
    for index in range(2):
        call(trainer, function, Sample(index=index, prompt=QUESTION))
    (said,) = [record.getMessage() for record in caplog.records]
    assert "--use-distributed-post" in said
    assert "rollout-log record" in said
    assert session_for(trainer.args).log is not None
