"""Processes of this package's own, for what may die: LMDB does, of some kinds of damage."""

from __future__ import annotations

import json
import sys
from pathlib import Path

__all__ = ["command_of"]

_ROOT = Path(__file__).absolute().parents[1]


def command_of(function: str, *arguments: str) -> list[str]:
    """Return the command of a process that calls `module:function` with these arguments.

    It has the modules of this process, wherever they came from, and none from the working directory.
    """
    module, _, name = function.partition(":")
    code = (
        "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
        f"from {module} import {name}; {name}(*sys.argv[2:])"
    )
    paths = [str(Path(entry).absolute()) for entry in sys.path if entry]
    return [sys.executable, "-I", "-c", code, json.dumps([*paths, str(_ROOT)]), *arguments]
