"""Print the version of rollout-log.

Example:

    rollout-log version
"""

from __future__ import annotations

from rollout_log import __version__


def run() -> None:
    print(f"rollout-log {__version__}")
