"""What campaigns share with the tests of single parts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from rollout_log import cli
from rollout_log.trainer.session import close_session
from trainer.conftest import rig

__all__ = ["rig"]


class Result(NamedTuple):
    """How a call of the command ended."""

    code: int
    out: str
    err: str


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]) -> Callable[..., Result]:
    """Calls `rollout-log` with arguments."""

    def run(*args: object) -> Result:
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            cli.main([str(arg) for arg in args])
        return Result(int(ended.value.code or 0), *capsys.readouterr())

    return run


@pytest.fixture
def plugin_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where a plug-in records in this test."""
    path = tmp_path / "log"
    monkeypatch.setenv("ROLLOUT_LOG_DIR", str(path))
    monkeypatch.setenv("ROLLOUT_LOG_WINDOW_MS", "20")
    yield path
    close_session()
