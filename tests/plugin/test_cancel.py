"""A cancel at every await: before the finish it leaves a coherent aborted sample, after it a finished one."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Coroutine, Generator
from typing import Any
from unittest.mock import patch

import pytest

from plugin.scripted import QUESTION, Scripted, delta, generate, new_sample, usage
from rollout_log import vime
from rollout_log.record.exchange import Exchange
from rollout_log.record.sending import _Sending
from rollout_log.sse import FrameSplitter
from rollout_log.trainer.session import session_for
from trainer.checks import open_spans
from trainer.conftest import Rig
from trainer.faults import Fault, InOrder
from trainer.sample_double import Sample, Status
from trainer.trainer_double import TrainerDouble
from trainer.truth import EOS, Tokenizer, decode, expected_tokens


class CancelAt:
    """Awaits a coroutine, cancelling its task where that or its stream is suspended the `place`-th time."""

    def __init__(self, coroutine: Coroutine[Any, Any, Any], place: int) -> None:
        self.coroutine, self.place = coroutine, place
        self.places = 0
        self.read = b""
        """What has been read so far, taken in or not."""
        self.finished: bool | None = None
        """Whether the finish had been read by then; None: never cancelled."""

    @property
    def tokens(self) -> list[int]:
        """The tokens of what has been read."""
        frames = [frame.data for frame in FrameSplitter().feed(self.read) if frame.data != b"[DONE]"]
        choices = [choice for frame in frames for choice in json.loads(frame)["choices"]]
        return [token for choice in choices for token in choice["token_ids"]]

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
                self.finished = self.tokens[-1:] == [EOS]
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
    run, put = _Sending.run, Exchange.put

    async def counted(self: _Sending) -> None:
        await Part(calls[0], run(self))

    def noted(self: Exchange, chunk: bytes) -> None:
        calls[0].read += chunk
        put(self, chunk)

    async def function(args: Any, sample: Sample, params: dict[str, Any]) -> Sample | None:
        calls.append(CancelAt(vime.generate(args, sample, params), place))
        returned = await calls[0]
        assert returned is sample
        return sample

    with patch.object(_Sending, "run", counted), patch.object(Exchange, "put", noted):
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
        assert sample.response == decode(call.tokens), "all that was read is in it"
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
