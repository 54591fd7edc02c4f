"""A viewer that stays open while a log is written: the file does not grow by it, and it sees all there is."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from rollout_log.events import Delta, Opened
from rollout_log.log import Log, LogReader

VIEWER = """
import sys
from rollout_log.log import LogReader
with LogReader.open(sys.argv[1]) as reader:
    held = [reader.events(reader.find("key")), reader.samples(), reader.blocks(reader.find("key"))]
    for each in held:
        next(each)
    for line in sys.stdin:
        print(sum(1 for _ in reader.events(reader.find("key"))), sum(1 for _ in reader.samples()), flush=True)
    rest = [number for number, _ in held[0]]
    assert rest == list(range(1, len(rest) + 1)), "what was begun is a prefix"
"""


class Writing:
    """Commits one event after another, in a log of its own."""

    def __init__(self, path: Path) -> None:
        self.log = Log.open(path, window_ms=3_600_000)
        self.sample = self.log.create(Opened("key"))
        self.log.append(self.sample, 0, [Opened("key")])
        assert self.log.flush_sync()
        self.events = 1

    def commit(self, times: int) -> None:
        for _ in range(times):
            self.log.append(self.sample, self.events, [Delta(0, b"x" * 200)])
            assert self.log.flush_sync(self.sample)
            self.events += 1

    def size(self) -> int:
        return self.log._committer._segment.size()


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commit without gathering others first."""
    monkeypatch.setattr("rollout_log.log.queue.GATHER_S", 0.0)


@pytest.mark.parametrize("commits", [400, pytest.param(10_000, marks=pytest.mark.campaign)])
def test_a_viewer_that_is_held_open(commits, tmp_path):
    """In this process and in another one, each with readings that it has begun and not ended."""
    alone = Writing(tmp_path / "alone")
    alone.commit(commits)
    without = alone.size()
    alone.log.close()
    seen = Writing(tmp_path / "seen")
    with (
        LogReader.open(tmp_path / "seen") as here,
        subprocess.Popen(
            [sys.executable, "-c", VIEWER, tmp_path / "seen"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as viewer,
    ):
        assert viewer.stdin is not None
        assert viewer.stdout is not None
        held = here.events(here.find("key"))
        next(held)
        for _ in range(10):
            seen.commit(commits // 10)
            viewer.stdin.write("\n")
            viewer.stdin.flush()
            assert viewer.stdout.readline() == f"{seen.events} 1\n"
            assert sum(1 for _ in here.events(here.find("key"))) == seen.events
        rest = [number for number, _ in held]
        assert rest == list(range(1, len(rest) + 1)), "what was begun is a prefix"
    assert viewer.returncode == 0
    print(f"{commits} commits: {seen.size()} bytes beside viewers, {without} without")
    assert seen.size() <= without * 1.1 + (64 << 10)
    seen.log.close()


def test_one_state_that_is_held_costs_pages_until_it_is_let_go(tmp_path):
    """As `verify` does while it walks a segment that is being written."""
    writing = Writing(tmp_path / "log")
    with LogReader.open(tmp_path / "log") as reader:
        (segment,) = reader._of(next(reader._folders()))
        with segment.snapshot() as snapshot:
            writing.commit(100)
            assert sum(1 for _ in snapshot.rows("batches")) == 1
        held = writing.size()
        assert held < 100 * (40 << 10)
        writing.commit(100)
    assert writing.size() <= held + (64 << 10), "pages that were let go are used again"
    writing.log.close()
