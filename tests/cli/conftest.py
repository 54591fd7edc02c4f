"""The command line called in this process, and logs for it to read."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from typing import Any

import pytest

from recorded import Writer, frame
from rollout_log import cli
from rollout_log.events import Closed

DONE = b"data: [DONE]\n\n"


@dataclass
class Result:
    """How a call ended."""

    code: int
    out: str
    err: str

    @property
    def lines(self) -> list[str]:
        return self.out.splitlines()

    @property
    def json(self) -> Any:
        return json.loads(self.out)

    @property
    def json_lines(self) -> list[Any]:
        return [json.loads(line) for line in self.lines]


@pytest.fixture
def call(capsys):
    """Calls `rollout-log` with arguments."""

    def run(*args: object) -> Result:
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            cli.main([str(arg) for arg in args])
        return Result(int(ended.value.code or 0), *capsys.readouterr())

    return run


@pytest.fixture
def terminal(monkeypatch):
    """Makes this process's output a terminal of so many columns, to call before `call`."""

    def set_up(columns: int) -> None:
        monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
        monkeypatch.setenv("COLUMNS", str(columns))
        monkeypatch.setenv("TERM", "xterm")
        monkeypatch.delenv("NO_COLOR", raising=False)

    return set_up


@pytest.fixture(scope="session")
def run_log(tmp_path_factory):
    """Two steps: a finished sample, one resumed in the second step, a retried one, a failed one, one open."""
    path = tmp_path_factory.mktemp("cli") / "today"
    with Writer(path, run="today") as writer:
        stop = frame(13, finish="stop", version="7")
        done = writer.request("math-1", [frame(11, 12, version="7"), stop, DONE], step=1, opened={"index": 4})
        done.sample.rollout.apply(closed := Closed(status="completed", reward=1.5, step=1))
        done.sample.write([closed], summarized=True)
        writer.request(
            "math-2",
            [frame(21, 22, version="7"), frame(finish="abort", version="7"), DONE],
            step=1,
            weight_version="7",
        )
        writer.request("math-3", [frame(31, version="7")], step=1, how="reset", detail="peer went away")
        writer.request("math-3", [frame(34, 35, finish="length", version="7"), DONE], step=1, base=0)
        writer.request("chat-1", step=1, status=503, body=b'{"error":{"message":"overloaded"}}')
        writer.request(
            "math-2", [frame(23, 24, version="8"), frame(finish="stop", version="8"), DONE], step=2
        )
        writer.request("chat-2", [frame(41, logprob=None)], step=2, how=None)
        writer.request("held-out", [frame(51, finish="stop")], step=2, opened={"evaluation": True})
        writer.log.flush_sync()
    return path
