"""SIGTERM and SIGINT are no crash: what was recorded by then is on disk, whoever runs the loop."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

import httpx
import pytest

from raw_server import RawStream, play
from recorded import PATH, frame
from rollout_log.log import LogReader
from rollout_log.log.verify import verify

HERE = Path(__file__).parent
HELD = RawStream(body=frame(11) + frame(12) + frame(13), end="hang")


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE.parent), *filter(None, sys.path)])}


def check(log: Path, streams: int) -> None:
    assert verify(log).damage == []
    with LogReader.open(log) as reader:
        lengths = [reader.rollout(entry.ref).length for entry in reader.samples()]
    assert lengths == [3] * streams, "nothing of an hour's window is lost"


@pytest.mark.parametrize(
    ("kind", "number"),
    [
        ("recorder", signal.SIGINT),
        ("recorder", signal.SIGTERM),
        ("handled", signal.SIGTERM),
        ("plugin", signal.SIGINT),
        ("plugin", signal.SIGTERM),
    ],
)
async def test_a_signal_flushes(kind, number, tmp_path):
    async with play(choose=lambda _: HELD) as engine:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, HERE / "signalled.py", kind, tmp_path / "log", engine.url + PATH),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=environment(),
        )
        assert process.stdout is not None
        assert await asyncio.wait_for(process.stdout.readline(), 60) == b"ready\n", (
            await process.stderr.read()
        )
        process.send_signal(number)
        _, errors = await asyncio.wait_for(process.communicate(), 60)
    expected = -number if number == signal.SIGINT or kind == "recorder" else 1
    assert process.returncode == expected, errors
    check(tmp_path / "log", 4)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_a_signal_ends_the_proxy_with_everything_written(number, tmp_path):
    async with play(choose=lambda _: HELD) as engine:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "rollout_log.cli", "record", tmp_path / "log"),
            *("--upstream", engine.url, "--listen", "127.0.0.1:0", "--window-ms", "3600000"),
            stdout=asyncio.subprocess.PIPE,
            env=environment(),
        )
        assert process.stdout is not None
        url = (await asyncio.wait_for(process.stdout.readline(), 60)).split()[0].decode()
        async with httpx.AsyncClient(timeout=None) as client:
            got = b""
            async with client.stream("POST", url + PATH, json={"token_ids": [1, 2]}) as response:
                async for chunk in response.aiter_raw():
                    got += chunk
                    if got == HELD.body:
                        break
                process.send_signal(number)
                await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 0
    check(tmp_path / "log", 1)
