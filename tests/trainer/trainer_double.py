"""A rollout loop that treats a generate function the way vime and slime do, and checks everything it does.

    with EngineDouble(budget=64) as engine, TrainerDouble(engine.url, NEW_VIME, engine=engine, …) as trainer:
        samples = trainer.step(0)          # one rollout step; the rest is aborted and goes to the buffer
        engine.set_version("1")
        trainer.step(1)
        trainer.evaluate(1)
    trainer.problems                       # empty, or what was wrong in words

While it is entered, `import vime…` or `import slime…` finds stand-ins (`modules`) of the chosen layout.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import importlib
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

from trainer import modules
from trainer.checks import Watch, WatchedLoop, verify
from trainer.data_double import DataSource
from trainer.engine_double import EngineDouble
from trainer.layouts import LAYOUTS, NEW_VIME, OLD_VIME, SLIME, Layout
from trainer.rollout_double import FINISHED, Output, RolloutLoop, State, flat
from trainer.sample_double import Sample
from trainer.truth import ends_at, holds_at

__all__ = ["LAYOUTS", "NEW_VIME", "OLD_VIME", "SLIME", "Layout", "Stuck", "TrainerDouble"]


class Stuck(AssertionError):
    """A step did not come to its end."""


class TrainerDouble(RolloutLoop):
    def __init__(
        self,
        url: str,
        layout: Layout = NEW_VIME,
        *,
        generate: str | Callable[..., Awaitable[Any]],
        questions: Sequence[str],
        engine: EngineDouble | None = None,
        versions: Sequence[str] | None = None,
        groups: int = 2,
        samples: int = 2,
        over_sampling: int | None = None,
        max_tokens: int = 64,
        partial: bool = True,
        mask_offpolicy: bool = False,
        concurrency: int = 64,
        keep_group: Callable[[list[Any]], bool] = lambda group: True,
        read_only_source: bool = False,
        step_in_context: bool = False,
        exact_versions: bool = True,
        abort_when: Callable[[], bool] = lambda: True,
        settle: float = 5.0,
        timeout: float = 60.0,
        **settings: Any,
    ) -> None:
        """`groups` of `samples` make a step; `over_sampling` groups are asked for at a time.

        `abort_when` holds back a step's abort until it is true (`lambda: trainer.holding == 4`), so that
        cut points do not depend on the clock. `settle`: seconds in which the engine has to be idle after a
        step. `timeout`: seconds after which a step counts as stuck. `settings` become attributes of `args`.
        """
        self.layout, self.engine = layout, engine
        self.problems: list[str] = []
        self.delivered: list[Sample] = []
        self.aborted_groups: list[list[Any]] = []
        self.logged: list[dict[str, Any]] = []
        """What each step would log."""
        self.watch = Watch()
        self.concurrency = concurrency
        self.tokenizer = modules.Tokenizer()
        self.state: State | None = None
        self.keep_group = keep_group
        self.functions: dict[str, Any] = {}
        self.timeout, self.settle, self.abort_when = timeout, settle, abort_when
        self._versions = versions
        self._exact_versions = exact_versions
        self._step_in_context = step_in_context
        self._masked: dict[int, tuple[Sample, int]] = {}
        self._generated: list[Sample] = []
        self.sampling_params: dict[str, Any] = {
            "temperature": 1.0,
            "top_p": 1.0,
            "top_k": -1,
            "max_new_tokens": max_tokens,
            "stop": None,
            "stop_token_ids": None,
            "skip_special_tokens": True,
            "no_stop_trim": True,
            "spaces_between_special_tokens": False,
        }
        """One object for all concurrent calls."""
        if not isinstance(generate, str):
            self.functions["a_test.generate"] = generate
            generate = "a_test.generate"
        place = urlsplit(url)
        engine_name = "sglang" if layout.sglang else "vllm"
        self.args = SimpleNamespace(
            **{
                "ci_test": False,
                "hf_checkpoint": "tiny",
                f"{engine_name}_router_ip": place.hostname,
                f"{engine_name}_router_port": place.port,
                f"{engine_name}_server_concurrency": concurrency,
                "router_policy": None,
                "partial_rollout": partial,
                "mask_offpolicy_in_partial_rollout": mask_offpolicy,
                "vllm_speculative_config": None,
                "sglang_speculative_algorithm": None,
                "use_score_centering": False,
                "use_rollout_routing_replay": False,
                "vllm_model_encoder_endpoints": None,
                "num_layers": 2,
                "moe_router_topk": 2,
                "group_rm": False,
                "reward_key": None,
                "n_samples_per_prompt": samples,
                "rollout_batch_size": groups,
                "over_sampling_batch_size": over_sampling or groups,
                "rollout_max_response_len": max_tokens,
                "rollout_temperature": 1.0,
                "rollout_top_p": 1.0,
                "rollout_top_k": -1,
                "rollout_skip_special_tokens": True,
                "rollout_num_engines": 1,
                "use_distributed_post": False,
                "custom_generate_function_path": generate,
                "rollout_function_path": f"{layout.rollout}.generate_rollout",
                "data_source_path": f"{layout.data}.RolloutDataSourceWithBuffer",
                "custom_rollout_log_function_path": None,
                "custom_eval_rollout_log_function_path": None,
                "rollout_sample_hook_path": None,
                "load": None,
                "save": None,
                **settings,
            }
        )
        self.data_source = DataSource(self.args, questions, read_only=read_only_source)

    # Life

    def __enter__(self) -> TrainerDouble:  # noqa: PYI034 - `Self` came with Python 3.11
        self._stack = contextlib.ExitStack()
        self.modules = self._stack.enter_context(modules.install(self))
        self.loop = WatchedLoop()
        self.loop.on_tick = self.watch.look
        thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        thread.start()

        def end() -> None:
            self.run(self._close(), 60)
            self.loop.call_soon_threadsafe(self.loop.stop)
            thread.join(10)
            self.loop.close()

        self._stack.callback(end)
        self.http = self.modules[f"{self.layout.root}.utils.http_utils"]
        self.hooks = self.modules[f"{self.layout.root}.rollout.sample_hooks"]
        self.run(self._open(), 60)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    async def _open(self) -> None:
        self.http.init_http_client(self.args)

    async def _close(self) -> None:
        await self.http._http_client.aclose()
        self.http._http_client = None
        left = asyncio.all_tasks() - {asyncio.current_task()}
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
        await asyncio.get_running_loop().shutdown_asyncgens()

    def run(self, coroutine: Coroutine[Any, Any, Any], timeout: float | None = None) -> Any:
        """What the trainer's `run` does: onto the background loop, and wait."""
        future = asyncio.run_coroutine_threadsafe(coroutine, self.loop)
        try:
            return future.result(timeout or self.timeout)
        except concurrent.futures.TimeoutError:
            if future.done():
                raise
            future.cancel()
            raise Stuck(f"not done after {self.timeout} s: {self._pending()}") from None

    def _pending(self) -> list[str]:
        samples = [
            f"{sample.index} at {sample.response_length}" for sample, _ in self.watch._samples.values()
        ]
        engine = [] if self.engine is None else [f"request {each.number}" for each in self.engine.running]
        return [*samples, *engine]

    @property
    def holding(self) -> int:
        """Samples being generated that have every token up to where their prompt says to hold."""
        return sum(each.response_length == holds_at(self._prompt(each)) for each in self.watch.samples)

    @property
    def ended(self) -> int:
        """Samples being generated that have their last token."""
        return sum(each.response_length == ends_at(self._prompt(each)) for each in self.watch.samples)

    def _prompt(self, sample: Sample) -> list[int]:
        return self.tokenizer.encode(sample.prompt)

    def load_function(self, path: str) -> Any:
        if path in self.functions:
            return self.functions[path]
        module, _, name = path.rpartition(".")
        return getattr(importlib.import_module(module), name)

    # What the manager process does

    def step(self, rollout_id: int) -> list[Sample]:
        """Generate one step, log it, check every sample of it. Raises what the rollout raises."""
        self.hooks.set_current_rollout_id(rollout_id)
        function = self.load_function(self.args.rollout_function_path)
        started = time.monotonic()
        with self.hooks.rollout_context(rollout_id) if self._step_in_context else contextlib.nullcontext():
            output = function(self.args, rollout_id, self.data_source, evaluation=False)
        groups = output.samples if isinstance(output, Output) else output
        samples = list(flat(groups))
        metrics = output.metrics if isinstance(output, Output) else None
        self._check([*samples, *flat(self.data_source.buffer)])  # and those that go nowhere
        self.delivered += samples
        self._log(rollout_id, samples, metrics, time.monotonic() - started)
        return samples

    def _log(self, rollout_id: int, samples: list[Sample], metrics: Any, seconds: float) -> None:
        path = self.args.custom_rollout_log_function_path
        if path is not None and self.load_function(path)(rollout_id, self.args, samples, metrics, seconds):
            return
        self.logged.append({**(metrics or {}), "rollout/step": rollout_id})

    def evaluate(self, rollout_id: int, datasets: dict[str, list[str]], repeats: int = 1) -> dict[str, Any]:
        """Evaluate on prompts by data set name, all at once, indices from 0 in each."""
        self.hooks.set_current_rollout_id(rollout_id)
        self._datasets, self._repeats = datasets, repeats
        function = self.load_function(self.args.rollout_function_path)
        data: dict[str, Any] = function(self.args, rollout_id, self.data_source, evaluation=True).data
        self._check([sample for each in data.values() for sample in each["samples"]])
        path = self.args.custom_eval_rollout_log_function_path
        metrics: dict[str, Any] = {}
        if path is None or not self.load_function(path)(rollout_id, self.args, data, metrics):
            self.logged.append({**metrics, "eval/step": rollout_id})
        return data

    def _check(self, samples: Iterable[Sample]) -> None:
        self.problems += self.watch.problems
        self.watch.problems.clear()
        generated, self._generated = self._generated, []
        for sample in {id(each): each for each in [*samples, *generated]}.values():
            self.problems += verify(
                sample,
                budget=self.args.rollout_max_response_len,
                versions=self._versions or (self.engine.all_versions if self.engine else ["0"]),
                engine=self.engine,
                masked=self._masked.get(id(sample), (sample, 0))[1],
                exact_versions=self._exact_versions,
            )
            if sample.status in FINISHED and sample.reward is None:
                self.problems.append(f"sample {sample.index} finished without a reward")
        if self.engine is not None:
            limit = time.monotonic() + self.settle
            while self.engine.running and time.monotonic() < limit:
                time.sleep(0.005)
            self.problems += [f"request {each.number} still runs" for each in self.engine.running]
            self.problems += self.engine.violations
            self.engine.violations.clear()
