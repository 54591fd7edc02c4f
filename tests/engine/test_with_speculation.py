"""Speculative decoding: many tokens in a frame, and nothing else is different."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import httpx
import pytest

from engine.server import Engine
from engine.wire import GENERATE, Answer, ask, body, read, stream
from rollout_log.log import Log, LogReader
from rollout_log.record import Recorder

pytestmark = pytest.mark.engine

GREEDY = {"temperature": 0.0, "ignore_eos": True, "max_tokens": 96}


@pytest.fixture(scope="module")
def speculating(installed, tmp_path_factory) -> Iterator[Engine]:
    config = (
        '{"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4, "prompt_lookup_min": 2}'
    )
    log = tmp_path_factory.mktemp("speculating") / "engine.log"
    with Engine("--speculative-config", config, log=log) as engine:
        yield engine


async def test_accepted_drafts_come_as_frames_of_several_tokens(speculating, http, tmp_path):
    frames = stream(http, speculating.url, body(**GREEDY))
    assert max(len(choice["token_ids"]) for frame in frames for choice in frame["choices"]) > 1
    answer = ask(http, speculating.url, body(**GREEDY))
    assert read(frames) == answer

    with contextlib.closing(Log.open(tmp_path / "log")) as log:
        async with httpx.AsyncClient(timeout=60.0) as client, Recorder(log, client) as recorder:
            await recorder.generate("k", speculating.url + GENERATE, body(**GREEDY))
    with LogReader.open(tmp_path / "log") as reader:
        choice = reader.rollout("k").choice()
    assert Answer(choice.token_ids, choice.logprobs, choice.finish_reason) == answer[0]
