"""A clock of our own, so that nothing waits."""

from __future__ import annotations

from types import ModuleType

import pytest

__all__ = ["Clock"]


class Clock:
    """Stands for the module `time` in others."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *modules: ModuleType) -> None:
        self.now = 100.0
        for module in modules:
            monkeypatch.setattr(module, "time", self)

    def monotonic(self) -> float:
        return self.now
