from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from rollout_log.trainer.session import close_session
from trainer.conftest import rig

__all__ = ["rig"]


@pytest.fixture(autouse=True)
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where the plug-in records in this test."""
    path = tmp_path / "log"
    monkeypatch.setenv("ROLLOUT_LOG_DIR", str(path))
    monkeypatch.setenv("ROLLOUT_LOG_WINDOW_MS", "20")
    close_session()  # whoever left one
    yield path
    close_session()
