"""The verb `record`, as a process: what it prints, what it writes, how it ends."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import sys

import httpx
import pytest

from captures import load
from raw_server import RawStream, captured, play
from rollout_log import cli
from rollout_log.log import Log, LogReader


@contextlib.asynccontextmanager
async def recording(*args: str):
    """The command as a process, and the first line it prints."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "rollout_log.cli", "record", *args, stdout=asyncio.subprocess.PIPE
    )
    try:
        line = await asyncio.wait_for(process.stdout.readline(), 60)
        yield process, line.decode()
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


@pytest.mark.parametrize("ended_by", [signal.SIGINT, signal.SIGTERM])
async def test_a_signal_ends_it_with_everything_written(tmp_path, ended_by):
    capture = load("a1-plain-length")
    hanging = RawStream(200, capture.headers, capture.body[:3000], end="hang")
    log = tmp_path / "log"
    async with play(captured(capture), hanging) as engine:
        args = [str(log), "--upstream", engine.url, "--listen", "127.0.0.1:0", "--window-ms", "60000"]
        async with recording(*args, "--durability", "window") as (process, line):
            url = line.split()[0]
            assert line == (
                f"{url} passes on to {engine.url} and records into {log}; "
                "a kill loses at most the last 60000 ms and the commit under way\n"
            )
            path, body = url + capture.request["path"], capture.request["body"]
            async with httpx.AsyncClient(timeout=60) as client:
                response = await client.post(path, json=body, headers={"X-Rollout-Log-Key": "whole"})
                assert response.content == capture.body
                headers = {"X-Rollout-Log-Key": "stopped"}
                async with client.stream("POST", path, json=body, headers=headers) as stream:
                    chunks = stream.aiter_raw()
                    assert await anext(chunks) == capture.body[:3000]
                    process.send_signal(ended_by)
                    rest, _ = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 0
    assert rest.decode().startswith("wrote ")
    with LogReader.open(log) as reader:
        whole, stopped = reader.rollout("whole"), reader.rollout("stopped")
        assert {entry.summary.key for entry in reader.samples()} == {"whole", "stopped"}
    assert whole.status == "truncated"
    tokens, kept = whole.choice_or_first().token_ids, stopped.choice_or_first().token_ids
    assert len(tokens) == 32
    assert stopped.status == "aborted"
    assert 0 < len(kept) < 32
    assert kept == tokens[: len(kept)]
    assert stopped.requests[0].detail == "the proxy was stopped"


def call(capsys, *args: str) -> tuple[int, str]:
    """Exit status and standard error."""
    with pytest.raises(SystemExit) as ended:
        cli.main(["record", *args])
    return int(ended.value.code or 0), capsys.readouterr().err


def test_an_address_that_is_taken_leaves_nothing_behind(tmp_path, capsys):
    there = tmp_path / "there"
    Log.open(there).close()
    before = sorted(there.iterdir())
    with socket.create_server(("127.0.0.1", 0)) as taken:
        listen = f"127.0.0.1:{taken.getsockname()[1]}"
        for log in (tmp_path / "new", there):
            status, err = call(capsys, str(log), "--upstream", "http://127.0.0.1:1", "--listen", listen)
            assert (status, err.count("\n")) == (2, 1)
            assert f"cannot listen on {listen}: Address already in use" in err
    assert not (tmp_path / "new").exists()
    assert sorted(there.iterdir()) == before


def test_mistakes_are_named(tmp_path, capsys):
    log = str(tmp_path / "log")
    for args, message in [
        (["--upstream", "engine:8000"], "'engine:8000' is no upstream"),
        (["--upstream", "http://engine:port"], "'http://engine:port' is no upstream"),
        (["--upstream", "http://e", "--listen", "localhost"], "'localhost' is no HOST:PORT"),
        ([], "missing option '--upstream'"),
    ]:
        status, err = call(capsys, log, *args)
        assert status == 2
        assert message in " ".join(err.replace("│", " ").split())
        assert not (tmp_path / "log").exists()
