"""Fixtures that prepare a directory for the commands of a document: `docs_NAME` for `setup NAME`."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def demo_log(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The log that `make demo` leaves."""
    folder = tmp_path_factory.mktemp("demo")
    subprocess.run(
        [sys.executable, root / "examples" / "demo.py"], cwd=folder, check=True, capture_output=True
    )
    return folder / "demo-log"


@pytest.fixture
def docs_demo_log(demo_log: Path, tmp_path: Path) -> None:
    """`demo-log` in the directory."""
    shutil.copytree(demo_log, tmp_path / "demo-log")


@pytest.fixture
def docs_examples(root: Path, tmp_path: Path) -> None:
    """The example project in `examples`, as in a checkout."""
    ignore = shutil.ignore_patterns(".*", "__*")
    shutil.copytree(root / "examples" / "gpu_free_ci", tmp_path / "examples" / "gpu_free_ci", ignore=ignore)


@pytest.fixture
def docs_fixtures(root: Path, tmp_path: Path) -> None:
    """The shipped `fixtures` in the directory."""
    (tmp_path / "fixtures").symlink_to(root / "fixtures")
