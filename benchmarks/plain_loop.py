"""Recording against the loop that trainers use without it (target 2).

The baseline reads lines, parses each with `json`, and decodes all tokens to text again at every chunk, with a
real fast tokenizer, as vime's streaming function does. Decoding everything is quadratic: only every 32nd
time is done and counted 32 times, or 32k tokens would take minutes. What httpx takes to hand the stream over,
a chunk a token, is in both; draining is that alone.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
from tokenizers import Tokenizer

from benchmarks.frames import BODY, PATH
from benchmarks.measure import Row, median_ratio
from benchmarks.server import engine
from rollout_log.log import Log
from rollout_log.record import Recorder

__all__ = ["rows"]

TOKENIZER = Path(__file__).parent.parent / "tests/engine/model/tokenizer.json"
LIMITS = {1024: 1 / 4, 16_384: 1 / 100, 32_768: 1 / 200}
EVERY = 32


async def plain(client: httpx.AsyncClient, url: str, tokenizer: Tokenizer) -> float:
    """Run the baseline; return its CPU seconds."""
    start = time.process_time()
    decoding = 0.0
    ids: list[int] = []
    logprobs: list[float] = []
    text = ""
    async with client.stream("POST", url, json=BODY) as response:
        async for line in response.aiter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            choice = json.loads(line[6:])["choices"][0]
            ids += choice["token_ids"]
            logprobs += [entry["logprob"] for entry in choice["logprobs"]["content"]]
            if len(ids) % EVERY == 0:
                before = time.process_time()
                text = tokenizer.decode(ids)
                decoding += time.process_time() - before
    assert text
    return time.process_time() - start + decoding * (EVERY - 1)


async def recorded(recorder: Recorder, url: str, tokenizer: Tokenizer) -> float:
    """Record the same stream, and decode once at the end; return its CPU seconds."""
    start = time.process_time()
    rollout = await recorder.generate(f"sample-{time.monotonic_ns()}", url, BODY)
    tokenizer.decode(rollout.choice().token_ids)
    return time.process_time() - start


async def drained(client: httpx.AsyncClient, url: str) -> float:
    """Throw the same stream away; return its CPU seconds."""
    start = time.process_time()
    async with client.stream("POST", url, json=BODY) as response:
        async for _ in response.aiter_raw():
            pass
    return time.process_time() - start


async def compare(url: str, log: Log, tokens: int, runs: int) -> tuple[float, float]:
    """Return the ratios of recording and of draining, for streams of a length."""
    tokenizer = Tokenizer.from_file(str(TOKENIZER))
    async with httpx.AsyncClient(timeout=None, trust_env=False) as client:
        recorder = Recorder(log, client)
        address = f"{url}{PATH}?tokens={tokens}&chunk=1"
        ours, theirs, least = [], [], []
        for _ in range(runs + 1):
            ours.append(await recorded(recorder, address, tokenizer))
            theirs.append(await plain(client, address, tokenizer))
            least.append(await drained(client, address))
    return median_ratio(ours[1:], theirs[1:]), median_ratio(least[1:], theirs[1:])


def rows(*, quick: bool = False) -> Iterator[Row]:
    """Measure target 2."""
    with engine() as url, tempfile.TemporaryDirectory() as folder, Log.open(Path(folder) / "log") as log:
        for tokens, limit in LIMITS.items():
            ours, least = asyncio.run(compare(url, log, 64 if quick else tokens, 1 if quick else 3))
            baseline = "line loop that decodes everything"
            yield Row("2", f"recording {tokens:,} tokens", baseline, ours, limit)
            yield Row("2", f"draining {tokens:,} tokens", baseline, least)
