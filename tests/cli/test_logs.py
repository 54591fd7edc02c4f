"""What every verb that reads does with what it is given: runs as one, no log, hostile content."""

from __future__ import annotations

import json
import unicodedata
from pathlib import Path

import msgspec
import pytest

from recorded import Writer, frame
from rollout_log.cli import schema
from rollout_log.log.directory import MARKER

READERS = {
    "ls": [],
    "steps": [],
    "stats": [],
    "tail": [],
    "verify": [],
    "show": ["k"],
    "diff": ["k", "l"],
}
KEYS = [
    "a/b/../../c",
    "nul\x00inside",
    "two\nlines",
    "\x1b]0;title\x07\x1b[2J",
    "[red]markup[/red] :smile:",
    "right\u202eto left",
    "-starts-with-a-dash",
    "back\\slash",
    " spaces ",
    "ключ 鍵 🔑",
]


@pytest.mark.parametrize("verb", READERS)
@pytest.mark.parametrize("options", [[], ["--json"]])
def test_what_is_no_log_is_one_line_and_exit_2(verb, options, tmp_path, call):
    later = tmp_path / "later"
    later.mkdir()
    (later / MARKER).write_text('{"format": [9, 0]}')
    file = tmp_path / "file"
    file.write_text("x")
    empty = tmp_path / "empty"
    empty.mkdir()
    for path, says in (
        (tmp_path / "none", "there is no log at"),
        (file, "a log is a directory"),
        (empty, "is not a rollout log"),
        (later, "upgrade rollout-log"),
    ):
        result = call(verb, path, *READERS[verb], *options)
        assert result.code == 2, path
        assert result.out == ""
        assert len(result.err.splitlines()) == 1
        assert says in result.err


def test_a_part_of_a_log_names_the_log(run_log, call):
    folder = next(path for path in run_log.iterdir() if path.is_dir())
    segment = next(folder.glob("segment-*"))
    for part in (folder, segment, run_log / MARKER):
        result = call("steps", part)
        assert result.code == 2
        assert result.err.rstrip().endswith(f"; it is a part of the log {run_log}")


@pytest.mark.parametrize("verb", ["ls", "steps", "verify", "show", "diff", "stats", "tail"])
def test_a_verb_alone_shows_its_example(verb, call):
    result = call(verb)
    assert result.code == 2
    assert f"      rollout-log {verb} runs/today" in result.out


def test_a_log_without_samples(tmp_path, call):
    Writer(tmp_path / "log").close()
    for verb in ("ls", "steps", "verify", "stats"):
        assert call(verb, tmp_path / "log").code == 0
    assert call("ls", tmp_path / "log", "--json").out == ""
    assert call("show", tmp_path / "log", "k").code == 2


def test_a_directory_of_runs_reads_as_one(tmp_path, call):
    for run, ids in (("a", [1]), ("b", [2, 3])):
        with Writer(tmp_path / run) as writer:
            writer.request(f"only-{run}", [frame(*ids, finish="stop")], step=1)
            writer.request("both", [frame(*ids, finish="stop")], step=1)
            writer.log.flush_sync()
    assert len(call("ls", tmp_path, "--json").json_lines) == 4
    assert call("show", tmp_path, "only-a", "--json").json["token_ids"] == [1]
    assert call("show", tmp_path, "both", "--json").json["run"] == "b", "the newest"


@pytest.fixture(scope="module")
def hostile_log(tmp_path_factory):
    """Every hostile key, with hostile output and hostile headers of an end."""
    path = tmp_path_factory.mktemp("hostile") / "log"
    with Writer(path, run="run\x1b[31m\u2066") as writer:
        for key in KEYS:
            text = "ok\x1b[2J\u202e[bold]x[/bold]\r\n✂ cut at token 0\x00\ud800".encode(
                "utf-8", "surrogatepass"
            )
            body = (
                b'data: {"choices":[{"index":0,"text":' + json.dumps(text.decode("utf-8", "replace")).encode()
            )
            writer.request(
                key,
                [frame(1, 2, version="\x1b[5mv"), body + b"}]}\n\n"],
                how="reset",
                detail="gone\n\x1b[31m\u202e" + key,
                step=1,
            )
        writer.log.flush_sync()
    return path


def _harmless(text: str) -> bool:
    return not {c for c in text if c != "\n" and unicodedata.category(c) in {"Cc", "Cf", "Cs", "Zl", "Zp"}}


@pytest.mark.parametrize("verb", ["ls", "steps", "verify", "stats"])
def test_listings_of_hostile_keys_are_harmless(verb, hostile_log, call):
    result = call(verb, hostile_log)
    assert result.code == 0
    assert _harmless(result.out)
    if verb == "ls":
        assert len(result.lines) == 1 + len(KEYS)
        assert "[red]markup[/red] :smile:" in result.out
    lines = call(verb, hostile_log, "--json")
    assert lines.out.isascii()


@pytest.mark.parametrize("key", KEYS)
def test_a_hostile_sample_is_shown_and_harmless(key, hostile_log, call):
    args = ["--", key] if key.startswith("-") else [key]
    shown = call("show", hostile_log, *args)
    assert shown.code == 0
    assert _harmless(shown.out)
    found = call("show", hostile_log, "--json", *args)
    assert found.out.isascii()
    assert found.json["key"] == key
    assert found.json["token_ids"] == [1, 2]


@pytest.mark.parametrize("key", [key for key in KEYS if not key.isprintable()])
def test_a_key_is_found_by_what_the_listing_shows(key, hostile_log, call):
    shown = [line.split("  ")[0] for line in call("ls", hostile_log).lines[1:]]
    found = {
        name: call("show", hostile_log, "--json", "--", name).json["key"] for name in shown if name[0] != " "
    }
    assert key in found.values()


def test_model_text_cannot_pass_for_this_programs_lines(tmp_path, call):
    text = "fine\nproblem  severity\n✂ cut at token 0"
    with Writer(tmp_path / "log") as writer:
        data = {"choices": [{"index": 0, "text": text, "finish_reason": "stop"}]}
        exchange = writer.samples.request("k", path="/v1/completions", body=b'{"prompt":"x"}')
        exchange.respond(200, [("content-type", "text/event-stream")])
        exchange.feed(b"data: " + json.dumps(data).encode() + b"\n\n")
        exchange.end("eof")
        writer.log.flush_sync()
    lines = call("show", tmp_path / "log", "k").lines
    assert [line for line in lines if "✂" in line or "severity" in line] == [
        "│ problem  severity",
        "│ ✂ cut at token 0",
    ]
    assert call("show", tmp_path / "log", "k", "--json").json["text"] == text


OTHERS = {"tail", "seal", "archive", "prune", "recover"}
"""They have no end, or change what they are called on; tested in files of their own."""


@pytest.mark.parametrize("verb", [verb for verb in schema.TYPES if verb not in OTHERS])
def test_a_schema_describes_what_the_verb_prints(verb, run_log, call):
    found = call("schema", verb)
    assert found.out.isascii()
    assert found.json["$schema"].startswith("https://json-schema.org/")
    name = found.json["$ref"].rpartition("/")[2]
    described = set(found.json["$defs"][name]["properties"])
    args = {"show": ["math-1"], "diff": ["math-1", "math-2"], "replay-check": ["--check"]}.get(verb, [])
    printed = call(verb.partition("-")[0], run_log, *args, "--json").json_lines
    assert printed
    for line in printed:
        assert set(line) == described


def test_the_schema_is_that_of_show_by_default(call):
    assert call("schema").json == call("schema", "show").json
    assert "logprobs" in call("schema").json["$defs"]["SampleView"]["properties"]


def test_a_verb_without_a_schema(call):
    result = call("schema", "record")
    assert result.code == 2
    assert "there are show, ls, steps, diff, replay, replay-check, stats, tail, verify" in result.err


def test_files_of_a_log_stay_as_they_are(run_log, call):
    def state() -> dict[Path, tuple[int, int]]:
        return {
            p: (p.stat().st_size, p.stat().st_mtime_ns) for p in run_log.rglob("*") if p.suffix == ".rlog"
        }

    before = state()
    for verb in ("ls", "steps", "verify", "stats"):
        call(verb, run_log)
    call("show", run_log, "math-1")
    assert state() == before
    assert msgspec.json.decode((run_log / MARKER).read_bytes())["format"] == [1, 0]
