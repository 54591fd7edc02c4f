"""Functions by a longer path: `PREFIX.package.module.function` is `package.module.function`, decorated.

Trainers import what stands before the last dot and take the attribute behind it. So the modules below the
prefix are made as they are asked for, each a stand-in for the module it is named after.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

__all__ = ["offer"]


class _Finder(MetaPathFinder, Loader):
    def __init__(self, prefix: str, decorate: Callable[[Any], Any]) -> None:
        self.prefix = prefix + "."
        self._decorate = decorate

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not fullname.startswith(self.prefix):
            return None
        return ModuleSpec(fullname, self, is_package=True)

    def exec_module(self, module: ModuleType) -> None:
        original = importlib.import_module(module.__name__.removeprefix(self.prefix))

        def attribute(name: str) -> Any:
            value = getattr(original, name)
            return self._decorate(value) if inspect.isroutine(value) else value

        module.__dict__["__getattr__"] = attribute


def offer(prefix: str, decorate: Callable[[Any], Any]) -> None:
    """Make the paths below the module `prefix` importable; their functions come decorated."""
    known = [finder for finder in sys.meta_path if isinstance(finder, _Finder)]
    if all(finder.prefix != prefix + "." for finder in known):
        sys.meta_path.append(_Finder(prefix, decorate))
