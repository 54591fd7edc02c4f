"""The end of a step: rewards in the log, counters in the trainer's metrics."""

from __future__ import annotations

import copy
import logging
import math
from pathlib import Path
from typing import Any

import pytest

from plugin.test_loop import TWO_END_TWO_HOLD, function, quick
from rollout_log import slime, vime
from rollout_log.log import LogReader
from rollout_log.record.summary import summarize
from rollout_log.steps import by_step
from rollout_log.trainer.session import close_session, session_for
from rollout_log.view import view
from trainer.conftest import Rig
from trainer.faults import Fault, InOrder
from trainer.sample_double import Sample, Status
from trainer.trainer_double import NEW_VIME, SLIME, Layout
from trainer.truth import prompt_text


def rebuilt(reader: LogReader, key: str) -> Sample:
    """A sample from the log alone."""
    rollout = reader.rollout(key)
    closed, choice = rollout.closed, rollout.choice()
    assert closed is not None
    return Sample.from_dict(
        {
            "index": rollout.opened.index,
            "group_index": rollout.opened.group_index,
            "tokens": rollout.prompt_token_ids + choice.token_ids,
            "response_length": len(choice.token_ids),
            "rollout_log_probs": choice.logprobs,
            "loss_mask": choice.loss_mask,
            "weight_versions": [span.version for span in choice.weight_versions(rollout.dispatched)],
            "status": closed.status,
            "reward": closed.reward,
            **closed.sample,
        }
    )


@pytest.mark.parametrize("layout", [NEW_VIME, SLIME], ids=lambda layout: layout.name)
@pytest.mark.parametrize("mask_offpolicy", [False, True], ids=["", "masked"])
def test_the_log_has_the_samples_that_the_step_consumed(
    rig: Rig, log: Path, layout: Layout, mask_offpolicy: bool
) -> None:
    engine, trainer = rig(
        layout,
        engine={"versions": "field"},
        generate=function(layout),
        questions=TWO_END_TWO_HOLD,
        over_sampling=4,
        mask_offpolicy=mask_offpolicy,
        abort_when=lambda: engine.holding == 4 or bool(trainer.delivered),
        custom_rollout_log_function_path=f"rollout_log.{layout.root}.log_metrics",
    )
    consumed = [copy.deepcopy(trainer.step(0))]
    engine.set_version("1")
    trainer.args.over_sampling_batch_size = 2
    consumed.append(copy.deepcopy(trainer.step(1)))
    assert trainer.problems == []
    close_session()
    with LogReader.open(log) as reader:
        for step, samples in enumerate(consumed):
            for order, sample in enumerate(samples):
                key = sample.metadata["rollout_log"]["key"]
                assert rebuilt(reader, key).to_dict() == sample.to_dict()
                closed = reader.rollout(key).closed
                assert (closed.step, closed.order, closed.of) == (step, order, len(samples))
        statuses = {entry.summary.trainer_status for entry in reader.samples()}
        assert statuses == {"completed", "truncated"}
    first, second = trainer.logged
    assert first["perf/rollout_log/samples"] == 4
    assert first["perf/rollout_log/tokens_salvaged_by_resume"] == 0
    assert second["perf/rollout_log/tokens_salvaged_by_resume"] == 20 + 20 + 31 + 31
    assert second["perf/rollout_log/tokens_salvaged_by_retry"] == 0
    assert second["perf/rollout_log/requests"] == 8
    cause = "cancelled" if layout is NEW_VIME else "aborted"
    assert second[f"perf/rollout_log/aborts/{cause}"] == 4
    assert second["perf/rollout_log/bytes"] > 1000
    assert second["perf/rollout_log/unrecorded_requests"] == 0
    assert second["perf/rollout_log/samples_not_consumed"] == 0
    assert second["rollout/step"] == 1


def test_tokens_salvaged_and_thrown_away_by_retries(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    quick(monkeypatch)
    plan = InOrder([Fault("rst", after=2), Fault("fin", after=2), Fault("status", code=503)])
    settings: dict[str, Any] = {
        "engine": {"versions": "field", "plan": plan, "frame_tokens": 1},
        "generate": vime.generate,
        "questions": [prompt_text(0, tokens=9)],
        "groups": 1,
        "samples": 1,
        "custom_rollout_log_function_path": "rollout_log.vime.log_metrics",
    }
    _, trainer = rig(rollout_log_on_retry="continue", **settings)
    trainer.step(0)
    close_session()
    _, again = rig(rollout_log_on_retry="restart", **settings)
    again.step(0)
    names = ("tokens_salvaged_by_retry", "tokens_discarded", "retries", "requests")
    kept, thrown = (
        [each.logged[0][f"perf/rollout_log/{name}"] for name in names] for each in (trainer, again)
    )
    assert kept == [4, 0, 3, 4]
    assert thrown == [0, 4, 3, 4]
    assert trainer.logged[0]["perf/rollout_log/retries/http_error"] == 1
    assert trainer.logged[0]["perf/rollout_log/retries/reset"] == 2
    assert trainer.problems == again.problems == []


def test_what_a_step_generated_and_did_not_take_is_not_consumed(rig: Rig, log: Path) -> None:
    _, trainer = rig(
        engine={"versions": "field"},
        generate=vime.generate,
        questions=[prompt_text(n, tokens=5) for n in range(4)],
        over_sampling=4,
        keep_group=lambda group: group[0].group_index != 1,
        custom_rollout_log_function_path="rollout_log.vime.log_metrics",
    )
    consumed = {sample.index for sample in trainer.step(0)}
    close_session()
    with LogReader.open(log) as reader:
        found = {entry.summary.index: entry.summary.trainer_status for entry in reader.samples()}
    assert {index for index, status in found.items() if status == "completed"} == consumed
    left = {index for index, status in found.items() if status == "not_consumed"}
    assert left >= {2, 3}
    assert left | consumed == set(found)
    assert trainer.logged[0]["perf/rollout_log/samples_not_consumed"] == len(left)


def test_a_finished_sibling_of_an_aborted_one_is_neither(rig: Rig, log: Path) -> None:
    engine, trainer = rig(
        engine={"versions": "field"}, generate=vime.generate, questions=TWO_END_TWO_HOLD[:1], samples=2
    )
    done = Sample(index=1, group_index=5, prompt=prompt_text(0, tokens=4), session_id="a")
    held = Sample(index=2, group_index=5, prompt=prompt_text(1, hold=4), session_id="b")

    async def both() -> None:
        import asyncio

        trainer.hooks.set_current_rollout_id(3)
        tasks = [asyncio.ensure_future(trainer.generate_one(sample)) for sample in (done, held)]
        while engine.holding < 1 or done.reward is None:  # noqa: ASYNC110 - it happens in another thread
            await asyncio.sleep(0.002)
        await trainer.abort(3)
        await asyncio.gather(*tasks)

    trainer.run(both())
    extra: dict[str, Any] = {}
    assert vime.log_metrics(3, trainer.args, [], extra, 1.0) is False
    assert extra["perf/rollout_log/samples_not_consumed"] == 0
    close_session()
    with LogReader.open(log) as reader:
        assert view(reader.rollout("t1-a")).trainer_status is None
        assert view(reader.rollout("t2-b")).status == "aborted"


def test_samples_of_other_processes_are_counted_and_named_once(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    _, trainer = rig(generate=slime.generate, questions=[prompt_text(0, tokens=5)])
    facts = {"key": "t0-elsewhere", "requests": 2, "salvaged": 9, "salvaged_by_retry": 4, "bytes": 70}
    elsewhere = Sample(index=0, metadata={"rollout_log": facts}, status=Status.COMPLETED)
    unknown = Sample(index=1, status=Status.COMPLETED)
    extra: dict[str, Any] = {"other": 1}
    with caplog.at_level(logging.WARNING, "rollout_log"):
        for _ in range(2):
            assert vime.log_metrics(0, trainer.args, [elsewhere, unknown], extra, 1.0) is False
    assert extra["other"] == 1
    assert extra["perf/rollout_log/samples_of_other_processes"] == 2
    assert extra["perf/rollout_log/tokens_salvaged_by_resume"] == 5
    assert extra["perf/rollout_log/tokens_salvaged_by_retry"] == 4
    said = [record.getMessage() for record in caplog.records if "another process" in record.getMessage()]
    assert len(said) == 1
    assert said[0].startswith("2 of 2 samples of step 0")
    assert vime.log_metrics(0, trainer.args, [elsewhere], None, 1.0) is False


class Odd:
    pass


def test_a_reward_that_json_has_no_word_for_is_described(rig: Rig, log: Path) -> None:
    _, trainer = rig(
        generate=vime.generate, engine={"versions": "field"}, questions=[prompt_text(0, tokens=5)]
    )
    samples = trainer.step(0)
    samples[0].reward = {"score": math.nan, "object": Odd(), "huge": 2**70, "broken": "\ud800", ("a", 1): 2}
    samples[0].label = 2**70
    samples[1].metadata["it"] = samples[1].metadata
    assert vime.log_metrics(0, trainer.args, samples, {}, 1.0) is False
    close_session()
    with LogReader.open(log) as reader:
        first, second = (
            reader.rollout(sample.metadata["rollout_log"]["key"]).closed for sample in samples[:2]
        )
    assert math.isnan(first.reward.pop("score"))
    assert first.reward == {
        "object": {"$left_out": f"{Odd.__module__}.Odd"},
        "huge": str(2**70),
        "broken": "\\ud800",
        "('a', 1)": 2,
    }
    assert first.sample["label"] == str(2**70)
    assert second.sample["metadata"]["rollout_log"]["requests"] == 1


def test_an_evaluation_is_closed_with_its_rewards(rig: Rig, log: Path) -> None:
    """Data sets one after the other, indices from 0 in each."""
    _, trainer = rig(
        generate=vime.generate,
        engine={"versions": "field"},
        questions=[prompt_text(0, tokens=5)],
        custom_rollout_log_function_path="rollout_log.vime.log_metrics",
        custom_eval_rollout_log_function_path="rollout_log.vime.log_eval_metrics",
    )
    trainer.step(3)
    datasets = {"easy": [prompt_text(1, tokens=5), prompt_text(2)], "hard": [prompt_text(3, tokens=7)]}
    data = trainer.evaluate(3, datasets, repeats=2)
    samples = [sample for each in data.values() for sample in each["samples"]]
    assert trainer.problems == []
    assert trainer.logged[1]["eval/rollout_log/samples"] == 6
    assert trainer.logged[1]["eval/rollout_log/samples_of_other_processes"] == 0
    assert session_for(trainer.args).samples.all() == []
    close_session()
    with LogReader.open(log) as reader:
        for order, sample in enumerate(samples):
            key = sample.metadata["rollout_log"]["key"]
            assert rebuilt(reader, key).to_dict() == sample.to_dict()
            closed = reader.rollout(key).closed
            assert (closed.step, closed.order, closed.of, closed.evaluation) == (3, order, 6, True)
        assert [(step.step, step.evaluation, step.samples) for step in by_step(reader.summaries())] == [
            (3, False, 4),
            (3, True, 6),
        ]


def test_an_evaluation_without_samples_or_of_somebody_else_hurts_nobody(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    _, trainer = rig(generate=vime.generate, questions=[prompt_text(0, tokens=5)])
    strangers = {"rewards": [1.0], "samples": [Sample(index=0)]}
    with caplog.at_level(logging.WARNING, "rollout_log"):
        assert slime.log_eval_metrics(0, trainer.args, {"bare": {"rewards": [1.0]}}, None) is False
        assert slime.log_eval_metrics(0, trainer.args, {"a": strangers}, None) is False
        assert slime.log_eval_metrics(0, trainer.args, {"odd": None}, {}) is False  # type: ignore[dict-item]
    messages = [record.getMessage() for record in caplog.records]
    assert [message[:42] for message in messages] == [
        "1 of 1 samples of evaluation 0 were genera",
        "the samples of evaluation 0 could not be c",
    ]


def test_memory_holds_what_a_later_step_may_still_take(rig: Rig) -> None:
    """Without `log_metrics` nobody says what was consumed."""
    questions = [prompt_text(0, tokens=5)]
    _, trainer = rig(generate=vime.generate, engine={"versions": "field"}, questions=questions)
    for step in range(8):
        trainer.step(step)
    kept = {live.rollout.step for live in session_for(trainer.args).samples.all()}
    assert kept == {3, 4, 5, 6, 7}
    assert trainer.problems == []


@pytest.mark.parametrize("steps", [1, 2])
def test_a_step_of_more_tokens_than_memory_holds_is_closed_whole(
    rig: Rig, log: Path, monkeypatch: pytest.MonkeyPatch, steps: int
) -> None:
    monkeypatch.setattr("rollout_log.record.samples._KEPT_TOKENS", 20)
    monkeypatch.setattr("rollout_log.record.samples._COUNT_EVERY", 1)
    _, trainer = rig(
        generate=vime.generate,
        engine={"versions": "field"},
        questions=[prompt_text(n, tokens=5 + n) for n in range(4)],
        groups=6,
        custom_rollout_log_function_path="rollout_log.vime.log_metrics",
        custom_eval_rollout_log_function_path="rollout_log.vime.log_eval_metrics",
    )
    consumed = [copy.deepcopy(sample) for step in range(steps) for sample in trainer.step(step)]
    data = trainer.evaluate(0, {"easy": [prompt_text(1, tokens=5)] * 12})
    consumed += copy.deepcopy(data["easy"]["samples"])
    assert trainer.problems == []
    assert session_for(trainer.args).take_aside(consumed[0].metadata["rollout_log"]["key"]) is None
    close_session()
    with LogReader.open(log) as reader:
        summaries = {entry.summary.key: entry.summary for entry in reader.samples()}
        for sample in consumed:
            key = sample.metadata["rollout_log"]["key"]
            assert rebuilt(reader, key).to_dict() == sample.to_dict()
            rollout = reader.rollout(key)
            assert rollout.closed.sample.keys().isdisjoint({"tokens", "rollout_log_probs", "loss_mask"})
            ours, read = summaries[key], summarize(rollout)
            read.updated_unix_ns = ours.updated_unix_ns
            assert ours == read
    assert {each["perf/rollout_log/samples_of_other_processes"] for each in trainer.logged[:-1]} == {0}
    assert trainer.logged[-1]["eval/rollout_log/samples_of_other_processes"] == 0


def test_consumed_samples_leave_the_memory(rig: Rig) -> None:
    _, trainer = rig(
        generate=vime.generate,
        engine={"versions": "field"},
        questions=[prompt_text(0, tokens=5)],
        custom_rollout_log_function_path="rollout_log.vime.log_metrics",
    )
    trainer.step(0)
    trainer.evaluate(0, {"easy": [prompt_text(1, tokens=5)]})
    trainer.step(1)
    assert session_for(trainer.args).samples.all() == []
