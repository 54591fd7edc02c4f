"""A flight recorder for RL rollouts: record token streams, fold them into samples, play them back."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rollout_log.fold import Rollout
    from rollout_log.log import Log, LogReader
    from rollout_log.record import Call, Recorder, RecordingTransport
    from rollout_log.replay import ReplayTransport

__version__ = "0.1.0"
__all__ = ["Call", "Log", "LogReader", "Recorder", "RecordingTransport", "ReplayTransport", "Rollout"]

# The function `fold` is not among them: `rollout_log.fold` is the module it lives in.
_modules = {"Log": "log", "LogReader": "log", "Recorder": "record", "RecordingTransport": "record"}
_modules |= {"Call": "record", "ReplayTransport": "replay", "Rollout": "fold"}


def __getattr__(name: str) -> object:
    """Load a public name when it is first used: importing the package alone costs next to nothing."""
    if name not in _modules:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_modules[name]}"), name)


def __dir__() -> list[str]:
    """Show the public names also before they are loaded."""
    return sorted({*globals(), *__all__})
