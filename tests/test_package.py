"""The package as a whole: its public names, and what importing it costs."""

from __future__ import annotations

import subprocess
import sys

import pytest

import rollout_log


@pytest.mark.parametrize("name", rollout_log.__all__)
def test_every_public_name_is_there(name):
    assert getattr(rollout_log, name).__name__ == name


def test_dir_shows_them_before_they_are_loaded():
    code = (
        "import rollout_log; print(*set(rollout_log.__all__) - set(dir(rollout_log)), 'lmdb' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; {code}"], capture_output=True, text=True, check=True
    )
    assert done.stdout == "False\n"


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'rollout_log' has no attribute 'nothing'"):
        _ = rollout_log.nothing


def imported_by(statement: str) -> set[str]:
    """The top-level modules in a fresh interpreter after a statement."""
    code = f"{statement}; import sys; print(*(name for name in sys.modules if '.' not in name))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_importing_the_package_imports_no_dependency():
    assert not imported_by("import rollout_log") & {
        "asyncio",
        "httpx",
        "lmdb",
        "msgspec",
        "typer",
        "zstandard",
    }


def test_nothing_imports_a_trainer_or_a_heavy_extra():
    everything = "; ".join(f"rollout_log.{name}" for name in rollout_log.__all__)
    heavy = {"pyarrow", "rich", "slime", "tokenizers", "torch", "transformers", "typer", "vime"}
    # httpx brings its own command line, with rich, wherever click happens to be installed.
    ours = imported_by(f"import rollout_log; {everything}") - imported_by("import httpx")
    assert not ours & heavy
