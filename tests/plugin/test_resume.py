"""A process is killed in mid-step, and another one starts from an older checkpoint."""

from __future__ import annotations

import asyncio
import copy
import logging
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from plugin import crashing_trainer
from plugin.crashing_trainer import QUESTIONS, settings
from rollout_log import vime
from rollout_log.log import LogReader
from rollout_log.trainer.session import close_session
from rollout_log.view import view
from trainer.conftest import Rig
from trainer.engine_double import EngineDouble
from trainer.sample_double import Sample, Status
from trainer.trainer_double import NEW_VIME, TrainerDouble
from trainer.truth import Tokenizer, expected_tokens, prompt_text

TESTS = Path(__file__).parent.parent


def until(condition: Callable[[], bool], process: subprocess.Popen[bytes] | None = None) -> None:
    limit = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < limit, "it did not come"
        assert process is None or process.poll() is None, "the process ended"
        time.sleep(0.005)


def crash(log: Path, checkpoints: Path) -> None:
    """Step 0 aborts groups 2 and 3; step 1 has group 4 held at token 12 and group 5 done, and dies."""
    checkpoints.mkdir()
    with EngineDouble(budget=64, versions="field") as engine:
        process = subprocess.Popen(
            [sys.executable, crashing_trainer.__file__, engine.url, str(log), str(checkpoints)],
            env={"PYTHONPATH": f"{TESTS}:{TESTS.parent}", "PATH": ""},
        )
        try:
            until(lambda: engine.holding == 4, process)
            (checkpoints / "four-hold").touch()
            until((checkpoints / "saved").exists, process)
            engine.set_version("1")
            (checkpoints / "new-weights").touch()
            until(lambda: engine.holding == 2 and len(engine.served) == 12, process)
            until(lambda: settled(log), process)
        finally:
            process.send_signal(signal.SIGKILL)
            process.wait(30)


def settled(log: Path) -> bool:
    """Whether the log has all 12 samples, with the tokens before the places where they hold."""
    with LogReader.open(log) as reader:
        rollouts = [reader.rollout(entry.ref) for entry in reader.samples()]
    return len(rollouts) == 12 and sorted(each.length for each in rollouts) == sorted(
        [30, 30, 25, 25, 20, 20, 31, 31, 12, 12, 9, 9]
    )


def again(rig: Rig, checkpoints: Path, **more: Any) -> tuple[EngineDouble, TrainerDouble]:
    engine, trainer = rig(
        NEW_VIME,
        engine={"versions": "field", "weight_version": "1"},
        versions=["0", "1"],
        **{**settings(checkpoints), "over_sampling": 4, "groups": 4, **more},
    )
    engine.all_versions = ["0", "1"]
    trainer.engine = None  # what it served says nothing of tokens from before the crash
    engine.release()
    trainer.data_source.load(0)
    # The checkpoint was written before step 1 took its prompts, so these come again.
    trainer.data_source.position = trainer.data_source.group_index = 4
    trainer.data_source.index = 8
    return engine, trainer


def problems(trainer: TrainerDouble) -> list[str]:
    """Without those about the mask: old tokens have 0, which the loop does not know."""
    return [problem for problem in trainer.problems if "loss_mask is" not in problem]


def test_off_everything_is_generated_anew(rig: Rig, log: Path, tmp_path: Path) -> None:
    crash(log, tmp_path / "checkpoints")
    engine, trainer = again(rig, tmp_path / "checkpoints")
    samples = trainer.step(1)
    assert trainer.problems == []
    assert {served.start for served in engine.served} == {0}
    assert {each for sample in samples for each in sample.loss_mask or ()} == {1}


def test_prompts_that_are_issued_again_go_on(rig: Rig, log: Path, tmp_path: Path) -> None:
    crash(log, tmp_path / "checkpoints")
    engine, trainer = again(rig, tmp_path / "checkpoints", rollout_log_resume="continue")
    samples = {sample.index: sample for sample in trainer.step(1)}
    assert problems(trainer) == []
    assert engine.violations == []
    # Group 4 was cut at token 12; group 5 had finished and was not consumed: it begins anew.
    assert sorted(served.start for served in engine.served if served.prompt == prompt(4)) == [12, 12]
    assert {served.start for served in engine.served if served.prompt == prompt(5)} == {0}
    for index in (8, 9):
        sample = samples[index]
        assert sample.status is Status.COMPLETED
        assert sample.loss_mask == [0] * 12 + [1] * 33
        assert sample.tokens == prompt(4) + expected_tokens(prompt(4), 0, 45)
        assert sample.metadata["rollout_log"]["salvaged"] == 12
    close_session()
    with LogReader.open(log) as reader:
        for index in (8, 9):
            key = samples[index].metadata["rollout_log"]["key"]
            ref = reader.find(key)
            shown = view(reader.rollout(ref))
            assert ref.incarnation == 1
            assert reader.continued(ref) == (reader.find(f"{key}@0"), 12)
            assert shown.token_ids == samples[index].tokens[len(prompt(4)) :]
            assert shown.logprobs == samples[index].rollout_log_probs
            assert [request.cause for request in shown.requests] == ["resume"]
            assert shown.status == "completed"
            assert view(reader.rollout(f"{key}@0")).token_ids == shown.token_ids[:12]


def test_another_prompt_or_other_parameters_are_no_match(rig: Rig, log: Path, tmp_path: Path) -> None:
    crash(log, tmp_path / "checkpoints")
    engine, trainer = again(rig, tmp_path / "checkpoints", rollout_log_resume="continue")
    trainer.sampling_params["temperature"] = 0.7
    trainer.step(1)
    assert trainer.problems == []
    assert {served.start for served in engine.served} == {0}


def test_steps_that_were_rolled_back_are_generated_anew(rig: Rig, log: Path, tmp_path: Path) -> None:
    crash(log, tmp_path / "checkpoints")
    engine, trainer = again(rig, tmp_path / "checkpoints", rollout_log_resume="continue")
    trainer.step(0)  # from a checkpoint before step 0: what step 1 had is of weights that are gone
    assert trainer.problems == []
    assert {served.start for served in engine.served} == {0}


@pytest.mark.parametrize(
    "path",
    [
        "rollout_log.vime.generate_rollout",
        "rollout_log.vime.resuming.vime.rollout.vllm_rollout.generate_rollout",
    ],
)
def test_groups_of_the_buffer_are_given_back_whole(
    rig: Rig, log: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, path: str
) -> None:
    crash(log, tmp_path / "checkpoints")
    engine, trainer = again(
        rig,
        tmp_path / "checkpoints",
        rollout_log_resume="continue",
        rollout_function_path=path,
    )
    with caplog.at_level(logging.INFO, "rollout_log"):
        samples = {sample.index: sample for sample in trainer.step(1)}
    assert problems(trainer) == []
    assert engine.violations == []
    assert "gave back 2 groups with 102 tokens" in caplog.text
    assert set(samples) == {4, 5, 6, 7, 8, 9, 10, 11}
    for index, start, end in ((4, 20, 40), (5, 20, 40), (6, 31, 50), (7, 31, 50), (8, 12, 45)):
        sample = samples[index]
        assert sample.status is Status.COMPLETED
        assert sample.loss_mask == [0] * start + [1] * (end - start)
        assert sample.prompt == QUESTIONS[sample.group_index]
        assert sample.weight_versions == ["0" if index < 8 else "1", "1"]
    assert samples[4].metadata["start_rollout_id"] == 0
    trainer.data_source.position = 0
    trainer.step(2)
    assert caplog.text.count("gave back") == 1


def test_a_data_source_that_takes_no_groups_is_one_line(
    rig: Rig, log: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    crash(log, tmp_path / "checkpoints")
    engine, trainer = again(
        rig,
        tmp_path / "checkpoints",
        rollout_log_resume="continue",
        rollout_function_path="rollout_log.vime.generate_rollout",
        read_only_source=True,
        partial=True,
        groups=2,
        over_sampling=2,
    )
    trainer.step(1)
    assert problems(trainer) == []
    assert {12} <= {served.start for served in engine.served}
    said = [record.getMessage() for record in caplog.records if "given back" in record.getMessage()]
    assert len(said) == 1
    assert "this data source takes no samples" in said[0]


def prompt(number: int) -> list[int]:
    return Tokenizer().encode(QUESTIONS[number])


def test_a_finished_member_goes_back_empty(rig: Rig, log: Path) -> None:
    """One of a group was done, the other was cut, and neither was consumed."""
    questions = [prompt_text(1, hold=4)]
    engine, trainer = rig(
        engine={"versions": "field"}, generate="rollout_log.vime.generate", questions=questions
    )
    done = Sample(index=0, group_index=0, prompt=prompt_text(0, tokens=6), label="1", metadata={"of": "a"})
    cut = Sample(index=1, group_index=0, prompt=prompt_text(1, hold=4), label="2", custom_rm_path="rm.f")

    async def both() -> None:
        trainer.hooks.set_current_rollout_id(0)
        tasks = [asyncio.ensure_future(trainer.generate_one(each)) for each in (done, cut)]
        while not engine.holding or done.reward is None:  # noqa: ASYNC110 - it happens in another thread
            await asyncio.sleep(0.002)
        await trainer.abort(0)
        await asyncio.gather(*tasks)
        trainer.state.reset()

    trainer.run(both())
    before = copy.deepcopy(cut)
    close_session()
    trainer.args.rollout_log_resume = "continue"
    trainer.args.rollout_batch_size = trainer.args.over_sampling_batch_size = 1
    trainer.hooks.set_current_rollout_id(1)
    given: list[list[Sample]] = []

    class Source:
        def add_samples(self, groups: list[list[Sample]]) -> None:
            given.extend(copy.deepcopy(groups))

        def get_samples(self, count: int) -> list[list[Sample]]:
            raise LookupError("enough")

    with pytest.raises(LookupError):
        vime.generate_rollout(trainer.args, 1, Source())
    ((first, second),) = given
    assert (first.status, first.tokens, first.response_length, first.label) == (Status.PENDING, [], 0, "1")
    assert first.metadata == {"of": "a"}
    assert (second.status, second.custom_rm_path, second.loss_mask) == (Status.ABORTED, "rm.f", [0] * 4)
    assert (second.tokens, second.rollout_log_probs) == (before.tokens, before.rollout_log_probs)
    assert second.weight_versions == ["0"]
