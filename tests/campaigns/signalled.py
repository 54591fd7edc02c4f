"""A process that records streams that never end until a signal comes.

    python signalled.py KIND LOG URL

`recorder`: asyncio.run around the library tap. `handled`: the same with a SIGTERM handler that exits.
`plugin`: a plug-in's generate function on a loop in another thread, and such a handler, as Ray has.
Prints `ready` once three tokens of each stream have been read; a beat and the window are an hour, so only
what is done on the way out can have taken them in and written them.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
import time

import httpx

from rollout_log.log import Log
from rollout_log.record import Recorder, pulse
from rollout_log.record.exchange import Exchange

STREAMS = 4
TOKENS = 3
BODY = {"token_ids": [1, 2], "sampling_params": {"logprobs": 1, "max_tokens": 100}}


read: dict[str, int] = {}
"""How many tokens of each stream have been."""


def count_reads() -> None:
    put = Exchange.put

    def counted(exchange: Exchange, chunk: bytes) -> None:
        put(exchange, chunk)
        read[exchange.key] = read.get(exchange.key, 0) + chunk.count(b'"logprob": ')

    Exchange.put = counted


def is_read() -> bool:
    return list(read.values()) == [TOKENS] * STREAMS


async def record(path: str, url: str) -> None:
    log = Log.open(path, window_ms=3_600_000)
    async with httpx.AsyncClient(timeout=None) as client:
        recorder = Recorder(log, client)
        calls = [asyncio.create_task(recorder.generate(f"k{n}", url, BODY)) for n in range(STREAMS)]
        while not is_read():  # noqa: ASYNC110 - no event
            await asyncio.sleep(0.01)
        print("ready", flush=True)
        await asyncio.gather(*calls)


def plug_in(path: str, url: str) -> None:
    os.environ.update(ROLLOUT_LOG_DIR=path, ROLLOUT_LOG_WINDOW_MS="3600000")
    from plugin.scripted import HOLD, QUESTION, Scripted, delta, new_sample
    from rollout_log import vime
    from trainer.trainer_double import NEW_VIME, TrainerDouble
    from trainer.truth import Tokenizer, expected_tokens

    trainer = TrainerDouble(url, NEW_VIME, generate="rollout_log.vime.generate", questions=[QUESTION])
    tokens = expected_tokens(Tokenizer().encode(QUESTION), 0, 10)
    trainer.__enter__()
    trainer.http._http_client._transport = Scripted([delta(tokens[:TOKENS]), HOLD])

    async def run() -> None:
        samples = (new_sample(index=n) for n in range(STREAMS))
        calls = (vime.generate(trainer.args, sample, dict(trainer.sampling_params)) for sample in samples)
        await asyncio.gather(*calls)

    threading.Thread(target=lambda: trainer.run(run()), daemon=True).start()
    while not is_read():
        time.sleep(0.01)
    print("ready", flush=True)
    while True:
        time.sleep(0.1)


def main(kind: str, path: str, url: str) -> None:
    pulse.BEAT_S = 3600.0
    count_reads()
    if kind in {"handled", "plugin"}:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    if kind == "plugin":
        plug_in(path, url)
    else:
        asyncio.run(record(path, url))


if __name__ == "__main__":
    main(*sys.argv[1:])
