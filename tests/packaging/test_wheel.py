"""What an installation gets: the package, its command, and nothing beside them."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from rollout_log import __version__
from rollout_log.cli import VERBS


def run(*argv: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run a program outside the project, without what the test run has put into the environment."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    return subprocess.run(
        [*map(str, argv)], cwd=cwd, env=environment, capture_output=True, text=True, check=False
    )


def build(target: str, source: Path, into: Path) -> Path:
    done = run(sys.executable, "-m", "hatchling", "build", "-t", target, "-d", into, cwd=source)
    assert done.returncode == 0, done.stderr
    (built,) = into.iterdir()
    return built


def contents(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


@pytest.fixture(scope="module")
def wheel(root, tmp_path_factory) -> Path:
    return build("wheel", root, tmp_path_factory.mktemp("wheel"))


def test_the_wheel_holds_the_package_and_nothing_else(wheel, root):
    files = contents(wheel)
    assert {name.split("/")[0] for name in files} == {"rollout_log", f"rollout_log-{__version__}.dist-info"}
    assert "rollout_log/py.typed" in files
    # Real files, although a checkout has a symlink here.
    verbs = {f"rollout_log/cli/{path.name}": path.read_bytes() for path in (root / "cli").glob("*.py")}
    assert {name: files[name] for name in files if name.startswith("rollout_log/cli/")} == verbs
    metadata = files[f"rollout_log-{__version__}.dist-info/METADATA"].decode()
    assert "Requires-Python: >=3.10" in metadata
    assert "License-Expression: Apache-2.0" in metadata


def test_the_source_distribution_builds_the_same_wheel(wheel, root, tmp_path):
    with tarfile.open(build("sdist", root, tmp_path / "sdist")) as archive:
        archive.extractall(tmp_path / "unpacked", filter="data")
    (source,) = (tmp_path / "unpacked").iterdir()
    assert contents(build("wheel", source, tmp_path / "wheel")) == contents(wheel)


def test_the_wheel_works_in_an_empty_environment(wheel, tmp_path):
    environment = tmp_path / "environment"
    python, command = environment / "bin" / "python", environment / "bin" / "rollout-log"
    run(sys.executable, "-m", "venv", "--without-pip", environment, cwd=tmp_path).check_returncode()
    done = run(sys.executable, "-m", "pip", "--python", python, "install", "-q", wheel, cwd=tmp_path)
    assert done.returncode == 0, done.stderr

    assert run(command, "version", cwd=tmp_path).stdout == f"rollout-log {__version__}\n"
    assert run(command, "--help", cwd=tmp_path).returncode == 0
    for verb in VERBS:  # each imports what it needs, so no dependency is missing
        done = run(command, verb, "--help", cwd=tmp_path)
        assert (done.returncode, VERBS[verb] in done.stdout) == (0, True), done.stderr

    for name in ("cli", "tests", "fixtures"):
        done = run(python, "-c", f"import {name}", cwd=tmp_path)
        assert f"No module named '{name}'" in done.stderr
