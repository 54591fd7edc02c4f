"""The rollout function of the stand-in trainer: oversampling, groups, abort, partial rollout, evaluation."""

from __future__ import annotations

import asyncio
import copy
import uuid
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Any

from trainer import modules
from trainer.checks import Watch
from trainer.layouts import Layout
from trainer.sample_double import Sample, Status

__all__ = ["EvaluationOutput", "Output", "RolloutLoop", "State", "flat"]

FINISHED = (Status.COMPLETED, Status.TRUNCATED)


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

    def __init__(self, trainer: RolloutLoop, args: Any) -> None:
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


class RolloutLoop:
    """What `TrainerDouble` sets up and these methods need."""

    args: Any
    layout: Layout
    http: Any
    hooks: Any
    watch: Watch
    state: State | None
    tokenizer: modules.Tokenizer
    sampling_params: dict[str, Any]
    concurrency: int
    keep_group: Callable[[list[Any]], bool]
    abort_when: Callable[[], bool]
    load_function: Callable[[str], Any]
    run: Callable[..., Any]
    problems: list[str]
    aborted_groups: list[list[Any]]
    _generated: list[Sample]
    _masked: dict[int, tuple[Sample, int]]
    _datasets: dict[str, list[str]]
    _repeats: int

    def get_state(self, args: Any = None) -> State:
        """`GenerateState(args)`: the first call makes it."""
        if self.state is None:
            self.state = State(self, args or self.args)
        return self.state

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
        while not self.abort_when():  # noqa: ASYNC110 - it happens in the engine's thread
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
        for sample in flat(back):
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
        for each in flat([result]):
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
        self._generated += flat([result])
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
        done = sorted(flat(results), key=lambda sample: sample.index)
        return {
            "samples": done,
            "rewards": [sample.reward for sample in done],
            "truncated": [sample.status is Status.TRUNCATED for sample in done],
        }


def flat(nested: Iterable[Any]) -> Iterable[Sample]:
    for each in nested:
        if isinstance(each, list):
            yield from flat(each)
        else:
            yield each
