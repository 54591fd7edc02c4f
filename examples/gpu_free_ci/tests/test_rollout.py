"""What a rollout function has to get right: a whole response, an abort, a connection that is lost."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
import rollout

from rollout_log.testing import PlainSample, StandIn

PROMPT = [8183, 525, 362, 1449, 198, 1560, 3384, 341, 945, 559, 26, 705, 707, 1247, 452, 329, 800, 855, 452]
SHORT = {"temperature": 1.0, "seed": 1, "max_new_tokens": 64, "stop_token_ids": [832]}
LONG = {"temperature": 1.0, "seed": 1234, "max_new_tokens": 32}


def new_sample() -> PlainSample:
    """As vime hands it over. The session names it in recordings, so that a resume joins what was aborted."""
    return PlainSample(tokens=list(PROMPT), session_id="sample-1")


def arguments(engine: StandIn) -> SimpleNamespace:
    """What the function reads of a run's arguments."""
    return SimpleNamespace(vllm_router_ip=engine.host, vllm_router_port=engine.port, hf_checkpoint="tiny")


def assert_as_recorded(sample: Any, engine: StandIn) -> None:
    """Every token once, each with its log-prob."""
    [recorded] = engine.samples()
    assert sample.tokens == PROMPT + recorded.token_ids
    assert sample.rollout_log_probs == recorded.logprobs
    assert sample.loss_mask == recorded.loss_mask
    assert sample.status.value == recorded.status


async def test_a_whole_response(rollout_log: StandIn) -> None:
    sample = await rollout.generate(arguments(rollout_log), new_sample(), SHORT)
    assert_as_recorded(sample, rollout_log)
    assert sample.status is sample.Status.COMPLETED
    assert sample.tokens[-1] == 832


async def test_an_abort_keeps_what_came_and_the_next_step_goes_on(rollout_log: StandIn) -> None:
    sample = new_sample()
    task = asyncio.create_task(rollout.generate(arguments(rollout_log), sample, LONG))
    while sample.response_length < 10:  # noqa: ASYNC110 - the function knows nothing of events
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert sample.status is sample.Status.ABORTED
    assert 10 <= sample.response_length < 32
    assert len(sample.rollout_log_probs or []) == len(sample.loss_mask or []) == sample.response_length

    assert_as_recorded(await rollout.generate(arguments(rollout_log), sample, LONG), rollout_log)
    assert sample.response_length == 32


@pytest.mark.rollout_log(faults="drop_after=3,drop=rst,attempts=2")
async def test_a_connection_that_is_lost_twice(rollout_log: StandIn) -> None:
    sample = await rollout.generate(arguments(rollout_log), new_sample(), SHORT)
    assert_as_recorded(sample, rollout_log)
