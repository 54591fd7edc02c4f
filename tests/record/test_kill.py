"""`kill -9` at any moment leaves a log that opens, in which every sample is a prefix of what was streamed."""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
from collections import defaultdict
from pathlib import Path

import pytest

from rollout_log.http_server import Request, Responder, serve
from rollout_log.log import LogReader
from rollout_log.log.verify import verify

KILLS = int(os.environ.get("ROLLOUT_LOG_KILLS", "8"))
LENGTH = 12
SCRIPT = Path(__file__).with_name("recording_process.py")


def token(prompt: list[int], position: int) -> int:
    return 1000 + prompt[0] * 131 + prompt[1] * 17 + position


async def stream(request: Request, responder: Responder) -> None:
    """Answer with tokens that are a function of prompt and position, now and then with an early end."""
    asked = json.loads(request.body)
    prompt, start = asked["token_ids"][:2], len(asked["token_ids"]) - 2
    await responder.start(200, [("content-type", "text/event-stream")])
    for position in range(start, LENGTH):
        await asyncio.sleep(random.uniform(0, 0.004))
        finish = "stop" if position == LENGTH - 1 else None
        ids = [token(prompt, position)]
        choice = {
            "index": 0,
            "token_ids": ids,
            "finish_reason": finish,
            "logprobs": {"content": [{"logprob": -1.0}]},
        }
        responder.send(b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n")
        if random.random() < 0.02:
            responder.cut()
            return
    responder.send(b"data: [DONE]\n\n")
    await responder.finish()


async def run_and_kill(log: Path, after: float) -> str:
    async with serve(stream) as server:
        process = await asyncio.create_subprocess_exec(
            sys.executable, SCRIPT, log, server.url + "/inference/v1/generate", stdout=asyncio.subprocess.PIPE
        )
        assert process.stdout is not None
        first = await asyncio.wait_for(process.stdout.readline(), 60)
        reading = asyncio.create_task(process.stdout.read())
        await asyncio.sleep(after)
        process.kill()
        said = (first + await reading).decode()
        await process.wait()
    return said


@pytest.mark.parametrize("seed", range(KILLS))
async def test_kill(tmp_path, seed):
    log = tmp_path / "log"
    said = await run_and_kill(log, random.Random(seed).uniform(0.0, 0.6))
    returned: dict[str, int] = {}
    durable: dict[str, int] = defaultdict(int)
    late = set()
    for line in said.splitlines()[:-1]:  # the last line may be cut
        kind, key, *count = line.split()
        if kind == "R":
            returned[key] = int(count[0])
        elif kind == "D":
            durable[key] = max(durable[key], int(count[0]))
        else:
            late.add(key)

    assert verify(log).damage == []
    with LogReader.open(log) as reader:
        found = {}
        for entry in reader.samples():
            rollout = found[entry.summary.key] = reader.rollout(entry.ref)
            prompt = rollout.prompt_token_ids
            tokens = rollout.choice().token_ids
            assert tokens == [token(prompt, position) for position in range(len(tokens))]
            assert not [problem for problem in rollout.problems if problem.severity == "error"]
    assert durable
    for key, events in durable.items():
        assert events == 0 or found[key].events >= events
    for key, tokens in returned.items():
        if key not in late:
            assert found[key].length == tokens == LENGTH
            assert found[key].status == "completed"
