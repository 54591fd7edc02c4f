"""Replay: recorded streams go back into the code that consumed them.

`serve_replay` stands in for the engine; `replay.transport` does it without a socket, inside httpx.
"""

from rollout_log.replay.errors import ReplayMiss
from rollout_log.replay.matching import Report
from rollout_log.replay.server import ReplayServer, serve_replay
from rollout_log.replay.transport import ReplayTransport

__all__ = ["ReplayMiss", "ReplayServer", "ReplayTransport", "Report", "serve_replay"]
