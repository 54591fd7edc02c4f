"""A process that records many streams until it is killed; it prints what it may be held to.

    python recording_process.py LOG URL

`R key tokens`: the call returned, with so many tokens. `D key events`: so many events are durable.
`L`: a flush was late, so the next returned sample may be behind.
"""

from __future__ import annotations

import asyncio
import sys

import httpx

from rollout_log.log import Log
from rollout_log.record import Recorder


def say(*words: object) -> None:
    print(*words, flush=True)


async def main(path: str, url: str) -> None:
    log = Log.open(path, window_ms=50)
    async with httpx.AsyncClient(timeout=None) as client:
        recorder = Recorder(log, client)

        async def one(worker: int) -> None:
            for number in range(1000):
                key = f"{worker}-{number}"
                body = {"token_ids": [worker, number], "sampling_params": {"max_tokens": 50, "logprobs": 1}}
                late = log.counters.late_flushes
                rollout = await recorder.generate(key, url, body)
                if log.counters.late_flushes != late:
                    say("L", key)
                say("R", key, rollout.length)

        async def durable() -> None:
            while True:
                for key, sample in list(recorder.samples._live.items()):
                    if sample._ordinal is not None:
                        say("D", key, log.durable(sample._ordinal))
                await asyncio.sleep(0.02)

        watcher = asyncio.create_task(durable())
        await asyncio.gather(*map(one, range(8)))
        watcher.cancel()


asyncio.run(main(*sys.argv[1:]))
