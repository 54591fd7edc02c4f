"""The debug dump: the samples that a step consumed, from the log alone."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from plugin.scripted import QUESTION, Scripted, delta, generate, new_sample
from plugin.test_features import PROMPT, TOKENS, npy
from plugin.test_loop import TWO_END_TWO_HOLD
from rollout_log import vime
from rollout_log.errors import RolloutLogError
from rollout_log.export import pt
from rollout_log.export.samples import Options, samples_of
from rollout_log.log import LogReader
from rollout_log.trainer.session import close_session
from rollout_log.trainer.storable import storable
from trainer.conftest import Rig
from trainer.sample_double import Sample
from trainer.truth import prompt_text


def two_steps(rig: Rig, **settings: Any) -> list[list[Sample]]:
    """Run two steps with aborts and resumptions; returns what each consumed."""
    engine, trainer = rig(
        engine={"versions": "field"},
        generate="rollout_log.vime.generate",
        questions=TWO_END_TWO_HOLD,
        over_sampling=4,
        abort_when=lambda: engine.holding == 4 or bool(trainer.delivered),
        **settings,
    )
    consumed = [copy.deepcopy(trainer.step(0))]
    trainer.args.over_sampling_batch_size = 2
    consumed.append(copy.deepcopy(trainer.step(1)))
    close_session()
    return consumed


def dumped(log: Path, step: int, *, evaluation: bool = False) -> dict[str, Any]:
    with LogReader.open(log) as reader:
        return pt.dump(samples_of(reader, list(reader.samples(step=step))), step, evaluation=evaluation)


def again(data: dict[str, Any]) -> list[dict[str, Any]]:
    """What the trainer makes of a dump."""
    return [Sample.from_dict(each).to_dict() for each in data["samples"]]


def test_a_dump_has_the_samples_a_step_consumed_in_their_order(rig: Rig, log: Path) -> None:
    consumed = two_steps(rig, custom_rollout_log_function_path="rollout_log.vime.log_metrics")
    for step, samples in enumerate(consumed):
        data = dumped(log, step)
        assert data["rollout_id"] == step
        assert again(data) == [sample.to_dict() for sample in samples]


EVALUATED: dict[str, Any] = {
    "generate": "rollout_log.vime.generate",
    "engine": {"versions": "field"},
    "questions": [prompt_text(0, tokens=5)],
    "custom_rollout_log_function_path": "rollout_log.vime.log_metrics",
    "custom_eval_rollout_log_function_path": "rollout_log.vime.log_eval_metrics",
}
DATASETS = {"easy": [prompt_text(1, tokens=5), prompt_text(2)], "hard": [prompt_text(3, tokens=7)]}


def flat(data: dict[str, Any]) -> list[dict[str, Any]]:
    """The samples of an evaluation as the trainer's own dump has them."""
    return [sample.to_dict() for each in data.values() for sample in each["samples"]]


def test_an_evaluation_has_a_dump_of_its_own(rig: Rig, log: Path) -> None:
    _, trainer = rig(**EVALUATED)
    trained = copy.deepcopy(trainer.step(2))
    evaluated = copy.deepcopy(flat(trainer.evaluate(2, DATASETS, repeats=2)))
    close_session()
    data = dumped(log, 2, evaluation=True)
    assert data["rollout_id"] == 2
    assert again(data) == evaluated
    assert again(dumped(log, 2)) == [sample.to_dict() for sample in trained]


def test_the_last_of_several_evaluations_counts(rig: Rig, log: Path) -> None:
    """Trainers evaluate before the first step and after it, both as number 0."""
    _, trainer = rig(**EVALUATED)
    trainer.evaluate(0, DATASETS, repeats=2)
    trainer.step(0)
    evaluated = copy.deepcopy(flat(trainer.evaluate(0, DATASETS)))
    close_session()
    assert again(dumped(log, 0, evaluation=True)) == evaluated


def test_an_evaluation_by_a_function_that_does_not_know_of_evaluations(rig: Rig, log: Path) -> None:
    path = "rollout_log.vime.recording.plugin.user_functions.two_turns"
    _, trainer = rig(**{**EVALUATED, "generate": path})
    trainer.args.tokenizer = trainer.tokenizer
    trained = copy.deepcopy(trainer.step(0))
    evaluated = copy.deepcopy(flat(trainer.evaluate(0, DATASETS)))
    close_session()
    assert again(dumped(log, 0)) == [sample.to_dict() for sample in trained]
    assert again(dumped(log, 0, evaluation=True)) == evaluated


def test_an_evaluation_that_was_not_closed_is_refused(rig: Rig, log: Path) -> None:
    _, trainer = rig(**{**EVALUATED, "custom_eval_rollout_log_function_path": None})
    trainer.evaluate(0, DATASETS)
    close_session()
    with pytest.raises(RolloutLogError, match=r"not say .* took for evaluation 0 .*log_eval_metrics"):
        dumped(log, 0, evaluation=True)


def test_a_step_that_was_not_closed_is_refused(rig: Rig, log: Path) -> None:
    two_steps(rig)
    with pytest.raises(RolloutLogError, match=r"not say .* took for step 1 .*log_metrics"):
        dumped(log, 1)


def test_what_is_missing_is_named(rig: Rig, log: Path) -> None:
    two_steps(rig, custom_rollout_log_function_path="rollout_log.vime.log_metrics")
    with LogReader.open(log) as reader:
        samples = list(samples_of(reader, list(reader.samples(step=0))))
    by_order = {each.rollout.closed.order: each for each in samples if each.rollout.closed.step == 0}
    with pytest.raises(RolloutLogError, match="the sample that was taken as number 1"):
        pt.dump([each for order, each in by_order.items() if order != 1], 0)
    last = max(by_order)
    with pytest.raises(RolloutLogError, match=f"the sample that was taken as number {last}"):
        pt.dump([each for order, each in by_order.items() if order != last], 0)
    left_out = storable({"pixel_values": np.zeros((300, 300))})
    by_order[2].rollout.closed.sample["multimodal_train_inputs"] = left_out
    with pytest.raises(RolloutLogError, match="multimodal_train_inputs of"):
        pt.dump(by_order.values(), 0)


def test_steps_of_several_runs_are_not_mixed(rig: Rig, log: Path) -> None:
    two_steps(rig, custom_rollout_log_function_path="rollout_log.vime.log_metrics")
    with LogReader.open(log) as reader:
        samples = list(samples_of(reader, list(reader.samples(step=0))))
    entry = samples[0].entry
    samples[0].entry = msgspec.structs.replace(entry, ref=msgspec.structs.replace(entry.ref, run="another"))
    with pytest.raises(RolloutLogError, match="several runs, another, "):
        pt.dump(samples, 0)


@pytest.mark.parametrize("keep", ["", "routed_experts"])
@pytest.mark.parametrize("width", [2, 3000])
def test_routing_that_is_large_takes_a_log_that_keeps_it(rig: Rig, log: Path, keep: str, width: int) -> None:
    """One sample's routing is stored with its closing, unless it has more than 65,536 elements."""
    _, trainer = rig(
        generate=vime.generate,
        questions=[QUESTION],
        use_rollout_routing_replay=True,
        moe_router_topk=width,
        rollout_log_keep=keep,
    )
    rows = len(PROMPT) + len(TOKENS) - 1
    routing = np.arange(rows * 2 * width, dtype=np.int32).reshape(rows, 2, width)
    sample = new_sample()
    engine = Scripted([delta(TOKENS, 0, "stop", routed_experts=npy(routing)), "[DONE]"])
    generate(trainer, vime.generate, engine, sample)
    vime.log_metrics(0, trainer.args, [sample], {}, 1.0)
    close_session()
    if width == 3000 and not keep:
        with pytest.raises(RolloutLogError, match=r"rollout_routed_experts of .* rollout_log_keep"):
            dumped(log, 0)
        return
    (found,) = dumped(log, 0)["samples"]
    assert np.array_equal(found["rollout_routed_experts"], routing)


def test_a_file_takes_a_step(tmp_path: Path) -> None:
    with pytest.raises(RolloutLogError, match="give --step"):
        pt.write([], tmp_path / "rollout.pt", Options())


def test_torch_reads_it(rig: Rig, log: Path, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    (first, _) = two_steps(rig, custom_rollout_log_function_path="rollout_log.vime.log_metrics")
    path = tmp_path / "rollout_0.pt"
    with LogReader.open(log) as reader:
        pt.write(samples_of(reader, list(reader.samples(step=0))), path, Options(step=0))
    data = torch.load(path, weights_only=True)
    assert again(data) == [each.to_dict() for each in first]
