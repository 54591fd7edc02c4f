"""Every benchmark runs, and has a row for every target; what it measures is not looked at."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TARGETS = {
    "hot_path": "1",
    "streaming": "1",
    "short_requests": "1",
    "plain_loop": "2",
    "writing": "4",
    "reading": "6",
    "replaying": "7",
    "growth": "8",
    "starting": "9",
}


@pytest.mark.parametrize("topic", TARGETS)
def test_runs_and_writes_a_table(topic: str, tmp_path: Path) -> None:
    output = tmp_path / "table.md"
    command = [sys.executable, "-m", "benchmarks", "--quick", "--output", str(output), topic]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    header, _, *rows = output.read_text().splitlines()
    assert header == "| target | what | baseline | measured | limit | met |"
    assert TARGETS[topic] in {row.split(" | ")[0].removeprefix("| ") for row in rows}


def test_all_topics_are_run_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT)
    assert set(TARGETS) | {"long_sample"} == set(import_module("benchmarks.__main__").TOPICS)
