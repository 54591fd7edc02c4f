"""A credential that is planted wherever clients carry one is in no byte that recording leaves behind.

Prompts, labels and tool output are recorded as they are: what is in them is in the log.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import logging
import re
import stat
import zlib
from pathlib import Path

import httpx
import pyarrow.parquet
import pytest

from plugin.scripted import QUESTION, Scripted, delta, generate, new_sample, usage
from raw_server import EVENT_STREAM, RawStream, play
from recorded import PATH, frame
from rollout_log import vime
from rollout_log.log import Log, LogReader
from rollout_log.record import GenerationFailed, GenerationRefused, Recorder, RecordingTransport
from rollout_log.record.proxy import Proxy, serve_proxy
from rollout_log.record.retry import Backoff
from rollout_log.record.samples import Samples
from rollout_log.trainer.session import close_session, session_for
from trainer.truth import Tokenizer, expected_tokens

SECRET = "s3cr3t-PLANTED"
HEADERS = {
    "Authorization": f"Bearer {SECRET}",
    "Proxy-Authorization": f"Basic {SECRET}",
    "Cookie": f"sid={SECRET}",
    "X-Api-Key": SECRET,
    "api-key": SECRET,
    "Ocp-Apim-Subscription-Key": SECRET,
    "X-Auth-Token": SECRET,
    "X-Amz-Security-Token": SECRET,
    "X-Seen": "yes",
}
QUERY = f"?api-key={SECRET}&access_token={SECRET}&key={SECRET}&sig={SECRET}&seen=yes"
BODY = {"model": "m", "token_ids": [1, 2], "sampling_params": {"logprobs": 1}, "stream": True}
ANSWER = RawStream(
    headers=[*EVENT_STREAM, ("set-cookie", f"sid={SECRET}"), ("x-api-key", SECRET), ("x-seen", "yes")],
    body=frame(3) + frame(4, finish="stop"),
)
REFUSED = RawStream(401, [("content-type", "application/json"), ("set-cookie", SECRET)], b'{"error": "no"}')


def content_of(file: Path) -> bytes:
    """A file's bytes, and what they hold packed."""
    data = file.read_bytes()
    if data.startswith(b"PAR1"):
        return data + json.dumps(pyarrow.parquet.read_table(file).to_pylist(), default=repr).encode()
    if file.suffix == ".html":
        packed = re.findall(rb"[A-Za-z0-9+/]{40,}={0,2}", data)
        found = [zlib.decompressobj(-zlib.MAX_WBITS) for _ in packed]
        for inflate, text in zip(found, packed, strict=True):
            with contextlib.suppress(zlib.error, ValueError):
                data += inflate.decompress(base64.b64decode(text))
        assert b'"metadata"' in data, "it was unpacked"
    return data


def assert_nowhere(*places: Path | str) -> None:
    """Search files, whatever their kind, and texts; a compressed block is searched as what it holds."""
    for place in places:
        if isinstance(place, str):
            assert SECRET not in place
            continue
        for file in sorted(place.rglob("*") if place.is_dir() else [place]):
            if file.is_file():
                assert SECRET.encode() not in content_of(file), file
        if (place / "rollout-log.json").exists():
            with LogReader.open(place) as reader:
                entries = list(reader.samples())
                for entry in entries:
                    assert SECRET not in repr(entry)
                    assert SECRET not in repr(list(reader.events(entry.ref)))
            assert entries, "there is something to search"
            seen = [repr(event) for entry in entries for _, event in reader.events(entry.ref)]
            reader.close()
            assert any("x-seen" in event for event in seen), "other headers are recorded"


def assert_nothing_tells(log: Path, tmp_path: Path, call) -> None:
    """Every verb that reads the log, and everything it writes."""
    assert_nowhere(log)
    with LogReader.open(log) as reader:
        name = next(iter(reader.samples())).name
    formats = ("fixture", "perfetto", "trace", "jsonl", "parquet")
    written = {to: tmp_path / f"out-{to}" for to in formats} | {"report": tmp_path / "out.html"}
    for verb in (
        ["ls", log],
        ["ls", log, "--json"],
        ["show", log, name],
        ["show", log, name, "--json"],
        ["stats", log],
        ["steps", log],
        ["verify", log],
        ["replay", log, name],
        *(["export", log, "--to", to, "-o", written[to]] for to in formats),
        ["report", log, "-o", written["report"]],
    ):
        result = call(*verb)
        assert result.code < 2, result.err
        assert_nowhere(result.out, result.err)
    for file in written.values():
        assert b"choice" in file.read_bytes() or file.stat().st_size > 100
        assert_nowhere(file)


async def through_the_proxy(log: Path) -> None:
    with Log.open(log) as writer:
        async with (
            play(ANSWER, REFUSED) as engine,
            serve_proxy(writer, engine.url) as proxy,
            httpx.AsyncClient(headers=HEADERS) as client,
        ):
            for status in (200, 401):
                address = proxy.url.replace("://", f"://user:{SECRET}@") + PATH + QUERY
                answer = await client.post(address, json=BODY, headers={"Authorization": f"Bearer {SECRET}"})
                assert answer.status_code == status
            assert engine.requests[0].header("x-api-key") == SECRET, "it is passed on"
            assert SECRET in engine.requests[0].target


async def through_the_transport(log: Path) -> None:
    with Log.open(log) as writer:
        async with play(ANSWER, REFUSED) as engine:
            transport = RecordingTransport(writer, httpx.AsyncHTTPTransport())
            async with httpx.AsyncClient(transport=transport, headers=HEADERS) as client:
                for status in (200, 401):
                    address = engine.url.replace("://", f"://user:{SECRET}@") + PATH + QUERY
                    assert (await client.post(address, json=BODY)).status_code == status


async def through_the_recorder(log: Path) -> None:
    with Log.open(log) as writer:
        async with play(ANSWER, REFUSED) as engine, httpx.AsyncClient(headers=HEADERS) as client:
            recorder = Recorder(writer, client, backoff=Backoff(0.001, 0.001, 1))
            address = engine.url.replace("://", f"://user:{SECRET}@") + PATH + QUERY
            assert (await recorder.generate("k", address, BODY, headers=HEADERS)).status == "completed"
            with pytest.raises(GenerationRefused) as refused:
                await recorder.generate("l", address, BODY, headers=HEADERS)
            assert_nowhere(str(refused.value))
        async with httpx.AsyncClient() as client:
            recorder = Recorder(writer, client, backoff=Backoff(0.001, 0.001, 1))
            with pytest.raises(GenerationFailed, match="Is the engine at") as failed:
                await recorder.generate("m", address, BODY, headers=HEADERS)
        assert_nowhere(str(failed.value))
        with pytest.raises(Exception, match="no path an engine generates on") as wrong:
            await recorder.generate("m", f"http://u:{SECRET}@h/x?api_key={SECRET}", BODY)
        assert_nowhere(str(wrong.value))


@pytest.mark.parametrize("tap", [through_the_proxy, through_the_transport, through_the_recorder])
def test_a_planted_secret_is_nowhere(tap, tmp_path, call, caplog):
    caplog.set_level(logging.DEBUG, "rollout_log")
    log = tmp_path / "log"
    asyncio.run(tap(log))
    assert_nothing_tells(log, tmp_path, call)
    assert_nowhere(caplog.text)


def test_a_planted_secret_is_nowhere_after_a_plug_in(  # noqa: PLR0917 - fixtures
    rig, plugin_log, tmp_path, call, caplog, monkeypatch
):
    caplog.set_level(logging.DEBUG, "rollout_log")
    monkeypatch.setenv("WANDB_API_KEY", SECRET)
    monkeypatch.setenv("HF_TOKEN", SECRET)
    _, trainer = rig(questions=[QUESTION], generate="rollout_log.vime.generate")
    trainer.args.wandb_key = SECRET
    trainer.http._http_client.headers.update(HEADERS)
    tokens = expected_tokens(Tokenizer().encode(QUESTION), 0, 10)
    engine = Scripted([delta(tokens, 0, "stop"), usage(20, 10)])
    generate(trainer, vime.generate, engine, new_sample())
    assert engine.headers[0]["authorization"] == f"Bearer {SECRET}"
    assert session_for(trainer.args).log is not None
    close_session()
    with LogReader.open(plugin_log) as reader:
        (entry,) = reader.samples()
        assert SECRET not in repr(list(reader.events(entry.ref)))
    for file in plugin_log.rglob("*"):
        assert file.is_dir() or SECRET.encode() not in file.read_bytes()
    assert_nowhere(call("show", plugin_log, entry.name, "--json").out, caplog.text)


@pytest.mark.parametrize("upstream", [f"http://user:{SECRET}@h:1", f"http://h:1/?api_key={SECRET}"])
def test_an_upstream_with_a_credential_is_refused_without_repeating_it(upstream, tmp_path, call):
    with pytest.raises(ValueError, match="is no upstream") as refused:
        Proxy(Samples(None), upstream)
    assert_nowhere(str(refused.value))
    result = call("record", tmp_path / "log", "--upstream", upstream)
    assert result.code == 2
    assert_nowhere(result.out, result.err)


def test_files_are_for_their_owner_alone(tmp_path):
    """Whatever the umask: the log's directories 0700, its files 0600."""
    import os

    before = os.umask(0)
    try:
        asyncio.run(through_the_transport(tmp_path / "log"))
    finally:
        os.umask(before)
    found = {
        path: stat.S_IMODE(path.stat().st_mode) for path in [tmp_path / "log", *(tmp_path / "log").rglob("*")]
    }
    assert {mode for path, mode in found.items() if path.is_dir()} == {0o700}
    assert {mode for path, mode in found.items() if path.is_file()} == {0o600}
