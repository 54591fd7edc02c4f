"""Where samples are read from: a log, a directory of logs, or a fixture, told apart by their content."""

from __future__ import annotations

import os
from pathlib import Path

from rollout_log.errors import NotALog
from rollout_log.log.directory import where_a_log_is
from rollout_log.log.reader import LogReader

__all__ = ["open_source"]


def open_source(path: str | os.PathLike[str]) -> LogReader:
    """Open whatever samples are at a path.

    Raises `LogNotFound`, `NotALog`, `LogTooNew` or `LogDamaged`.
    """
    path = Path(path)
    if not path.is_file():
        return LogReader.open(path)
    from rollout_log.fixture import FixtureReader
    from rollout_log.fixture.files import is_fixture

    if not is_fixture(path):
        raise NotALog(f"{path} is a file, and no fixture; {where_a_log_is(path)}")
    return FixtureReader.open(path)
