"""Hostile keys and text from the wire to every output: nothing obeys them, nothing is lost or mixed up."""

from __future__ import annotations

import json
import re
import unicodedata
from html.parser import HTMLParser
from pathlib import Path

import pytest

from recorded import PATH, SSE
from rollout_log.log import Log, LogReader
from rollout_log.record.samples import Samples

TEXTS = [
    "\x1b]0;title\x07\x1b[2J\x1b[31mred",
    "\x9b31m8-bit\x90q\x9c",
    "[red]markup[/red] [link=file:///etc/passwd]x[/link] :smile:",
    "</script><script>alert(1)</script><!-- ]]>",
    "' onmouseover='alert(1)\" onload=\"x",
    "right\u202eto\u2066left\u200b",
    "nul\x00inside",
    "\ud800lone\udfff",
    "two\nlines\r\ndata: {}\n\ndata: [DONE]\n\n",
    "\u2028\u2029\u0085",
    "../../../../etc/passwd",
    "%s %n {0} ${x} `id`",
]
KEYS = [
    *TEXTS,
    "a",
    "a/b",
    "a/b/c",
    "aa",
    "a\x00",
    "a~2",
    "a@1",
    "a#0",
    "é" * 350,
    "k" * 700,
    "k" * 699,
    "ключ 鍵 🔑",
    " ",
    "-o",
]


def frame(text: str, ids: list[int], finish: str | None = None) -> bytes:
    choice = {
        "index": 0,
        "token_ids": ids,
        "text": text,
        "logprobs": {"content": [{"token": text, "logprob": -0.5} for _ in ids]},
        "finish_reason": finish,
        "stop_reason": text if finish else None,
    }
    body = {"choices": [choice], "weight_version": text, "request_id": text, text: text}
    return b"data: " + json.dumps(body).encode() + b"\n\n"


def write(path: Path, keys: list[str], text_of=lambda number: TEXTS[number % len(TEXTS)]) -> None:
    """One sample a key, whose ids say whose they are, and whose every text is hostile."""
    with Log.open(path, run="r\x1b[31m<b>") as log:
        samples = Samples(log)
        for number, key in enumerate(keys):
            text = text_of(number)
            body = {
                "token_ids": [number, 1],
                "model": text,
                "sampling_params": {"logprobs": 1, "stop": [text]},
            }
            headers = [("x-h", text.encode("utf-8", "replace").decode("latin-1"))]
            exchange = samples.request(key, path=PATH, body=json.dumps(body).encode(), headers=headers)
            exchange.respond(200, [*SSE, *headers])
            exchange.feed(frame(text, [1000 + number]) + frame(text, [2000 + number], "stop"))
            exchange.end("eof", text.encode("utf-8", "replace").decode())
            exchange.mark(
                text.encode("utf-8", "replace").decode(), fields=text.encode("utf-8", "replace").decode()
            )
            assert exchange.broken is None


def check_samples(path: Path, keys: list[str]) -> None:
    with LogReader.open(path) as reader:
        for number, key in enumerate(keys):
            stored = key.encode("utf-8", "backslashreplace").decode()
            rollout = reader.rollout(reader.find(stored))
            assert rollout.prompt_token_ids == [number, 1], "no key leads to another's sample"
            assert rollout.choice().token_ids == [1000 + number, 2000 + number]


def assert_harmless(text: str) -> None:
    """Nothing a terminal obeys, but for line ends."""
    bad = {c for c in text if unicodedata.category(c) in {"Cc", "Cf", "Cs", "Zl", "Zp"}} - set(
        "\n\u200c\u200d"
    )
    assert not bad


class Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.scripts = 0
        self.handlers: list[str] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.scripts += tag == "script"
        self.handlers += [name for name, _ in attributes if name.startswith("on")]


@pytest.fixture
def hostile(tmp_path: Path) -> Path:
    write(tmp_path / "log", KEYS)
    return tmp_path / "log"


def test_no_key_is_lost_or_mixed_up(hostile):
    check_samples(hostile, KEYS)


@pytest.mark.parametrize("colour", [False, True])
def test_every_verb_shows_hostile_samples_and_obeys_none(hostile, call, tmp_path, colour, monkeypatch):
    if colour:
        monkeypatch.setenv("FORCE_COLOR", "1")
    with LogReader.open(hostile) as reader:
        names = [entry.name for entry in reader.samples()]
    assert len(names) == len(KEYS)
    listings = [[verb, hostile] for verb in ("ls", "steps", "stats", "verify", "replay")]
    shows = [["show", hostile, "--", name] for name in names]
    for verb in [*listings, *shows, ["diff", hostile, names[0], names[1]]]:
        result = call(*verb)
        assert result.code < 2, (verb, result.err)
        assert_harmless(
            re.sub(r"\x1b\[[0-9;]*m", "", result.out + result.err) if colour else result.out + result.err
        )
        if colour:
            assert "\x1b[31mred" not in result.out
    for verb in (["ls", hostile, "--json"], *(["show", hostile, "--json", "--", name] for name in names)):
        result = call(*verb)
        assert result.out.isascii()
        assert all(json.loads(line) for line in result.out.splitlines())


def test_every_export_carries_hostile_samples_unchanged(hostile, call, tmp_path):
    fixture, again = tmp_path / "f.jsonl", tmp_path / "again"
    for to in ("fixture", "jsonl", "perfetto", "trace", "parquet"):
        out = fixture if to == "fixture" else tmp_path / f"out.{to}"
        result = call("export", hostile, "--to", to, "-o", out)
        assert result.code == 0, result.err
    for line in (tmp_path / "out.jsonl").read_text().splitlines():
        assert json.loads(line)["token_ids"]
    json.loads((tmp_path / "out.trace").read_text())
    assert call("import", fixture, again).code == 0
    check_samples(again, KEYS)
    assert call("export", again, "--to", "fixture", "-o", tmp_path / "g.jsonl").code == 0
    assert (tmp_path / "g.jsonl").read_bytes() == fixture.read_bytes()
    assert call("verify", again).code == 0


def test_a_report_runs_nothing_of_its_samples(hostile, call, tmp_path):
    (tmp_path / "empty.html").touch()
    write(tmp_path / "plain", ["k"], lambda _: "harmless")
    found = {}
    for name in ("plain", "log"):
        result = call("report", tmp_path / name, "-o", tmp_path / f"{name}.html")
        assert result.code == 0, result.err
        tags = Tags()
        tags.feed((tmp_path / f"{name}.html").read_text())
        found[name] = tags
    assert found["log"].scripts == found["plain"].scripts
    assert found["log"].handlers == []
    html = (tmp_path / "log.html").read_text()
    assert "<script>alert(1)" not in html


@pytest.mark.parametrize("size", [1 << 17, pytest.param(10 << 20, marks=pytest.mark.campaign)])
def test_a_token_of_megabytes(tmp_path, call, size):
    token = "\x1b[31m<b>" * (size // 8)
    write(tmp_path / "log", ["k"], lambda _: token)
    check_samples(tmp_path / "log", ["k"])
    shown = call("show", tmp_path / "log", "k")
    assert shown.code == 0
    assert_harmless(shown.out)
    assert call("export", tmp_path / "log", "--to", "fixture", "-o", tmp_path / "f.jsonl").code == 0
    assert call("import", tmp_path / "f.jsonl", tmp_path / "again").code == 0
    check_samples(tmp_path / "again", ["k"])
