"""Forks recording processes and kills them at random moments; prints what each may be held to.

    python killed_writers.py URL FOLDER FIRST END WRITERS

Rounds FIRST to END - 1: each forks WRITERS children into one log, and 25 rounds share a log. For each
child it prints one JSON line: the log, the child's name, and the lines that it said before it died (see
`record/recording_process.py`). Forking saves a thousand starts of Python; the children share nothing else.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import random
import signal
import sys
import time
from pathlib import Path

import httpx

from rollout_log.log import Log
from rollout_log.record import Recorder

ROUNDS_PER_LOG = 25
WORKERS = 8


def say(pipe: int, *words: object) -> None:
    os.write(pipe, (" ".join(map(str, words)) + "\n").encode())


async def record(path: Path, url: str, name: str, pipe: int) -> None:
    log = Log.open(path, window_ms=50)
    async with httpx.AsyncClient(timeout=None, verify=False, trust_env=False) as client:
        recorder = Recorder(log, client)

        async def one(worker: int) -> None:
            for number in range(1000):
                key = f"{name}-{worker}-{number}"
                body = {"token_ids": [worker, number], "sampling_params": {"max_tokens": 50, "logprobs": 1}}
                late = log.counters.late_flushes
                rollout = await recorder.generate(key, url, body)
                if log.counters.late_flushes != late:
                    say(pipe, "L", key)
                say(pipe, "R", key, rollout.length)

        async def durable() -> None:
            while True:
                for key, sample in list(recorder.samples._live.items()):
                    if sample._ordinal is not None:
                        say(pipe, "D", key, log.durable(sample._ordinal))
                await asyncio.sleep(0.02)

        watcher = asyncio.create_task(durable())
        await asyncio.gather(*map(one, range(WORKERS)))
        watcher.cancel()


def start(path: Path, url: str, name: str) -> tuple[int, int]:
    read, write = os.pipe()
    fcntl.fcntl(write, fcntl.F_SETPIPE_SZ, 1 << 20)  # so that saying does not wait for who reads
    child = os.fork()
    if child == 0:
        os.close(read)
        try:
            asyncio.run(record(path, url, name, write))
        finally:
            os._exit(1)
    os.close(write)
    return child, read


def drain(read: int, before: bytes) -> str:
    parts = [before]
    while part := os.read(read, 1 << 16):
        parts.append(part)
    os.close(read)
    return b"".join(parts).decode()


def main(url: str, folder: Path, first: int, end: int, writers: int) -> None:
    for number in range(first, end):
        chance = random.Random(number)
        log = folder / f"{number // ROUNDS_PER_LOG:04}"
        children = [(f"{number}.{i}", *start(log, url, f"{number}.{i}")) for i in range(writers)]
        # One round in eight is killed while it is still opening the log.
        begun = [os.read(read, 1 << 16) if number % 8 else b"" for _, _, read in children]
        for _, child, _ in children:
            time.sleep(chance.uniform(0, 0.3))
            os.kill(child, signal.SIGKILL)
        for (name, child, read), before in zip(children, begun, strict=True):
            said = drain(read, before)
            assert os.waitpid(child, 0)[1] == signal.SIGKILL, f"{name} died by itself"
            print(json.dumps({"log": str(log), "name": name, "said": said.splitlines()}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), *map(int, sys.argv[3:6]))
