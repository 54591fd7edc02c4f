"""The plug-ins inside the trainers' own `generate_and_rm`, where a trainer is installed."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import importlib.util
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from trainer.engine_double import EngineDouble
from trainer.truth import EOS, Tokenizer, decode, expected_tokens, prompt_text

TRAINERS = {
    "vime": ("vime.rollout.vllm_rollout", "vllm"),
    "slime": ("slime.rollout.sglang_rollout", "sglang"),
}


class State(SimpleNamespace):
    """`GenerateState` without a model: what `generate_and_rm` and the plug-ins read."""

    @contextlib.contextmanager
    def dp_rank_context(self) -> Iterator[int]:
        yield 0


class Pacer:
    async def wait(self) -> None:
        """Never."""


@pytest.mark.parametrize("root", TRAINERS)
def test_a_sample_of_the_trainers_own_loop(root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, prefix = TRAINERS[root]
    if importlib.util.find_spec(root) is None:
        pytest.skip(f"{root} is not installed")
    try:
        rollout = importlib.import_module(module)
    except ImportError as error:
        pytest.skip(f"{root} cannot be imported: {error}")
    http_utils = importlib.import_module(f"{root}.utils.http_utils")
    kind: Any = importlib.import_module(f"{root}.utils.types").Sample
    state = State(
        tokenizer=Tokenizer(),
        processor=None,
        aborted=False,
        cancellable_tasks=set(),
        active_server_generations=0,
        generation_pacer=Pacer(),
        group_sampling_seeds=None,
        semaphore=contextlib.AsyncExitStack(),
    )
    monkeypatch.setattr(rollout, "GenerateState", lambda args, **_: state)
    prompt = prompt_text(1, tokens=9)
    with EngineDouble(versions="field", budget=64) as engine:
        args = SimpleNamespace(
            partial_rollout=False,
            mask_offpolicy_in_partial_rollout=False,
            group_rm=True,
            custom_generate_function_path=f"rollout_log.{root}.generate",
            rollout_sample_hook_path=None,
            hf_checkpoint="tiny",
            **{f"{prefix}_router_ip": engine.host, f"{prefix}_router_port": engine.port},
        )

        async def one() -> Any:
            async with httpx.AsyncClient(trust_env=False, timeout=None) as client:
                monkeypatch.setattr(http_utils, "_http_client", client)
                params = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "max_new_tokens": 64}
                return await rollout.generate_and_rm(args, kind(index=3, prompt=prompt), params)

        sample = asyncio.run(one())
    assert engine.violations == []
    ids = Tokenizer().encode(prompt)
    assert isinstance(sample, kind)
    assert sample.tokens == ids + expected_tokens(ids, 0, 9)
    assert (sample.tokens[-1], sample.status) == (EOS, kind.Status.COMPLETED)
    assert sample.response == decode(sample.tokens[len(ids) :])
    assert sample.weight_versions == ["0"]
    sample._validate_response_metadata_lengths()
