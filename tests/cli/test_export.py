"""`export`: each format read back by what is to open it, or held against its rules."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from collections import defaultdict
from typing import Any

import pytest

from recorded import Writer, frame
from rollout_log.cli.export import FORMATS

ALL = ["math-1", "math-2", "math-3", "chat-1", "chat-2", "held-out"]


@pytest.fixture
def export(tmp_path, call):
    """Exports a log, and returns the file."""

    def run(log, to, *args, name="out"):
        result = call("export", log, "--to", to, "-o", tmp_path / name, *args)
        assert (result.code, result.out) == (0, ""), result.err
        return tmp_path / name

    return run


def tracks(path) -> dict[str, list[dict[str, Any]]]:
    """The async events of a Chrome trace by track, which must nest."""
    found = defaultdict(list)
    for event in json.loads(path.read_text())["traceEvents"]:
        if event["ph"] in "ben":
            assert isinstance(event["ts"], int)
            found[event["id"]].append(event)
    for events in found.values():
        depth: list[str] = []
        for event in sorted(events, key=lambda event: event["ts"]):
            if event["ph"] == "b":
                depth.append(event["name"])
            elif event["ph"] == "e":
                assert depth.pop() == event["name"]
        assert not depth
    return dict(found)


def test_perfetto_has_a_track_a_sample_and_its_requests_in_it(run_log, export):
    path = export(run_log, "perfetto")
    found = {events[0]["name"]: events for events in tracks(path).values()}
    assert sorted(found) == sorted(ALL)
    resumed = found["math-2"]
    assert [event["name"] for event in resumed if event["ph"] == "b"] == [
        "math-2",
        "request 0: first",
        "request 1: resume",
    ]
    assert {"aborted", "resume", "first token"} <= {event["name"] for event in resumed if event["ph"] == "n"}
    assert resumed[0]["args"]["status"] == "completed"
    retried = found["math-3"]
    assert {"reset", "retry"} <= {event["name"] for event in retried if event["ph"] == "n"}
    assert all(event["name"] != "chunk" for events in found.values() for event in events)


def test_perfetto_marks_weight_updates_and_names_runs(run_log, export):
    events = json.loads(export(run_log, "perfetto").read_text())["traceEvents"]
    assert events[0] == {"ph": "M", "name": "process_name", "pid": 1, "tid": 0, "args": {"name": "today"}}
    weights = [event for event in events if event["ph"] == "i"]
    assert [event["name"] for event in weights] == ["weights 7", "weights 8"]
    assert weights[0]["ts"] <= weights[1]["ts"]


def test_perfetto_marks_each_chunk_when_asked(run_log, export):
    path = export(run_log, "perfetto", "--chunks", "math-1")
    (events,) = tracks(path).values()
    assert [event["name"] for event in events].count("chunk") == 3  # two with tokens, and [DONE]


def test_a_step_or_keys_alone(run_log, export):
    lines = export(run_log, "jsonl", "--step", 2).read_text().splitlines()
    assert [json.loads(line)["key"] for line in lines] == ["math-2", "chat-2", "held-out"]
    lines = export(run_log, "jsonl", "held-out", "math-1").read_text().splitlines()
    assert [json.loads(line)["key"] for line in lines] == ["held-out", "math-1"]


def test_evaluations_alone(run_log, export, call, tmp_path):
    lines = export(run_log, "jsonl", "--evaluation").read_text().splitlines()
    assert [json.loads(line)["key"] for line in lines] == ["held-out"]
    refused = call("export", run_log, "--to", "pt", "--step", 2, "--evaluation", "-o", tmp_path / "e.pt")
    assert refused.code == 2
    assert refused.err == (
        "rollout-log: the log does not say which samples the trainer took for evaluation 2 "
        "(1 sample had a part in it): the run has to use "
        "--custom-eval-rollout-log-function-path rollout_log.vime.log_eval_metrics\n"
    )
    nothing = call("export", run_log, "--to", "jsonl", "--step", 1, "--evaluation", "-o", tmp_path / "e")
    assert nothing.err == (
        "rollout-log: no sample of step 1 matches --evaluation; without it there are some\n"
    )


def test_what_was_written_is_said(run_log, call, tmp_path):
    result = call("export", run_log, "--to", "jsonl", "--step", 2, "-o", tmp_path / "out")
    size = (tmp_path / "out").stat().st_size / 1000
    assert result.err == f"rollout-log: {tmp_path / 'out'}, {size:.3g} kB, with 3 samples\n"


def test_jsonl_is_what_show_says(run_log, export, call):
    lines = export(run_log, "jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [call("show", run_log, key, "--json").json for key in ALL]


def test_each_choice_is_a_line(tmp_path, export):
    with Writer(tmp_path / "log") as writer:
        writer.request(
            "k", [frame(1, choice=0, finish="stop"), frame(2, 3, choice=1, finish="stop")], params={"n": 2}
        )
        writer.log.flush_sync()
    lines = export(tmp_path / "log", "jsonl").read_text().splitlines()
    assert [(line["key"], line["token_ids"]) for line in map(json.loads, lines)] == [
        ("k#0", [1]),
        ("k#1", [2, 3]),
    ]


def test_the_trace_carrier(run_log, export):
    data = json.loads(export(run_log, "trace", "--step", 2, name="t.json").read_text())
    assert data["rollout_id"] == 2
    sample = data["samples"][0]
    assert (sample["source"], sample["status"], sample["response_length"]) == ("math-2", "completed", 4)
    trace = sample["trace"]
    assert {name: type(trace[name]) for name in ("version", "trace_id", "events", "attempt")} == {
        "version": int,
        "trace_id": str,
        "events": list,
        "attempt": int,
    }
    assert trace["attempt"] == 1
    events = trace["events"]
    assert [(event["type"], event["name"]) for event in events] == [
        ("span_start", "sample"),
        ("span_start", "vllm_generate"),
        ("event", "first_token"),
        ("event", "aborted"),
        ("span_end", "vllm_generate"),
        ("event", "attempt_start"),
        ("span_start", "vllm_generate"),
        ("event", "first_token"),
        ("span_end", "vllm_generate"),
        ("span_end", "sample"),
    ]
    for event in events:
        assert event.keys() >= {"type", "name", "ts", "trace_id", "sample_id", "group_id", "attempt"}
        assert event["trace_id"] == trace["trace_id"]
    starts = {event["span_id"]: event for event in events if event["type"] == "span_start"}
    ends = [event for event in events if event["type"] == "span_end"]
    assert {event["span_id"] for event in ends} == set(starts)
    assert [start.get("parent_span_id") for start in starts.values()] == [None, *[events[0]["span_id"]] * 2]
    assert ends[0]["attrs"]["ended"] == "aborted"
    assert ends[1]["attrs"]["completion_tokens"] == 2


def test_an_open_request_leaves_its_spans_open(run_log, export):
    data = json.loads(export(run_log, "trace", "chat-2", name="t.json").read_text())
    kinds = [event["type"] for event in data["samples"][0]["trace"]["events"]]
    assert kinds == ["span_start", "span_start", "event"]


def test_a_trace_as_pt_takes_pytorch(run_log, call, tmp_path, monkeypatch):
    saved = {}

    class Torch:
        @staticmethod
        def save(data, path):
            path.write_bytes(b"pt")
            saved.update(data)

    monkeypatch.setitem(sys.modules, "torch", Torch)
    assert call("export", run_log, "--to", "trace", "-o", tmp_path / "t.pt").code == 0
    assert (tmp_path / "t.pt").read_bytes() == b"pt"
    assert len(saved["samples"]) == 6


def test_parquet_is_the_view_as_a_row(run_log, export, call):
    parquet = pytest.importorskip("pyarrow.parquet")
    table = parquet.read_table(export(run_log, "parquet"))
    rows = table.to_pylist()
    assert [row["key"] for row in rows] == ALL
    for row in rows:
        shown = call("show", run_log, row["key"], "--json").json
        reward_number = row.pop("reward_number")
        assert reward_number == (1.5 if row["key"] == "math-1" else None)
        for name in ("reward", "usage", "stop_reason"):
            row[name] = None if row[name] is None else json.loads(row[name])
        assert row == shown


def test_parquet_takes_hostile_text_and_rewards(tmp_path, export):
    parquet = pytest.importorskip("pyarrow.parquet")
    from rollout_log.events import Closed

    with Writer(tmp_path / "log") as writer:
        for key, reward in (("a\x00/b\n", {"x": [1, "y"]}), ("b", True), ("c", 2)):
            exchange = writer.request(key, [b'data: {"choices":[{"index":0,"text":"\\ud83d <b>"}]}\n\n'])
            closed = Closed(reward=reward)
            exchange.sample.rollout.apply(closed)
            exchange.sample.write([closed], summarized=True)
        writer.log.flush_sync()
    rows = parquet.read_table(export(tmp_path / "log", "parquet")).to_pylist()
    assert [row["key"] for row in rows] == ["a\x00/b\n", "b", "c"]
    assert [json.loads(row["reward"]) for row in rows] == [{"x": [1, "y"]}, True, 2]
    assert [row["reward_number"] for row in rows] == [None, None, 2.0]
    assert {row["text"] for row in rows} == {"\ufffd <b>"}


def test_parquet_may_go_into_a_pipe(run_log):
    pq = pytest.importorskip("pyarrow.parquet")
    command = [sys.executable, "-m", "rollout_log.cli", "export", run_log, "--to", "parquet", "-o", "-"]
    done = subprocess.run(command, capture_output=True, check=True)
    assert pq.read_table(io.BytesIO(done.stdout)).num_rows == 6


@pytest.mark.parametrize("to", FORMATS)
def test_what_failed_leaves_nothing_and_spoils_nothing(to, run_log, call, tmp_path, monkeypatch):
    if to == "parquet":
        pytest.importorskip("pyarrow")
    (tmp_path / "out").write_text("before")

    def fail(*_):
        raise OSError("the disk is full")

    monkeypatch.setattr("rollout_log.log.LogReader.rollout", fail)
    result = call("export", run_log, "--to", to, "--step", 1, "-o", tmp_path / "out")
    assert (result.code, result.err) == (2, "rollout-log: the disk is full\n")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert (tmp_path / "out").read_text() == "before"


@pytest.mark.parametrize(
    ("args", "library", "said"),
    [
        (["parquet"], "pyarrow", "a Parquet file needs the library 'pyarrow': install the extra `parquet`"),
        (["trace"], "torch", "a .pt file needs the library 'torch': install the extra `torch`"),
        (
            ["jsonl", "--tokenizer", __file__],
            "tokenizers",
            "text needs the library 'tokenizers': install the extra `tokenizer`",
        ),
    ],
)
def test_a_library_that_is_missing_is_named_with_its_extra(args, library, said, monkeypatch, request):
    call, run_log, tmp_path = map(request.getfixturevalue, ("call", "run_log", "tmp_path"))
    monkeypatch.setitem(sys.modules, library, None)
    done = call("export", run_log, "-o", tmp_path / "out.pt", "--to", *args)
    assert done.code == 2
    assert done.err.startswith(f"rollout-log: {said} (in a checkout: pip install '.[")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("args", "formats"),
    [
        (["jsonl", "--redact", "text"], "--to fixture"),
        (["fixture", "--chunks"], "--to perfetto"),
        (["trace", "--tokenizer", "x"], "--to jsonl and --to parquet"),
    ],
)
def test_an_option_of_another_format_is_refused(args, formats, run_log, call, tmp_path):
    done = call("export", run_log, "-o", tmp_path / "out", "--to", *args)
    assert done.code == 2
    assert done.err == f"rollout-log: {args[1]} is for {formats}; rollout-log export --help says more\n"
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("to", ["fixture", "jsonl"])
def test_a_key_that_is_named_twice_is_one_sample(to, run_log, call, export, tmp_path):
    once = export(run_log, to, "math-1", "math-2", name="once").read_text()
    done = call("export", run_log, "--to", to, "-o", tmp_path / "twice", "math-1", "math-2", "math-1@0")
    assert (tmp_path / "twice").read_text() == once
    assert done.err.endswith("with 2 samples\n")
    assert (
        call("replay", run_log, "--check", "math-1", "math-1").out == "1 sample replayed, all as recorded\n"
    )
    assert call("import", run_log, tmp_path / "log", "math-1", "math-1").out.startswith("1 sample copied")


def test_an_unknown_format_or_key(run_log, call, tmp_path):
    assert call("export", run_log, "--to", "xml", "-o", tmp_path / "out").code == 2
    missing = call("export", run_log, "--to", "jsonl", "-o", tmp_path / "out", "math-9")
    assert missing.code == 2
    assert "'math-1'" in missing.err
    assert not list(tmp_path.glob("*out*"))


@pytest.mark.parametrize("to", ["jsonl", "fixture"])
def test_a_link_stays_one(to, run_log, call, tmp_path):
    """As /dev/stdout is one, to a file where the shell redirects it."""
    link, file = tmp_path / "stdout", tmp_path / "file"
    link.symlink_to(file)
    file.touch()
    assert call("export", run_log, "--to", to, "-o", link).code == 0
    assert link.is_symlink()
    assert "math-1" in file.read_text()
