"""What a process keeps between calls: who was asked, what was said, whose keys are taken."""

from __future__ import annotations

import asyncio
import gc
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest

from log.test_processes import in_fork
from plugin.scripted import QUESTION, Scripted, delta, generate, new_sample
from rollout_log import vime
from rollout_log.trainer import session as sessions
from rollout_log.trainer.session import session_for
from rollout_log.trainer.weights import Weights
from rollout_log.vime.request import VIME
from trainer.conftest import Rig
from trainer.sample_double import Sample, Status
from trainer.truth import Tokenizer, expected_tokens

URL = "http://engine/inference/v1/generate"
TOKENS = expected_tokens(Tokenizer().encode(QUESTION), 0, 10)


class Silent(httpx.AsyncBaseTransport):
    """An engine that takes a question and does not answer."""

    def __init__(self) -> None:
        self.asked = 0

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        self.asked += 1
        await asyncio.sleep(0)
        raise httpx.ReadTimeout("silence", request=request)


async def test_an_engine_that_does_not_answer_keeps_a_step_waiting_once():
    weights, engine = Weights(), Silent()
    async with httpx.AsyncClient(transport=engine) as client:
        for step, asked in ((3, 1), (3, 1), (4, 2), (None, 3)):
            waiting = [weights.ask(VIME, client, URL, step) for _ in range(10)]
            await asyncio.gather(*waiting)
            assert (engine.asked, weights.known(step)) == (asked, None)


def test_an_engine_that_is_down_is_one_warning_for_all_samples(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    _, trainer = rig(generate=vime.generate, questions=[QUESTION])
    trainer.args.rollout_log_retries = 1
    engine = Scripted([delta(TOKENS, 0, "stop"), "[DONE]"])
    for _ in range(3):
        refused = Refusing(engine)
        sample = new_sample()
        generate(trainer, vime.generate, refused, sample)
        assert sample.status is Status.COMPLETED
    assert sum("no response from" in record.getMessage() for record in caplog.records) == 1


class Refusing(Scripted):
    """Takes no connection at first."""

    def __init__(self, engine: Scripted) -> None:
        super().__init__(*engine.answers)
        self.refused = 0

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        if request.url.path.endswith("/generate") and not self.refused:
            self.refused += 1
            raise httpx.ConnectError("nobody listens", request=request)
        return await super().handle_async_request(request)


def test_keys_of_samples_that_are_gone_take_no_memory(rig: Rig, log: Path) -> None:
    _, trainer = rig(generate=vime.generate, questions=[QUESTION])
    session = session_for(trainer.args)
    kept = Sample(index=0, session_id="kept")
    keys = [session.key_of(Sample(index=n, session_id=str(n)), evaluation=False) for n in range(100)]
    assert session.key_of(kept, evaluation=False) == "t0-kept"
    gc.collect()
    assert len(set(keys)) == 100
    assert list(session._owners) == ["t0-kept"]
    copy = Sample(index=0, session_id="kept")
    assert session.key_of(copy, evaluation=False).startswith("t0-kept-")


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_fork_while_a_session_begins_in_another_thread_waits_for_nobody(log: Path) -> None:
    with sessions._lock:
        assert in_fork(lambda: session_for(SimpleNamespace(rollout_log_enabled=False)).run)
