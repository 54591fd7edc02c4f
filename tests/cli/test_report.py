"""`report`: the page is written, and what it lacks is said."""

from __future__ import annotations

import pytest

NO_STEP = "no sample took part in step {}; there are steps 1 to 2"


def test_it_writes_one_page(run_log, tmp_path, call):
    page = tmp_path / "report.html"
    done = call("report", run_log, "--step", 1, "-o", page)
    assert (done.code, done.out) == (0, "")
    assert "with 4 samples" in done.err
    text = page.read_text()
    assert text.startswith("<!doctype html>")
    assert "<title>Step 1 · rollout-log</title>" in text


def test_samples_without_tokens_are_said_loudly(run_log, tmp_path, call, monkeypatch):
    monkeypatch.setattr("rollout_log.cli.report._MB", 0)
    done = call("report", run_log, "-o", tmp_path / "report.html", "--max-mb", 1)
    assert done.code == 0
    assert "6 of 6 samples are drawn WITHOUT THEIR TOKENS" in done.err
    assert "--max-mb" in done.err


@pytest.mark.parametrize(
    ("args", "why"),
    [
        (["report", "LOG", "--step", -1, "-o", "OUT"], NO_STEP.format(-1)),
        (["export", "LOG", "--to", "fixture", "--step", 9, "-o", "OUT"], NO_STEP.format(9)),
        (
            ["export", "LOG", "--to", "jsonl", "--status", "aborted", "--step", 1, "-o", "OUT"],
            "no sample of step 1 matches --status aborted; without it there are some",
        ),
        (
            ["export", "LOG", "math-1", "--to", "jsonl", "--status", "failed", "--step", 1, "-o", "OUT"],
            "no sample that was named matches --step 1 --status failed",
        ),
        (["import", "LOG", "OUT", "--step", 9], NO_STEP.format(9)),
        (["replay", "LOG", "--check", "--step", 9], NO_STEP.format(9)),
    ],
)
def test_where_there_is_no_such_sample_nothing_is_done(run_log, tmp_path, call, args, why):
    out = tmp_path / "out"
    if args[0] != "import":
        out.write_text("before")
    done = call(*({"LOG": run_log, "OUT": out}.get(arg, arg) for arg in args))
    assert (done.code, done.out, done.err) == (2, "", f"rollout-log: {why}\n")
    assert out.read_text() == "before" if args[0] != "import" else not out.exists()


@pytest.mark.parametrize("verb", [["ls"], ["replay"], ["export", "--to", "jsonl", "-o", "-"]])
def test_a_status_that_there_is_not(verb, run_log, call):
    done = call(*verb, run_log, "--status", "done")
    assert done.code == 2
    assert "'done' is no status: there are pending, completed, truncated, aborted, failed" in done.err


@pytest.mark.parametrize("verb", [["report"], ["export", "--to", "jsonl"]])
def test_a_directory_that_is_not_there(verb, run_log, call, tmp_path):
    result = call(*verb, run_log, "-o", tmp_path / "gone" / "x")
    assert result.code == 2
    assert f"there is no directory {tmp_path / 'gone'}: make it, or name another file" in result.err
    assert ".part" not in result.err
    assert "is a directory: name a file in it" in call(*verb, run_log, "-o", tmp_path).err
