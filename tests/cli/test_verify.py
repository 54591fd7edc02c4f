"""`verify`: exit 0 clean, 1 errors of samples, 2 damage; never a traceback."""

from __future__ import annotations

import sys

import msgspec
import pytest

from recorded import Writer, frame
from rollout_log.cli._folding import Folded, Unreadable, fold_all
from rollout_log.cli.verify import Verdict
from rollout_log.log.batch import MAGIC


@pytest.fixture
def wrong_log(tmp_path):
    """One sample whose engine counts other tokens than it sent, beside a sound one."""
    with Writer(tmp_path / "wrong") as writer:
        usage = b'data: {"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":9}}\n\n'
        writer.request("lost", [frame(1, 2, finish="stop"), usage])
        writer.request("sound", [frame(1, finish="stop")])
        writer.log.flush_sync()
    return tmp_path / "wrong"


def segments(log):
    return sorted(log.glob("*/segment-*.rlog"))


def test_a_clean_log(run_log, call):
    result = call("verify", run_log)
    assert result.code == 0
    assert result.lines[0].startswith("6 samples, ")
    assert result.lines[-1] == (
        "clean: the bytes are sound, and no sample has a problem of severity error; 1 failed, 1 pending"
    )
    verdict = msgspec.convert(call("verify", run_log, "--json").json, Verdict)
    assert (verdict.verdict, verdict.samples, verdict.folded, verdict.errors) == ("clean", 6, 6, 0)
    assert {(problem.name, problem.code) for problem in verdict.problems} == {("chat-2", "null_logprob")}
    assert verdict.damage == []
    assert verdict.statuses == {"completed": 3, "truncated": 1, "failed": 1, "pending": 1}


def test_errors_of_samples(wrong_log, call):
    result = call("verify", wrong_log)
    assert result.code == 1
    row = next(line for line in result.lines if line.startswith("usage_mismatch"))
    assert row.split()[1:5] == ["error", "1", "1", "lost"]
    json = call("verify", wrong_log, "--json")
    assert json.code == 1
    assert json.json["verdict"] == "problems"
    assert [(p["name"], p["code"]) for p in json.json["problems"]] == [("lost", "usage_mismatch")]


@pytest.mark.parametrize("cut", [0, 1, 5000, 12_289])
def test_a_file_that_was_cut(cut, wrong_log, call):
    (segment,) = segments(wrong_log)
    with segment.open("r+b") as file:
        file.truncate(cut)
    result = call("verify", wrong_log)
    if cut == 0:  # what a writer leaves that died before its first commit
        assert result.code == 0
    else:
        assert result.code == 2
        assert result.lines[-1].startswith("damaged: no sample can be read; ")
        assert "rollout_log.errors" not in result.out
        assert result.lines[-1].endswith("; `rollout-log recover LOG NEWLOG` saves what is whole")
        assert len(result.lines) < 12, "it is said in a few lines"
        assert str(segment) in result.out
    assert "Traceback" not in result.out + result.err


def test_every_page_overwritten_in_turn(wrong_log, call):
    (segment,) = segments(wrong_log)
    whole = segment.read_bytes()
    found = set()
    for page in range(0, len(whole), 4096):
        segment.write_bytes(whole[:page] + b"\xa5" * 4096 + whole[page + 4096 :])
        result = call("verify", wrong_log, "--json")
        assert "Traceback" not in result.err
        assert result.json["verdict"] == {0: "clean", 1: "problems", 2: "damaged"}[result.code]
        found.add(result.code)
    assert 2 in found


def test_a_child_that_is_killed_is_damage(run_log, monkeypatch):
    child = "import os, signal; os.kill(os.getpid(), signal.SIGBUS)"
    monkeypatch.setattr("rollout_log.cli._folding.command_of", lambda *_: [sys.executable, "-c", child])
    (found,) = fold_all(run_log, 6)
    assert isinstance(found, Unreadable)
    assert found.detail == "the process that read them was killed by SIGBUS before the first sample"


def test_a_child_that_hangs_is_ended(run_log, monkeypatch):
    child = 'import time; print(\'["a", "completed", [], null]\', flush=True); time.sleep(60)'
    monkeypatch.setattr("rollout_log.cli._folding.command_of", lambda *_: [sys.executable, "-c", child])
    first, second = fold_all(run_log, 6, seconds=0.5)
    assert first == Folded("a", "completed", [])
    assert second.detail == "the process that read them was killed by SIGKILL after sample 'a'"


def test_modules_in_the_working_directory_are_not_run(run_log, tmp_path, monkeypatch, call):
    (tmp_path / "json.py").write_text("raise SystemExit('this is not the json you want')")
    monkeypatch.chdir(tmp_path)
    assert call("verify", run_log).code == 0


def test_a_directory_of_runs_is_checked_as_one(tmp_path, call):
    for run in ("a", "b"):
        with Writer(tmp_path / run) as writer:
            writer.request(run, [frame(1, finish="stop")])
            writer.log.flush_sync()
    assert call("verify", tmp_path, "--json").json["folded"] == 2


def test_damage_is_counted_alike_in_all_that_is_said_of_it(tmp_path, call):
    with Writer(tmp_path / "log", seal=False) as writer:
        for number in range(8):
            writer.request(f"s{number}", [frame(number, finish="stop")])
            writer.log.flush_sync()
    (segment,) = segments(tmp_path / "log")
    data = segment.read_bytes()
    for at in range(len(data)):
        if data.startswith(MAGIC, at) and data[at + 16 : at + 24] == (4).to_bytes(8, "big"):
            data = data[: at + 60] + bytes([data[at + 60] ^ 1]) + data[at + 61 :]
    segment.write_bytes(data)
    result = call("verify", tmp_path / "log")
    verdict = msgspec.convert(call("verify", tmp_path / "log", "--json").json, Verdict)
    assert result.lines[0].startswith(f"{verdict.samples} samples found; checked: {verdict.blocks} blocks, ")
    assert result.lines[-1].startswith(
        f"damaged: {verdict.folded} of {verdict.samples} samples can be read; "
    )
    assert (verdict.folded, verdict.samples) == (7, 8)
    assert "rollout-log verify" not in result.out


def test_pages_of_another_kind_are_told_in_a_few_lines(tmp_path, call):
    with Writer(tmp_path / "log", seal=False) as writer:
        for number in range(20):
            writer.request(f"s{number}", [frame(number, finish="stop")])
            writer.log.flush_sync()
    (segment,) = segments(tmp_path / "log")
    data = segment.read_bytes()
    segment.write_bytes(data[:8192] + b"\xa5" * (len(data) - 8192))
    pages = [d for d in call("verify", tmp_path / "log", "--json").json["damage"] if d["what"] == "pages"]
    assert 0 < len(pages) <= 4


def test_a_reader_of_damage_names_the_file_once_and_says_what_to_do(tmp_path, call):
    with Writer(tmp_path / "log", seal=False) as writer:
        writer.request("k", [frame(1, finish="stop")])
    (segment,) = segments(tmp_path / "log")
    data = segment.read_bytes()
    for at in range(len(data)):
        if data.startswith(MAGIC, at):
            data = data[: at + 60] + bytes([data[at + 60] ^ 1]) + data[at + 61 :]
    segment.write_bytes(data)
    result = call("show", tmp_path / "log", "k")
    assert (result.code, result.err.count(str(segment)), result.err.count("rollout-log verify")) == (2, 1, 1)
