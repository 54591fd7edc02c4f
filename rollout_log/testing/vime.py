"""Points vime at a stand-in: `args` and the router, the HTTP client that all its code shares, and nothing
left over from another test."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import httpx

from rollout_log.testing.stand_in import StandIn

__all__ = ["Vime", "pointed_vime"]


class Vime(SimpleNamespace):
    """What a test of a rollout function wants of vime."""

    args: SimpleNamespace
    """A run's arguments: the router's address and defaults; set what the function reads besides."""
    client: httpx.AsyncClient
    """The shared client, `vime.utils.http_utils._http_client`."""
    engine: StandIn


@contextlib.contextmanager
def pointed_vime(engine: StandIn) -> Iterator[Vime]:
    """Point vime at a stand-in, and put everything back afterwards."""
    http_utils: Any = import_module("vime.utils.http_utils")
    before = getattr(http_utils, "_http_client", None)
    _forget_state()
    args = SimpleNamespace(
        hf_checkpoint="recorded",
        vllm_router_ip=engine.host,
        vllm_router_port=engine.port,
        router_policy=None,
        partial_rollout=False,
        mask_offpolicy_in_partial_rollout=False,
        group_rm=False,
        n_samples_per_prompt=1,
        rollout_seed=0,
        vllm_speculative_config=None,
        vllm_enable_deterministic_inference=False,
        use_rollout_routing_replay=False,
        use_score_centering=False,
    )
    client = engine.client
    http_utils._http_client = client
    try:
        yield Vime(args=args, client=client, engine=engine)
    finally:
        http_utils._http_client = before
        _forget_state()


def _forget_state() -> None:
    """Make vime build its `GenerateState` anew: it keeps the first run's arguments for ever."""
    instances: dict[Any, Any] = import_module("vime.utils.misc").SingletonMeta._instances
    for kind in [kind for kind in instances if kind.__name__ == "GenerateState"]:
        del instances[kind]
