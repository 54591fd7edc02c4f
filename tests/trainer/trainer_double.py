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
import copy
import importlib
import threading
import time
import uuid
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

from trainer import modules
from trainer.checks import Watch, WatchedLoop, verify
from trainer.data_double import DataSource
from trainer.engine_double import EngineDouble
from trainer.sample_double import Sample, Status

__all__ = ["LAYOUTS", "NEW_VIME", "OLD_VIME", "SLIME", "Layout", "Output", "Stuck", "TrainerDouble"]

FINISHED = (Status.COMPLETED, Status.TRUNCATED)


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
    "new vime", "vime", "vime.rollout.vllm_rollout", "vime.observability.trace_utils", "vime.data.data_source",
    cancels=True, context_step=True, evaluation_sessions=True, keeps_only_started=True,
)  # fmt: skip
OLD_VIME = Layout(
    "old vime", "vime", "vime.rollout.vllm_rollout", "vime.utils.trace_utils", "vime.rollout.data_source",
    cancels=False, context_step=False, evaluation_sessions=False, keeps_only_started=False,
)  # fmt: skip
SLIME = Layout(
    "slime", "slime", "slime.rollout.sglang_rollout", "slime.observability.trace_utils", "slime.rollout.data_source",
    cancels=False, context_step=False, evaluation_sessions=False, keeps_only_started=False, sglang=True,
)  # fmt: skip
LAYOUTS = (NEW_VIME, OLD_VIME, SLIME)


class Stuck(AssertionError):
    """A step did not come to its end."""


@dataclass
class Output:
    """Of a rollout function."""

    samples: list[list[Any]]
    metrics: dict[str, Any] | None = None


@dataclass
class EvaluationOutput:
    data: dict[str, dict[str, Any]]
    metrics: dict[str, Any] | None = None


class State:
    """The part of `GenerateState` that tasks share."""

    def __init__(self, trainer: TrainerDouble, args: Any) -> None:
        self.args = args
        self.tokenizer = trainer.tokenizer
        self.processor = None
        self.semaphore = asyncio.Semaphore(trainer.concurrency)
        self.sampling_params = trainer.sampling_params
        self.reset()

    def reset(self) -> None:
        self.remaining_batch_size = 0
        self.pendings: set[asyncio.Task[Any]] = set()
        self.aborted = False
        self.cancellable_tasks: set[asyncio.Task[Any]] = set()
        self.active_server_generations = 0


class TrainerDouble:
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

        `abort_when` holds back a step's abort until it is true (`lambda: engine.holding == 4`), so that
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
                "rollout_sample_hook_path": None,
                "load": None,
                "save": None,
                **settings,
            }
        )
        self.data_source = DataSource(self.args, questions, read_only=read_only_source)

    # Life

    def __enter__(self) -> TrainerDouble:
        self._stack = contextlib.ExitStack()
        self.modules = self._stack.enter_context(modules.install(self))
        self.loop = WatchedLoop()
        self.loop.on_tick = self.watch.look
        thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        thread.start()

        def end() -> None:
            self.run(self._close())
            self.loop.call_soon_threadsafe(self.loop.stop)
            thread.join(10)
            self.loop.close()

        self._stack.callback(end)
        self.http = self.modules[f"{self.layout.root}.utils.http_utils"]
        self.hooks = self.modules[f"{self.layout.root}.rollout.sample_hooks"]
        self.run(self._open())
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

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """What the trainer's `run` does: onto the background loop, and wait."""
        future = asyncio.run_coroutine_threadsafe(coroutine, self.loop)
        try:
            return future.result(self.timeout)
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

    def load_function(self, path: str) -> Any:
        if path in self.functions:
            return self.functions[path]
        module, _, name = path.rpartition(".")
        return getattr(importlib.import_module(module), name)

    def get_state(self, args: Any = None) -> State:
        """`GenerateState(args)`: the first call makes it."""
        if self.state is None:
            self.state = State(self, args or self.args)
        return self.state

    # What the manager process does

    def step(self, rollout_id: int) -> list[Sample]:
        """Generate one step, log it, check every sample that left or went back. Raises what the step raises."""
        self.hooks.set_current_rollout_id(rollout_id)
        function = self.load_function(self.args.rollout_function_path)
        started = time.monotonic()
        with self.hooks.rollout_context(rollout_id) if self._step_in_context else contextlib.nullcontext():
            output = function(self.args, rollout_id, self.data_source, evaluation=False)
        groups = output.samples if isinstance(output, Output) else output
        samples = list(_flat(groups))
        metrics = output.metrics if isinstance(output, Output) else None
        self._check([*samples, *_flat(self.data_source.buffer)])  # and those that go nowhere
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

    # The rollout function

    def generate_rollout(self, args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> Any:
        if evaluation:
            return self.run(self._evaluate())
        output, back = self.run(self._rollout(rollout_id, data_source.get_samples))
        self.aborted_groups += back
        if back:
            data_source.add_samples(back)
        return output

    async def _rollout(self, rollout_id: int, get_samples: Callable[[int], list[list[Sample]]]) -> Any:
        state, wanted = self.get_state(), self.args.rollout_batch_size
        kept: list[list[Any]] = []
        dropped = 0
        while len(kept) < wanted:
            while state.remaining_batch_size < wanted:
                groups = get_samples(self.args.over_sampling_batch_size)
                state.pendings |= {asyncio.ensure_future(self.generate_group(group)) for group in groups}
                state.remaining_batch_size += len(groups)
            done, state.pendings = await asyncio.wait(state.pendings, return_when=asyncio.FIRST_COMPLETED)
            for group in [task.result() for task in done]:
                if not self.keep_group(group):
                    dropped += 1
                    state.remaining_batch_size -= 1
                elif len(kept) < wanted:
                    kept.append(group)
        while not self.abort_when():
            await asyncio.sleep(0.001)
        back = await self.abort(rollout_id)
        state.reset()
        return Output(kept, {"rollout/dropped": dropped}), back

    async def abort(self, rollout_id: int) -> list[list[Any]]:
        state = self.get_state()
        state.aborted = True
        tasks, state.cancellable_tasks = state.cancellable_tasks, set()
        for task in tasks:
            task.cancel()
        told = state.active_server_generations > 0
        back = []
        while state.pendings:
            if told:
                await self._abort_engine()
            done, state.pendings = await asyncio.wait(
                state.pendings, timeout=0.05, return_when=asyncio.FIRST_COMPLETED
            )
            back += [task.result() for task in done]
        if not self.args.partial_rollout:
            return []
        if self.layout.keeps_only_started:
            back = [
                group
                for group in back
                if any(each.status is Status.ABORTED and each.response_length for each in group)
            ]
        for sample in _flat(back):
            if sample.response:
                sample.metadata.setdefault("start_rollout_id", rollout_id)
        return back

    async def _abort_engine(self) -> None:
        host = f"{self.args.sglang_router_ip}" if self.layout.sglang else f"{self.args.vllm_router_ip}"
        port = self.args.sglang_router_port if self.layout.sglang else self.args.vllm_router_port
        for worker in (await self.http.get(f"http://{host}:{port}/workers"))["workers"]:
            if self.layout.sglang:
                await self.http.post(f"{worker['url']}/abort_request", {"abort_all": True})
            else:
                await self.http.post(f"{worker['url']}/abort_requests", {})

    async def generate_group(self, group: list[Sample], evaluation: bool = False) -> list[Any]:
        if self.get_state().aborted:
            return group
        for sample in group:
            sample.session_id = sample.session_id or str(uuid.uuid4())
        tasks = [asyncio.ensure_future(self.generate_one(sample, evaluation)) for sample in group]
        return list(await asyncio.gather(*tasks))

    async def generate_one(self, sample: Sample, evaluation: bool = False) -> Any:
        args, state = self.args, self.get_state()
        if args.partial_rollout and args.mask_offpolicy_in_partial_rollout and sample.response_length:
            sample.loss_mask = [0] * sample.response_length
            self._masked[id(sample)] = (sample, sample.response_length)
        if sample.status in FINISHED:
            return sample
        async with state.semaphore:
            await asyncio.sleep(0)
            if state.aborted:
                sample.status = Status.ABORTED
                return sample
            result = await self._call(sample, evaluation)
        result = await self.hooks.apply_rollout_sample_hooks(args, result, evaluation=evaluation)
        for each in _flat([result]):
            if each.status is not Status.ABORTED and each.reward is None:
                await asyncio.sleep(0)  # a reward model takes its time
                each.reward = float(each.status is Status.COMPLETED)
        return result

    async def _call(self, sample: Sample, evaluation: bool) -> Any:
        """One call of the generate function, with all that must hold around it."""
        args, state = self.args, self.get_state()
        function = self.load_function(sample.generate_function_path or args.custom_generate_function_path)
        params = self.sampling_params
        before = copy.deepcopy(params)
        takes_evaluation = "evaluation" in modules.parameters(function)
        call = function(args, sample, params, **({"evaluation": evaluation} if takes_evaluation else {}))
        self.watch.add(sample, len(self.tokenizer.encode(sample.prompt)))
        try:
            if self.layout.cancels and getattr(function, "abort_mode", None) == "request":
                result = await self._cancellable(sample, call)
            else:
                state.active_server_generations += 1
                try:
                    result = await call
                finally:
                    state.active_server_generations -= 1
        finally:
            self.watch.look()
            self.watch.remove(sample)
        if params != before:
            self.problems.append(
                f"sample {sample.index}: sampling_params were changed from {before} to {params}"
            )
            params.clear()
            params.update(before)
        self._generated += _flat([result])
        if result is not sample and not isinstance(result, list):
            self.problems.append(f"sample {sample.index}: another object came back")
        if isinstance(result, Sample) and result.status is Status.PENDING:
            self.problems.append(f"sample {sample.index} came back pending")
        return result

    async def _cancellable(self, sample: Sample, call: Awaitable[Any]) -> Any:
        tasks, task = self.get_state().cancellable_tasks, asyncio.current_task()
        assert task is not None
        tasks.add(task)
        try:
            return await call
        except asyncio.CancelledError:
            if task in self.get_state().cancellable_tasks:
                raise
            sample.status = Status.ABORTED
            return sample
        finally:
            self.get_state().cancellable_tasks.discard(task)

    async def _evaluate(self) -> EvaluationOutput:
        results = await asyncio.gather(*(self._evaluate_one(texts) for texts in self._datasets.values()))
        return EvaluationOutput(dict(zip(self._datasets, results, strict=True)))

    async def _evaluate_one(self, texts: list[str]) -> dict[str, Any]:
        samples = []
        for text in texts:
            original = Sample(prompt=text)
            for _ in range(self._repeats):
                sample = copy.deepcopy(original)
                sample.index = len(samples)
                if self.layout.evaluation_sessions:
                    sample.session_id = str(uuid.uuid4())
                samples.append(sample)
        results = await asyncio.gather(*(self.generate_one(sample, evaluation=True) for sample in samples))
        done = sorted(_flat(results), key=lambda sample: sample.index)
        return {
            "samples": done,
            "rewards": [sample.reward for sample in done],
            "truncated": [sample.status is Status.TRUNCATED for sample in done],
        }


def _flat(nested: Iterable[Any]) -> Iterable[Sample]:
    for each in nested:
        if isinstance(each, list):
            yield from _flat(each)
        else:
            yield each
