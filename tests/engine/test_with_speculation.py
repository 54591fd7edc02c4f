"""Speculative decoding: many tokens in a frame, figures at the end, and nothing else is different.

The last module, since it needs an engine that is started differently, and there is one at a time.
"""

from __future__ import annotations

import contextlib

import httpx
import pytest

from engine.compared import assert_same_samples
from engine.folded import told
from engine.server import SPECULATION
from engine.wire import GENERATE, GREEDY, ask, body, read, stream
from fixtures.record import record
from rollout_log.log import Log, LogReader
from rollout_log.record import Recorder

pytestmark = [
    pytest.mark.engine,
    pytest.mark.parametrize("engine", [SPECULATION], indirect=True, ids=["ngram"]),
]
DRAFTED = body(**GREEDY, max_tokens=96)


async def test_accepted_drafts_come_as_frames_of_several_tokens(engine, url, http, tmp_path):
    frames = stream(http, url, DRAFTED)
    assert max(len(choice["token_ids"]) for frame in frames for choice in frame["choices"]) > 1
    answer = ask(http, engine.url, DRAFTED)
    assert read(frames) == answer
    told_by_engine = frames[-1]["metrics"]["speculative_decoding"]
    assert told_by_engine["num_accepted_draft_tokens"] > 0

    with contextlib.closing(Log.open(tmp_path / "log")) as log:
        async with (
            httpx.AsyncClient(timeout=60.0, trust_env=False) as client,
            Recorder(log, client) as recorder,
        ):
            await recorder.generate("k", url + GENERATE, DRAFTED)
    with LogReader.open(tmp_path / "log") as reader:
        rollout = reader.rollout("k")
    assert told(rollout) == answer
    assert rollout.requests[-1].metrics == told_by_engine


async def test_recording_it_again_gives_the_shipped_samples(engine, tmp_path):
    assert_same_samples(await record("speculative", engine, tmp_path))
