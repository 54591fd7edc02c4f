"""The plug-ins in a rollout loop that behaves as vime's and slime's do, against an engine that misbehaves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rollout_log.log import LogReader
from rollout_log.trainer.session import close_session
from rollout_log.view import view
from trainer.conftest import Rig
from trainer.faults import EVERY_FAULT, Fault, InOrder, Seeded
from trainer.sample_double import Sample, Status
from trainer.trainer_double import LAYOUTS, NEW_VIME, OLD_VIME, SLIME, Layout
from trainer.truth import prompt_text

TWO_END_TWO_HOLD = [
    prompt_text(0, tokens=30),
    prompt_text(1, tokens=25),
    prompt_text(2, hold=20),
    prompt_text(3, tokens=50, hold=31),
]


def function(layout: Layout) -> str:
    return f"rollout_log.{layout.root}.generate"


def check_log(log: Path, samples: list[Sample]) -> None:
    """Assert that the log folds to the trainer's samples, field by field."""
    close_session()
    with LogReader.open(log) as reader:
        for sample in samples:
            key = sample.metadata["rollout_log"]["key"]
            shown = view(reader.rollout(reader.find(key)))
            prompt = len(sample.tokens) - sample.response_length
            assert shown.prompt_token_ids == sample.tokens[:prompt], key
            assert shown.token_ids == sample.tokens[prompt:], key
            assert shown.logprobs == sample.rollout_log_probs, key
            assert shown.status == sample.status.value, key
            assert [problem for problem in shown.problems if problem.severity == "error"] == [], key
            versions = [span.version for span in shown.weight_versions]
            assert versions == dedupe(sample.weight_versions), key
            assert (shown.index, shown.group_index) == (sample.index, sample.group_index)


def dedupe(values: list[str]) -> list[str]:
    return [value for i, value in enumerate(values) if not i or values[i - 1] != value]


@pytest.mark.parametrize("cancels", [True, False], ids=["cancel", "flag"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
@pytest.mark.parametrize("mask_offpolicy", [False, True], ids=["", "masked"])
def test_three_steps_with_aborts_and_resumptions(  # noqa: PLR0917 - fixtures
    rig: Rig, log: Path, layout: Layout, cancels: bool, mask_offpolicy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not cancels:
        monkeypatch.delattr(f"{function(layout)}.abort_mode")
    engine, trainer = rig(
        layout,
        engine={"versions": "field"},
        generate=function(layout),
        questions=TWO_END_TWO_HOLD,
        over_sampling=4,
        mask_offpolicy=mask_offpolicy,
        abort_when=lambda: engine.holding == 4 or bool(trainer.delivered),
    )
    first = trainer.step(0)
    assert {sample.status for sample in first} == {Status.COMPLETED}
    held = [sample for group in trainer.data_source.buffer for sample in group]
    assert sorted((sample.index, sample.response_length) for sample in held) == [
        (4, 20),
        (5, 20),
        (6, 31),
        (7, 31),
    ]
    assert {sample.status for sample in held} == {Status.ABORTED}
    engine.set_version("1")
    trainer.args.over_sampling_batch_size = 2
    second = trainer.step(1)
    assert {id(sample) for sample in second} == {id(sample) for sample in held}
    assert {tuple(sample.weight_versions) for sample in second} == {("0", "1")}
    assert [
        sample.metadata["rollout_log"]["salvaged"] for sample in sorted(second, key=lambda s: s.index)
    ] == [
        20,
        20,
        31,
        31,
    ]
    trainer.args.over_sampling_batch_size = 4
    engine.set_version("2")
    third = trainer.step(2)
    trainer.evaluate(2, {"easy": TWO_END_TWO_HOLD[:1], "hard": TWO_END_TWO_HOLD[:2]}, repeats=2)
    assert trainer.problems == []
    assert engine.violations == []
    check_log(log, [*first, *second, *third])


@pytest.mark.parametrize("layout", [NEW_VIME, SLIME], ids=lambda layout: layout.name)
@pytest.mark.parametrize("fault", EVERY_FAULT)
def test_every_fault(
    rig: Rig, log: Path, layout: Layout, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    quick(monkeypatch)
    engine, trainer = rig(
        layout,
        engine={"versions": "field", "plan": InOrder([EVERY_FAULT[fault]])},
        generate=function(layout),
        questions=[prompt_text(n, tokens=n + 10) for n in range(4)],
    )
    samples = trainer.step(0)
    assert trainer.problems == []
    assert engine.violations == []
    failed = any(sample.status is Status.FAILED for sample in samples)
    assert failed == (fault == "error 400")
    check_log(log, samples)


@pytest.mark.parametrize("layout", [NEW_VIME, OLD_VIME, SLIME], ids=lambda layout: layout.name)
@pytest.mark.parametrize("seed", range(3))
def test_steps_under_a_storm_of_faults(
    rig: Rig, log: Path, layout: Layout, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    quick(monkeypatch)
    faults = [fault for name, fault in EVERY_FAULT.items() if name not in ("error 400", "crash")]
    engine, trainer = rig(
        layout,
        engine={"versions": "field", "plan": Seeded(seed, faults)},
        generate=function(layout),
        questions=[prompt_text(n, tokens=None if n % 5 == 0 else 10 + 3 * n) for n in range(12)],
        groups=3,
        samples=2,
        over_sampling=5,
    )
    samples: list[Any] = []
    for step in range(3):
        samples += trainer.step(step)
        engine.set_version(str(step + 1))
    assert trainer.problems == []
    assert engine.violations == []
    assert {sample.status for sample in samples} <= {Status.COMPLETED, Status.TRUNCATED}
    check_log(log, samples)


def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Do not wait as long as in a real run."""
    from rollout_log.record.retry import Backoff

    monkeypatch.setattr(Backoff, "delay", lambda self, attempt, jitter=None: 0.01)
    monkeypatch.setenv("ROLLOUT_LOG_STALL_S", "0.3")


def test_a_refused_sample_is_dropped_from_training_or_ends_the_run(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = InOrder([Fault("error_frame", code=400)] * 2)
    questions = [prompt_text(n, tokens=9) for n in range(2)]
    _, trainer = rig(engine={"plan": plan}, generate=function(NEW_VIME), questions=questions)
    samples = trainer.step(0)
    assert {(sample.status, sample.remove_sample) for sample in samples} == {(Status.FAILED, True)}
    close_session()
    monkeypatch.setenv("ROLLOUT_LOG_ON_FAILURE", "raise")
    _, trainer = rig(engine={"plan": plan}, generate=function(NEW_VIME), questions=questions)
    with pytest.raises(Exception, match="the engine refused"):
        trainer.step(0)
