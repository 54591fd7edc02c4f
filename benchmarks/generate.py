"""Write a big log in seconds: `python -m benchmarks.generate PATH --samples 100000 --steps 50`.

Every sample has true events (a request or two, a few frames of many tokens) and the summary that they
amount to; only keys, steps, rewards and times differ from one to the next. `--gigabytes` adds that much of
incompressible ballast, in samples of their own, for questions about the size of a file.
"""

from __future__ import annotations

import argparse
import os
import random
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from rollout_log.events import Body, Closed, Delta, Ended, Event, Opened, Requested, Responded
from rollout_log.fold import fold
from rollout_log.log import Log, Summary
from rollout_log.record.summary import summarize

__all__ = ["write_log"]

GROUP = 8
"""Samples of one prompt."""
SHARES = {"completed": 78, "truncated": 12, "retried": 5, "resumed": 3, "aborted": 1, "failed": 1}
"""What becomes of samples, in percent."""
FIRST_NS = 1_780_000_000_000_000_000
STEP_NS = 60_000_000_000
AT_ONCE = 4096
"""Samples that are handed over before waiting for the disk."""
BALLAST = 1 << 20
"""Bytes of one ballast sample."""


def frame(token_ids: list[int], finish: str | None, request_id: str = "generate-1") -> bytes:
    """Return one data frame of vLLM's generate endpoint."""
    content = [{"token_id": i, "logprob": -0.25 - i % 7 / 8, "rank": 1 + i % 3} for i in token_ids]
    choice = {"index": 0, "finish_reason": finish, "token_ids": token_ids, "logprobs": {"content": content}}
    return msgspec.json.encode(
        {"request_id": request_id, "usage": None, "choices": [choice], "weight_version": "3"}
    )


def attempt(number: int, base: int, end: str, *, cause: str = "first", step: int = 0) -> list[Event]:
    """Return the events of one request; `end` is a finish reason, `reset` or `error`."""
    params = {"max_tokens": 256 - base, "logprobs": 1}
    body = msgspec.json.encode({"model": "tiny", "token_ids": [], "sampling_params": params, "stream": True})
    events: list[Event] = [
        Requested(
            number,
            base,
            cause,  # type: ignore[arg-type]  # the callers' literals
            "vllm",
            "POST",
            "/inference/v1/generate",
            body,
            body.index(b"[]") + 1,
            weight_version="3",
            sent_unix_ns=1,
            step=step,
        )
    ]
    if end == "error":
        events += [Responded(number, 500, [("content-type", "text/plain")], 900)]
        return [*events, Body(number, b"CUDA error", 1000), Ended(number, "eof", None, 1100)]
    events += [Responded(number, 200, [("content-type", "text/event-stream")], 900)]
    events += [
        Delta(number, frame(list(range(64 * i, 64 * i + 64)), None), 20_000 * (i + 1)) for i in range(2)
    ]
    if end == "reset":
        return [*events, Ended(number, "reset", "ReadError", 50_000)]
    events += [Delta(number, frame([7], end), 60_000), Delta(number, b"[DONE]", 60_100)]
    return [*events, Ended(number, "eof", None, 60_200)]


def kinds(step: int) -> dict[str, list[Event]]:
    """Return the events after `Opened` of every kind of sample, for samples that open in a step."""
    return {
        "completed": attempt(0, 0, "stop", step=step),
        "truncated": attempt(0, 0, "length", step=step),
        "retried": attempt(0, 0, "reset", step=step) + attempt(1, 0, "stop", cause="retry", step=step),
        "resumed": attempt(0, 0, "abort", step=step) + attempt(1, 129, "stop", cause="resume", step=step + 1),
        "aborted": attempt(0, 0, "abort", step=step),
        "failed": attempt(0, 0, "error", step=step),
    }


def samples_of(step: int, count: int, chance: random.Random) -> Iterator[tuple[list[Event], Summary]]:
    """Yield the samples that open in a step: events, and the summary they amount to."""
    known = Opened(key="", run="generated", prompt_token_ids=list(range(100, 132)), step=step)
    models = {}
    for kind, events in kinds(step).items():
        closed = Closed(status=fold(enumerate([known, *events])).status, step=step + (kind == "resumed"))
        models[kind] = events, closed, summarize(fold(enumerate([known, *events, closed])))
    for place, kind in enumerate(chance.choices(list(SHARES), list(SHARES.values()), k=count)):
        events, closed, summary = models[kind]
        opened_ns = FIRST_NS + step * STEP_NS + place * STEP_NS // count
        group, index = divmod(place, GROUP)
        own = {"key": f"s{step}-g{group}-{index}", "group_index": group, "index": index}
        own |= {"opened_unix_ns": opened_ns}
        opened = msgspec.structs.replace(known, **own)
        closed = msgspec.structs.replace(closed, reward=chance.random())
        summary = msgspec.structs.replace(summary, **own, updated_unix_ns=opened_ns + STEP_NS // 2)
        yield [opened, *events, closed], summary


def write_log(path: Path, samples: int = 100_000, steps: int = 50, gigabytes: float = 0.0) -> None:
    """Write the log."""
    chance = random.Random(0)
    with Log.open(path, run="generated", durability="window") as log:
        for step in range(steps):
            count = samples * (step + 1) // steps - samples * step // steps
            for place, (events, summary) in enumerate(samples_of(step, count, chance), 1):
                log.append(log.create(Opened(key=summary.key)), 0, events, summary)
                if not place % AT_ONCE:
                    log.flush_sync()
            log.flush_sync()
        for number in range(int(gigabytes * 1e9 / BALLAST)):
            ballast = Opened(key=f"ballast-{number}", run="ballast")
            log.append(
                log.create(ballast), 0, [ballast, Body(0, os.urandom(BALLAST))], Summary(key=ballast.key)
            )
            if number % 32 == 0:
                log.flush_sync()


def main() -> None:
    """Parse the command line and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("path", type=Path)
    parser.add_argument("--samples", type=int, default=100_000)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--gigabytes", type=float, default=0.0)
    options = parser.parse_args()
    start = time.monotonic()
    write_log(options.path, options.samples, options.steps, options.gigabytes)
    size = sum(file.stat().st_blocks * 512 for file in options.path.rglob("*") if file.is_file())
    print(f"{options.samples:,} samples, {size:,} bytes on disk, {time.monotonic() - start:.1f} s")


if __name__ == "__main__":
    main()
