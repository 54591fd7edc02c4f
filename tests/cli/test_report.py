"""`report`: the page is written, and what it lacks is said."""

from __future__ import annotations

import pytest


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


@pytest.mark.parametrize(("step", "what"), [(9, "no samples of step 9"), (-1, "no samples of step -1")])
def test_a_step_that_is_not_there_is_refused(run_log, tmp_path, call, step, what):
    done = call("report", run_log, "--step", step, "-o", tmp_path / "report.html")
    assert done.code == 2
    assert what in done.err
    assert not (tmp_path / "report.html").exists()


@pytest.mark.parametrize("verb", [["report"], ["export", "--to", "jsonl"]])
def test_a_directory_that_is_not_there(verb, run_log, call, tmp_path):
    result = call(*verb, run_log, "-o", tmp_path / "gone" / "x")
    assert result.code == 2
    assert f"there is no directory {tmp_path / 'gone'}: make it, or name another file" in result.err
    assert ".part" not in result.err
    assert "is a directory: name a file in it" in call(*verb, run_log, "-o", tmp_path).err
