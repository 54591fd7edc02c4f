"""The verb `serve`, as a process: what it prints, what it serves, how it ends."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import sys

import httpx
import pytest

from captures import load
from raw_server import captured, play
from rollout_log import cli
from rollout_log.log import Log
from rollout_log.record.proxy import serve_proxy
from rollout_log.record.samples import Samples
from rollout_log.replay.desk import Desk

NAME = "c1-include-usage"


@contextlib.asynccontextmanager
async def serving(*args: str):
    """The command as a process, and the first line it prints."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "rollout_log.cli", "serve", *args, "--listen", "127.0.0.1:0",
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        line = await asyncio.wait_for(process.stdout.readline(), 60)
        yield process, line.decode()
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


@pytest.fixture
async def log(tmp_path):
    """A log of two samples: the same capture under two keys."""
    capture = load(NAME)
    path, body = capture.request["path"], capture.request["body"]
    writer = Log.open(tmp_path / "log")
    async with (
        play(captured(capture), captured(capture)) as engine,
        serve_proxy(writer, engine.url) as proxy,
        httpx.AsyncClient() as client,
    ):
        for key in ("one", "two"):
            await client.post(proxy.url + path, json=body, headers={"X-Rollout-Log-Key": key})
    writer.close()
    return tmp_path / "log"


@pytest.mark.parametrize("ended_by", [signal.SIGINT, signal.SIGTERM])
async def test_it_serves_a_log_and_says_what_was_not_asked_for(log, ended_by):
    capture = load(NAME)
    async with serving(str(log)) as (process, line):
        url = line.split()[0]
        assert line == f"{url} serves 2 samples of {log} on /inference/v1/generate\n"
        async with httpx.AsyncClient() as client:
            response = await client.post(url + capture.request["path"], json=capture.request["body"])
        assert response.content == capture.body
        process.send_signal(ended_by)
        out, _ = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 0
    assert out.decode() == "never asked for: 1 sample\n  'two'\n"


async def test_a_log_that_is_given_twice_is_served_once(log):
    assert len(Desk([log, str(log / ".." / "log")]).matcher.recordings) == 2


async def test_a_miss_fails_it(log):
    async with serving(str(log)) as (process, line):
        async with httpx.AsyncClient() as client:
            body = {"token_ids": [1], "sampling_params": {}}
            response = await client.post(line.split()[0] + load(NAME).request["path"], json=body)
        assert response.status_code == 404
        process.send_signal(signal.SIGTERM)
        out, err = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 1
    assert (
        "asked for in vain: 1 time\n  no recording of /inference/v1/generate with 1 token ids" in out.decode()
    )
    assert "no recording of /inference/v1/generate with 1 token ids" in err.decode()


async def test_it_says_that_a_stream_is_held(tmp_path):
    capture = load(NAME)
    log = Log.open(tmp_path / "log")
    samples = Samples(log)
    exchange = samples.request(
        "left", path=capture.request["path"], body=json.dumps(capture.request["body"]).encode()
    )
    exchange.respond(200, [("content-type", "text/event-stream")])
    exchange.feed(capture.body[: capture.body.index(b"\n\n") + 2])
    exchange.end("cancelled")
    log.close()
    async with serving(str(tmp_path / "log")) as (process, line), httpx.AsyncClient() as client:
        url = line.split()[0] + capture.request["path"]
        async with client.stream("POST", url, json=capture.request["body"]):
            said = await asyncio.wait_for(process.stderr.readline(), 60)
    assert said.decode().startswith("replay: left is held at token 1, where the recording was aborted")


async def test_faults_come_from_a_file(log, tmp_path):
    faults = tmp_path / "faults.json"
    faults.write_text('{"status_500": 1}')
    capture = load(NAME)
    async with serving(str(log), "--faults", str(faults)) as (_, line), httpx.AsyncClient() as client:
        url = line.split()[0]
        assert (await client.get(url + "/_rollout_log/faults")).json()["status_500"] == 1
        response = await client.post(url + capture.request["path"], json=capture.request["body"])
        assert response.status_code == 500


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--pace", "brisk"], "'brisk' is no number from 0 up, or recorded"),
        (["--pace", "-1"], "'-1' is no number from 0 up, or recorded"),
        (["--listen", "here"], "'here' is no HOST:PORT"),
        (["--fault", "drop=20x"], "these are no faults: 'drop=20x': drop takes fin or rst"),
        (["--faults", "/nope.json"], "rollout-log: /nope.json: No such file or directory"),
        (["--fault", "split", "--faults", "x.json"], "there is --fault as well"),
        ([], "there is no log at"),
    ],
)
def test_what_it_refuses(tmp_path, capsys, args, message):
    with pytest.raises(SystemExit) as ended:
        cli.main(["serve", str(tmp_path / "none"), *args])
    assert ended.value.code == 2
    assert message in " ".join(capsys.readouterr().err.replace("│", " ").split())
