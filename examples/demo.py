"""The main job in a few seconds: record, abort, resume, look. `make demo` runs it.

A stand-in engine plays streams that a real vLLM once sent. Two steps of a small rollout run against it: the
first ends while some samples are unfinished, one connection is lost and one stream ends in an error frame;
the second goes on where the first was cut.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import httpx
import msgspec

from rollout_log.events import Opened
from rollout_log.fixture import FixtureReader
from rollout_log.log import Log
from rollout_log.record import Recorder
from rollout_log.record.retry import Backoff
from rollout_log.replay import serve_replay

ROOT = Path(__file__).resolve().parent.parent
FIXTURE = ROOT / "fixtures" / "demo.jsonl.zst"
FAULTS = {"t5": "drop_after=20,drop=rst,attempts=1", "t14": "error_after=12,attempts=1"}
TOKENS = 64
ENOUGH = 20
"""Finished samples that end the first step."""


def questions() -> dict[str, tuple[dict[str, Any], Opened]]:
    """Return what the recorded rollout asked, by key: 8 prompts, 4 samples each."""
    with FixtureReader.open(FIXTURE) as reader:
        found = {}
        for entry in reader.samples():
            rollout = reader.rollout(entry.ref)
            opened = rollout.opened
            assert opened is not None
            params = {"max_tokens": TOKENS, "temperature": 1.0, "logprobs": 1, "ignore_eos": True}
            body = {
                "model": "tiny",
                "token_ids": opened.prompt_token_ids,
                "sampling_params": {**params, "seed": 1000 + (opened.index or 0)},
                "stream": True,
                "stream_options": {"include_usage": True},
            }
            known = Opened(
                opened.key,
                group_index=opened.group_index,
                index=opened.index,
                metadata={"tokenizer": str(ROOT / "tests" / "engine" / "model")},
            )
            found[opened.key] = (body, known)
        return found


class Rollout:
    """Two steps of partial rollout."""

    def __init__(self, recorder: Recorder, url: str) -> None:
        self.recorder = recorder
        self.url = f"{url}/inference/v1/generate"
        self.questions = questions()
        self.responses: dict[str, list[int]] = {}
        """Tokens of unfinished samples."""

    async def generate(self, key: str, step: int) -> bool:
        """Generate for a sample, or go on with it; True when it is finished."""
        body, opened = self.questions[key]
        kept = self.responses.get(key, [])
        params = {**body["sampling_params"], "max_tokens": TOKENS - len(kept)}
        rollout = await self.recorder.generate(
            key,
            self.url,
            {**body, "token_ids": [*body["token_ids"], *kept], "sampling_params": params},
            base=len(kept),
            opened=msgspec.structs.replace(opened, step=step),
            headers={"x-rollout-log-fault": FAULTS[key]} if key in FAULTS else {},
            on_read=lambda rollout: self.responses.update({key: list(rollout.choice().token_ids)}),
        )
        return rollout.status in ("completed", "truncated")

    async def run_step(self, step: int, keys: list[str], enough: int) -> list[str]:
        """Generate until enough samples are finished; abort the others and return their keys."""
        tasks: dict[asyncio.Task[bool], str] = {}
        waiting: set[asyncio.Task[bool]] = set()
        try:
            for key in keys:
                task = asyncio.create_task(self.generate(key, step))
                tasks[task] = key
                waiting.add(task)
                await asyncio.sleep(0.03)
            finished = 0
            while waiting and finished < enough:
                done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                finished += len(done)
        finally:  # after Ctrl-C as well, while there is a log that takes their ends
            for task in waiting:
                task.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)
        return [tasks[task] for task in tasks if task in waiting]


async def main(path: Path) -> str:
    """Run two steps into a log at `path`; returns the key of a sample that was resumed. Ctrl-C cancels it."""
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGINT, task.cancel)
    with Log.open(path, run="demo") as log:
        async with serve_replay(FIXTURE, pace=0.5) as engine, httpx.AsyncClient(timeout=None) as client:
            recorder = Recorder(log, client, backoff=Backoff(first=0.1, longest=0.1))
            rollout = Rollout(recorder, engine.url)
            keys = list(rollout.questions)
            print(f"step 0: {len(keys)} samples; it ends when {ENOUGH} are finished")
            aborted = await rollout.run_step(0, keys, ENOUGH)
            # What was cut between its last token and the finish has nothing left to ask for.
            aborted = [key for key in aborted if len(rollout.responses.get(key, ())) < TOKENS]
            print(f"step 1: goes on with the {len(aborted)} that were aborted")
            await rollout.run_step(1, aborted, len(aborted))
    return aborted[-1]


def run() -> None:
    """Run the demo into `demo-log/` and show what it left."""
    from rollout_log.cli import main as command

    argparse.ArgumentParser(
        description=(__doc__ or "").strip(), formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    logging.basicConfig(level=logging.INFO, format="  %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    path = Path("demo-log")
    shutil.rmtree(path, ignore_errors=True)
    try:
        key = asyncio.run(main(path))
    except (asyncio.CancelledError, KeyboardInterrupt):
        sys.exit(f"interrupted; what was recorded so far is in {path}/")
    for words in (["steps", str(path)], ["show", str(path), key]):
        print(f"\n$ rollout-log {' '.join(words)}", flush=True)
        try:
            command(words)
        except SystemExit as ended:
            if ended.code:
                raise
    print(
        "\nThe log is in demo-log/. Try next (after `source .venv/bin/activate`):\n"
        "  rollout-log ls demo-log --step 1                     # or --status truncated, --problem …\n"
        f"  rollout-log show demo-log {key} --json\n"
        "  rollout-log verify demo-log\n"
        f"  rollout-log replay demo-log {key}\n"
        "  rollout-log serve demo-log                           # a stand-in engine from your own log"
    )
    sys.stdout.flush()


if __name__ == "__main__":
    run()
