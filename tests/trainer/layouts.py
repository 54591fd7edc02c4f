"""Where the ages of the trainers keep things, and what they do differently."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["LAYOUTS", "NEW_VIME", "OLD_VIME", "SLIME", "Layout"]


@dataclass(frozen=True)
class Layout:
    """Where one age of one trainer keeps things, and which habits it has."""

    name: str
    root: str
    rollout: str
    trace: str
    data: str
    cancels: bool
    """Cancels the tasks of functions whose `abort_mode` is "request"."""
    context_step: bool
    """Sample hooks know the step by context variable as well."""
    evaluation_sessions: bool
    """Gives evaluation samples a session."""
    keeps_only_started: bool
    """Gives back only groups with an aborted sample that has tokens."""
    sglang: bool = False


NEW_VIME = Layout(
    "new vime", "vime", "vime.rollout.vllm_rollout", "vime.observability.trace_utils",
    "vime.data.data_source",
    cancels=True, context_step=True, evaluation_sessions=True, keeps_only_started=True,
)  # fmt: skip
OLD_VIME = Layout(
    "old vime", "vime", "vime.rollout.vllm_rollout", "vime.utils.trace_utils", "vime.rollout.data_source",
    cancels=False, context_step=False, evaluation_sessions=False, keeps_only_started=False,
)  # fmt: skip
SLIME = Layout(
    "slime", "slime", "slime.rollout.sglang_rollout", "slime.observability.trace_utils",
    "slime.rollout.data_source",
    cancels=False, context_step=False, evaluation_sessions=False, keeps_only_started=False, sglang=True,
)  # fmt: skip
LAYOUTS = (NEW_VIME, OLD_VIME, SLIME)
