"""`replay`: stories, time travel, and recordings sent through client code again."""

from __future__ import annotations

import importlib.util
import re

import msgspec
import pytest

from recorded import Writer, frame
from rollout_log.replay.checking import differences
from rollout_log.trainer import session
from rollout_log.view import view


def story(result) -> list[str]:
    """Lines without times."""
    assert result.code == 0, result.err
    return [re.sub(r"^ +\+[\d.]+ (ms|s)", "", line).strip() for line in result.lines]


def test_the_story_of_a_resumed_sample(run_log, call):
    lines = story(call("replay", run_log, "math-2"))
    assert lines[0].startswith("math-2: completed, began 20")
    assert lines[1:] == [
        "begins with a prompt of 3 tokens, in step 1",
        "request 0, first: asks POST /inference/v1/generate, from token 0; weights 7; step 1",
        "HTTP 200, text/event-stream",
        "2 tokens  21 22",
        "finish reason: abort",
        "[DONE]",
        "cut after token 2 by the engine, which was told to abort",
        "kept: all 2 tokens",
        "request 1, resume: asks POST /inference/v1/generate, from token 2; step 2",
        "HTTP 200, text/event-stream",
        "2 tokens  23 24",
        "finish reason: stop",
        "[DONE]",
        "the response is whole",
        "the sample is completed, with 4 tokens",
    ]


@pytest.mark.parametrize(
    ("args", "told"),
    [
        ([], ["math-1", "math-2", "math-3", "chat-1", "chat-2", "held-out"]),
        (["--step", 1], ["math-1", "math-2", "math-3", "chat-1"]),
        (["--status", "failed"], ["chat-1"]),
        (["--step", 2, "--status", "completed"], ["math-2", "held-out"]),
        (["chat-2", "math-1"], ["chat-2", "math-1"]),
        (["chat-2", "math-1", "--status", "completed"], ["math-1"]),
    ],
)
def test_samples_are_chosen(run_log, call, args, told):
    lines = call("replay", run_log, *args).lines
    assert [line.partition(":")[0] for line in lines if line[:1] not in {"", " "}] == told


def test_as_json_a_line_a_happening(run_log, call):
    lines = call("replay", run_log, "math-3", "--json").json_lines
    cut = next(line for line in lines if line["what"].startswith("cut"))
    assert cut["sample"] == "math-3"
    assert cut["what"] == "cut after token 1 by the connection, which broke: peer went away"
    assert (cut["request"], cut["token_ids"]) == (0, [])
    assert {"event", "clock_ns", "time"} < cut.keys()


def test_at_a_multiple_of_the_recorded_pace(tmp_path, call, monkeypatch):
    waits: list[float] = []
    monkeypatch.setattr("rollout_log.cli.replay.time.sleep", waits.append)
    with Writer(tmp_path / "log") as writer:
        writer.request("k", [frame(1), frame(2), frame(3, finish="stop")])
    lines = call("replay", tmp_path / "log", "k", "--speed", 0.001).lines
    assert sum("1 token" in line for line in lines) == 3
    assert waits
    assert all(0 < wait <= 10 for wait in waits)


def test_model_output_cannot_move_the_cursor(tmp_path, call):
    hostile = b'data: {"choices":[{"index":0,"token_ids":[1],"finish_reason":"\\u001b[2J"}]}\n\n'
    with Writer(tmp_path / "log") as writer:
        writer.request("\x1b[31mk", [hostile])
    out = call("replay", tmp_path / "log").out
    assert "\x1b" not in out
    assert r"finish reason: \x1b[2J" in out


def test_the_sample_as_it_was_after_an_event(run_log, call):
    result = call("replay", run_log, "math-2", "--at-event", 3)
    assert result.lines[0] == "as of event 3, Delta, of 15 events"
    assert "│ 21 22" in result.lines
    assert call("replay", run_log, "math-2", "--at-event", 3, "--json").json["token_ids"] == [21, 22]
    assert call("replay", run_log, "math-2", "--at-event", 14, "--json").json["token_ids"] == [21, 22, 23, 24]


def test_an_event_that_there_is_not(run_log, call):
    beyond = call("replay", run_log, "math-2", "--at-event", 15)
    assert (beyond.code, beyond.out) == (2, "")
    assert beyond.err == "rollout-log: there is no event 15 of sample 'math-2': its last event is 14\n"
    before = call("replay", run_log, "math-2", "--at-event", -1)
    assert before.code == 2
    assert before.err.startswith("rollout-log: --at-event: '-1' is not a whole number of 0 or more; ")


def test_the_sample_as_it_was_at_a_time(run_log, call):
    before = call("replay", run_log, "math-2", "--at-time", 0, "--json").json
    assert (before["status"], before["events"]) == ("pending", 1)
    later = call("replay", run_log, "math-2", "--at-time", 3600, "--json").json
    assert (later["status"], later["events"]) == ("completed", 15)
    early = call("replay", run_log, "math-2", "--at-time", -0.4)
    assert (early.code, early.out) == (0, "")
    assert early.err == "rollout-log: math-2 had not begun then: it began 400 ms later\n"
    refused = call("replay", run_log, "math-2", "--at-time", "yesterday")
    assert refused.code == 2
    told = " ".join(refused.err.replace("│", " ").split())
    for form in ("2026-05-01T22:30", "22:30:05", "90m", "2.5 for seconds after it began"):
        assert form in told


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (
            ["--at-time", 0.5, "--at-event", 2],
            "--at-event and --at-time do not go together: give one of them",
        ),
        (["--speed", 2, "--check"], "--speed and --check do not go together: give one of them"),
        (["--check", "--tokenizer", "x"], "--check has no use for --tokenizer"),
        (["--json", "--tokenizer", "x"], "--json has no use for --tokenizer"),
    ],
)
def test_no_option_is_dropped(run_log, call, args, said):
    done = call("replay", run_log, "math-2", *args)
    assert (done.code, done.out) == (2, "")
    assert done.err == f"rollout-log: {said}; rollout-log replay --help says more\n"


def test_check_finds_everything_as_recorded(run_log, call, tmp_path):
    result = call("replay", run_log, "--check")
    assert (result.code, result.out) == (0, "6 samples replayed, all as recorded\n")
    call("export", run_log, "--to", "fixture", "-o", tmp_path / "all.jsonl.gz")
    assert call("replay", tmp_path / "all.jsonl.gz", "--check").out == result.out


def test_check_names_sample_and_field(run_log, call, monkeypatch):
    async def check(reader, entry):
        recorded = view(reader.rollout(entry.ref))
        return list(differences(entry.name, recorded, msgspec.structs.replace(recorded, status="failed")))

    monkeypatch.setattr("rollout_log.cli.replay.check_sample", check)
    result = call("replay", run_log, "math-1", "--check")
    assert result.code == 1
    assert result.lines == [
        'math-1: status is "failed", recorded "completed"',
        "1 sample replayed, 1 differs",
    ]
    assert call("replay", run_log, "math-1", "--check", "--json").json == {
        "sample": "math-1",
        "run": "today",
        "differences": [
            {"sample": "math-1", "field": "status", "recorded": "completed", "replayed": "failed"}
        ],
        "passed_over": None,
    }


def test_check_prints_an_object_for_each_sample(run_log, call):
    result = call("replay", run_log, "math-1", "math-2", "--check", "--json")
    assert result.code == 0
    assert [(line["sample"], line["differences"]) for line in result.json_lines] == [
        ("math-1", []),
        ("math-2", []),
    ]


def test_what_the_client_never_sends_is_passed_over(tmp_path, call):
    with Writer(tmp_path / "log") as writer:
        writer.samples.request("k", path="/inference/v1/generate", body=b"{nonsense").end("reset")
    result = call("replay", tmp_path / "log", "--check")
    assert (result.code, result.out) == (0, "0 samples replayed, all as recorded; 1 passed over\n")
    assert "passed over: 'k' request 0: its body is no JSON object" in result.err
    (line,) = call("replay", tmp_path / "log", "--check", "--json").json_lines
    assert line["passed_over"].startswith("'k' request 0: its body is no JSON object")


FUNCTION = """
async def generate(args, sample, sampling_params):
    sample.status = sample.Status.COMPLETED
    return sample
"""


@pytest.mark.skipif(importlib.util.find_spec("vime") is not None, reason="vime is installed")
def test_through_a_plug_in_without_its_trainer_is_one_line(run_log, call, caplog):
    result = call("replay", run_log, "--through", "rollout_log.vime:generate")
    said = "rollout-log: vime.rollout.vllm_rollout cannot be imported: is vime installed?\n"
    assert (result.code, result.out, result.err) == (2, "", said)
    assert caplog.text == ""
    assert session._session is None, "nothing was opened for it"


def test_what_a_function_of_ones_own_raises_is_said(run_log, call, tmp_path, monkeypatch):
    (tmp_path / "raising.py").write_text(
        "async def generate(args, sample, params):\n    raise ValueError('no')\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    result = call("replay", run_log, "math-1", "--through", "raising:generate")
    assert result.code == 1
    assert result.lines[0] == "math-1: the function raised ValueError: no"


def test_through_a_function_of_ones_own(run_log, call, tmp_path, monkeypatch):
    (tmp_path / "my_rollout.py").write_text(FUNCTION)
    monkeypatch.chdir(tmp_path)
    result = call("replay", run_log, "math-1", "--through", "my_rollout:generate")
    assert result.code == 1
    assert result.lines == ["math-1: tokens[3] is absent, recorded 11", "1 sample replayed, 1 differs"]
    found = call("replay", run_log, "math-1", "--through", "my_rollout:generate", "--json").json_lines
    assert [each["recorded"] for each in found[0]["differences"]] == [11]
    assert call("replay", run_log, "math-1", "--through", "my_rollout:missing").code == 2


@pytest.mark.parametrize(
    "args", [["--status", "lost"], ["--speed", "0"], ["--check", "--at-event", "1"], ["nobody"]]
)
def test_what_cannot_be_asked_for(run_log, call, args):
    assert call("replay", run_log, *args).code == 2
