"""A cancel at every await: before the finish it leaves a coherent aborted sample, after it a finished one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Generator
from typing import Any
from unittest.mock import patch

import pytest

from plugin.scripted import QUESTION, Scripted, delta, generate, new_sample, usage
from rollout_log import vime
from rollout_log.record import sending
from rollout_log.trainer.session import session_for
from trainer.checks import open_spans
from trainer.conftest import Rig
from trainer.faults import Fault, InOrder
from trainer.sample_double import Sample, Status
from trainer.trainer_double import TrainerDouble
from trainer.truth import EOS, Tokenizer, decode, expected_tokens


class CancelAt:
    """Awaits a coroutine, cancelling its task where that or its stream is suspended the `place`-th time."""

    def __init__(self, coroutine: Coroutine[Any, Any, Any], place: int, sample: Sample) -> None:
        self.coroutine, self.place, self.sample = coroutine, place, sample
        self.places = 0
        self.finished: bool | None = None
        """Whether the finish had been read by then; None: never cancelled."""

    def __await__(self) -> Generator[Any, Any, Any]:
        self.task = asyncio.current_task()
        return self.drive(self.coroutine)

    def drive(self, coroutine: Coroutine[Any, Any, Any]) -> Generator[Any, Any, Any]:
        """Await a coroutine, perhaps one of another task, and count where it is suspended."""
        inner = coroutine.__await__()
        step, value = inner.send, None
        while True:
            try:
                waited = step(value)
            except StopIteration as end:
                return end.value
            self.places += 1
            if self.places == self.place:
                self.finished = bool(self.sample.tokens) and self.sample.tokens[-1] == EOS
                assert self.task is not None
                self.task.cancel()
            try:
                value, step = (yield waited), inner.send
            except BaseException as error:
                value, step = error, inner.throw


class Part:
    """Awaits a coroutine that runs in a task of its own, as a part of a `CancelAt`."""

    def __init__(self, whole: CancelAt, coroutine: Coroutine[Any, Any, Any]) -> None:
        self.whole, self.coroutine = whole, coroutine

    def __await__(self) -> Generator[Any, Any, Any]:
        return self.whole.drive(self.coroutine)


def cancelled_at(trainer: TrainerDouble, place: int) -> tuple[Sample, CancelAt, bool]:
    """Generate one sample; returns it, where it was cancelled, and whether the cancel came out."""
    sample = new_sample()
    tokens = expected_tokens(Tokenizer().encode(QUESTION), 0, 10)
    version = {"weight_version": "0"}
    frames = [
        delta(tokens[:4], top=version),
        delta(tokens[4:6], 4, top=version),
        delta(tokens[6:], 6, "stop", top=version),
        usage(20, 10),
        "[DONE]",
    ]
    calls: list[CancelAt] = []
    in_bursts = sending.before_waits

    async def counted(work: Coroutine[Any, Any, None], settle: Callable[[], None]) -> None:
        await Part(calls[0], in_bursts(work, settle))

    async def function(args: Any, sample: Sample, params: dict[str, Any]) -> Sample | None:
        calls.append(CancelAt(vime.generate(args, sample, params), place, sample))
        returned = await calls[0]
        assert returned is sample
        return sample

    with patch.object(sending, "before_waits", counted):
        raised = generate(trainer, function, Scripted(frames), sample) is None
    return sample, calls[0], raised


def assert_even(sample: Sample) -> None:
    length = sample.response_length
    response = sample.tokens[len(sample.tokens) - length :] if length else []
    assert len(sample.loss_mask or ()) == len(sample.rollout_log_probs or ()) == length
    assert sample.response == decode(response)
    assert sample.weight_versions == (["0"] if length else [])
    assert open_spans(sample) == []


@pytest.mark.parametrize("durability", ["window", "finish", "strict"])
def test_a_cancel_at_every_await(rig: Rig, durability: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROLLOUT_LOG_DURABILITY", durability)
    _, trainer = rig(engine={"versions": "field"}, generate=vime.generate, questions=[QUESTION])
    seen = {"before": 0, "after": 0}
    place = 1
    while True:
        sample, call, raised = cancelled_at(trainer, place)
        assert_even(sample)
        if call.finished:
            seen["after"] += 1
            assert (sample.status, raised) == (Status.COMPLETED, False), f"await {place} of {call.places}"
        elif call.finished is False:
            seen["before"] += 1
            assert (sample.status, raised) == (Status.ABORTED, True), f"await {place} of {call.places}"
        else:
            assert sample.status is Status.COMPLETED
            break
        key = sample.metadata["rollout_log"]["key"]
        live = session_for(trainer.args).samples.get(key)
        assert live is None or live.rollout.status == sample.status.value
        place += 1
    assert seen["before"] >= 4
    assert seen["after"] >= (3 if durability == "window" else 4)


@pytest.mark.parametrize("frames", [0, 1, 2], ids=["usage", "[DONE]", "last chunk"])
def test_an_abort_while_the_end_is_held_back(rig: Rig, frames: int) -> None:
    _, trainer = rig(
        engine={"versions": "field", "plan": InOrder([Fault("linger", after=frames)] * 2)},
        generate="rollout_log.vime.generate",
        questions=[QUESTION],
    )
    samples = [new_sample() for _ in range(2)]

    async def abort() -> None:
        tasks = [asyncio.ensure_future(trainer.generate_one(sample)) for sample in samples]
        while not all(sample.tokens[-1:] == [EOS] for sample in samples):  # noqa: ASYNC110
            await asyncio.sleep(0.002)
        await trainer.abort(0)
        await asyncio.gather(*tasks)

    trainer.run(abort())
    assert [sample.status for sample in samples] == [Status.COMPLETED] * 2
    assert [sample.reward for sample in samples] == [1.0] * 2
    assert trainer.problems == []
