"""The debug dump: the samples that a step consumed, from the log alone."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from plugin.test_loop import TWO_END_TWO_HOLD
from rollout_log.errors import RolloutLogError
from rollout_log.export import pt
from rollout_log.export.samples import Options, samples_of
from rollout_log.log import LogReader
from rollout_log.trainer.session import close_session
from trainer.conftest import Rig
from trainer.sample_double import Sample


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


def dumped(log: Path, step: int) -> dict[str, Any]:
    with LogReader.open(log) as reader:
        return pt.dump(samples_of(reader, list(reader.samples(step=step))), step)


def test_a_dump_has_the_samples_a_step_consumed_in_their_order(rig: Rig, log: Path) -> None:
    consumed = two_steps(rig, custom_rollout_log_function_path="rollout_log.vime.log_metrics")
    for step, samples in enumerate(consumed):
        data = dumped(log, step)
        assert data["rollout_id"] == step
        again = [Sample.from_dict(each).to_dict() for each in data["samples"]]
        assert again == [sample.to_dict() for sample in samples]


def test_a_step_that_was_not_closed_is_refused(rig: Rig, log: Path) -> None:
    two_steps(rig)
    with pytest.raises(RolloutLogError, match=r"no sample of step 1 was closed as consumed.*log_metrics"):
        dumped(log, 1)


def test_what_is_missing_is_named(rig: Rig, log: Path) -> None:
    two_steps(rig, custom_rollout_log_function_path="rollout_log.vime.log_metrics")
    with LogReader.open(log) as reader:
        samples = list(samples_of(reader, list(reader.samples(step=0))))
    by_order = {each.rollout.closed.order: each for each in samples if each.rollout.closed.step == 0}
    with pytest.raises(RolloutLogError, match="the sample consumed as number 1"):
        pt.dump([each for order, each in by_order.items() if order != 1], 0)
    by_order[2].rollout.closed.sample["rollout_routed_experts"] = "<torch.Tensor of shape (9, 2, 2)>"
    with pytest.raises(RolloutLogError, match="rollout_routed_experts of"):
        pt.dump(by_order.values(), 0)


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
    assert [Sample.from_dict(each).to_dict() for each in data["samples"]] == [
        each.to_dict() for each in first
    ]
