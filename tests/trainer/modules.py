"""Stand-ins for the modules of vime and slime that a generate function may import."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from types import ModuleType
from typing import TYPE_CHECKING, Any

import httpx

from trainer.sample_double import Sample
from trainer.truth import Tokenizer

if TYPE_CHECKING:
    from trainer.trainer_double import TrainerDouble

__all__ = ["Tokenizer", "install", "parameters"]


def parameters(function: Callable[..., Any]) -> list[str]:
    return list(inspect.signature(function).parameters)


@contextlib.contextmanager
def install(trainer: TrainerDouble) -> Iterator[dict[str, ModuleType]]:
    """Put the stand-ins of the trainer's layout into `sys.modules`; afterwards all is as it was."""
    root = trainer.layout.root
    made = _build(trainer)
    ours = [name for name in sys.modules if name == root or name.startswith(root + ".")]
    hidden = {name: sys.modules.pop(name) for name in ours}
    sys.modules.update(made)
    try:
        yield made
    finally:
        for name in [name for name in sys.modules if name == root or name.startswith(root + ".")]:
            del sys.modules[name]
        sys.modules.update(hidden)


def _build(trainer: TrainerDouble) -> dict[str, ModuleType]:
    layout, root = trainer.layout, trainer.layout.root
    contents: dict[str, dict[str, Any]] = {
        layout.rollout: _rollout(trainer),
        layout.trace: _trace(sglang=layout.sglang),
        layout.data: {"RolloutDataSourceWithBuffer": type(trainer.data_source)},
        f"{root}.rollout.base_types": _types(),
        f"{root}.rollout.sample_hooks": {},
        f"{root}.utils.http_utils": {},
        f"{root}.utils.types": {"Sample": Sample},
        f"{root}.utils.misc": {"load_function": trainer.load_function},
        f"{root}.utils.async_utils": {"run": trainer.run},
        f"{root}.utils.processing_utils": {
            "load_tokenizer": lambda *_, **__: trainer.tokenizer,
            "load_processor": lambda *_, **__: None,
            "encode_image_for_rollout_engine": lambda image: f"data:image/png;base64,{image}",
        },
    }
    modules: dict[str, ModuleType] = {}
    for name, attributes in contents.items():
        parts = name.split(".")
        for depth in range(1, len(parts) + 1):
            path = ".".join(parts[:depth])
            if path not in modules:
                modules[path] = module = ModuleType(path)
                if depth < len(parts):
                    module.__path__ = []
                if depth > 1:
                    setattr(modules[".".join(parts[: depth - 1])], parts[depth - 1], module)
        vars(modules[name]).update(attributes)
    _fill_http(modules[f"{root}.utils.http_utils"], sharded=layout.cancels)
    _fill_hooks(modules[f"{root}.rollout.sample_hooks"], trainer)
    return modules


def _rollout(trainer: TrainerDouble) -> dict[str, Any]:
    return {
        "GenerateState": trainer.get_state,
        "generate_rollout": trainer.generate_rollout,
        "abort": lambda args, rollout_id: trainer.abort(rollout_id),
        "generate_and_rm": lambda args, sample, sampling_params, evaluation=False: trainer.generate_one(
            sample, evaluation
        ),
        "generate_and_rm_group": lambda args, group, sampling_params, evaluation=False: (
            trainer.generate_group(group, evaluation)
        ),
    }


def _types() -> dict[str, Any]:
    from trainer.rollout_double import EvaluationOutput, Output

    return {"RolloutFnTrainOutput": Output, "RolloutFnEvalOutput": EvaluationOutput}


# HTTP


class ShardedTransport(httpx.AsyncBaseTransport):
    """Several small pools, in turns: the client has one transport that is none of httpx's own."""

    def __init__(self, pools: int, size: int) -> None:
        limits = httpx.Limits(max_connections=size, max_keepalive_connections=size)
        self._transports = [httpx.AsyncHTTPTransport(limits=limits, trust_env=False) for _ in range(pools)]
        self._turn = 0

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        self._turn += 1
        return await self._transports[self._turn % len(self._transports)].handle_async_request(request)

    async def aclose(self) -> None:
        for transport in self._transports:
            await transport.aclose()


def _fill_http(module: Any, *, sharded: bool) -> None:
    module._http_client = None
    module._distributed_post_enabled = False
    module._post_actors = []

    def init_http_client(args: Any) -> None:
        if module._http_client is None:
            how: dict[str, Any] = (
                {"transport": ShardedTransport(2, 128)}
                if sharded
                else {"limits": httpx.Limits(max_connections=256)}
            )
            module._http_client = httpx.AsyncClient(timeout=httpx.Timeout(None), trust_env=False, **how)

    async def post(url: str, payload: Any, max_retries: int = 60, headers: Any = None, **_: Any) -> Any:
        for left in reversed(range(max_retries)):
            try:
                response = await module._http_client.post(url, json=payload or {}, headers=headers)
                response.raise_for_status()
                return _read(response)
            except Exception:
                if not left:
                    raise
                await asyncio.sleep(0.02)
        raise ValueError("max_retries is 0")

    async def get(url: str, **_: Any) -> Any:
        response = await module._http_client.get(url)
        response.raise_for_status()
        return response.json()

    module.init_http_client, module.post, module.get = init_http_client, post, get


def _read(response: httpx.Response) -> Any:
    try:
        return response.json()
    except json.JSONDecodeError:
        return response.text


# Sample hooks


def _fill_hooks(module: Any, trainer: TrainerDouble) -> None:
    module._current_rollout_id = None
    if trainer.layout.context_step:
        module._task_rollout_id = ContextVar("rollout_sample_hook_id", default=None)

    def set_current_rollout_id(rollout_id: int | None) -> None:
        module._current_rollout_id = rollout_id

    @contextlib.contextmanager
    def rollout_context(rollout_id: int) -> Iterator[None]:
        token = module._task_rollout_id.set(rollout_id)
        try:
            yield
        finally:
            module._task_rollout_id.reset(token)

    async def apply_rollout_sample_hooks(args: Any, value: Any, **kwargs: Any) -> Any:
        if isinstance(value, list):
            return [await apply_rollout_sample_hooks(args, each, **kwargs) for each in value]
        for path in args.rollout_sample_hook_path or ():
            result = trainer.load_function(path)(args, value, rollout_id=module._current_rollout_id, **kwargs)
            if inspect.isawaitable(result):
                result = await result
            value = value if result is None else result
        return value

    module.set_current_rollout_id = set_current_rollout_id
    module.rollout_context = rollout_context
    module.apply_rollout_sample_hooks = apply_rollout_sample_hooks


# Traces


class Span:
    def __init__(self) -> None:
        self.attrs: dict[str, Any] = {}

    def set(self, key: str, value: Any) -> Span:
        self.attrs[key] = value
        return self

    def update(self, attrs: dict[str, Any] | None) -> Span:
        self.attrs.update(attrs or {})
        return self


def _trace(*, sglang: bool) -> dict[str, Any]:
    def event(sample: Sample, kind: str, name: str, attrs: dict[str, Any] | None, **more: str) -> None:
        carrier = sample.__dict__.setdefault(
            "trace", {"version": 1, "trace_id": uuid.uuid4().hex, "events": []}
        )
        carrier["events"].append(
            {"type": kind, "name": name, "ts": time.time(), "attrs": dict(attrs or {}), **more}
        )

    @contextlib.contextmanager
    def trace_span(target: Any, name: str, *, attrs: Any = None, record_error: bool = True) -> Iterator[Span]:
        """As the real one, it ends the span for an Exception and leaves it open for a cancellation."""
        samples = target if isinstance(target, list) else [target]
        ids = [uuid.uuid4().hex for _ in samples]
        for sample, span_id in zip(samples, ids, strict=True):
            event(sample, "span_start", name, attrs, span_id=span_id)
        span = Span()
        try:
            yield span
        except Exception as error:
            span.attrs["error_type"] = type(error).__name__
            for sample, span_id in zip(samples, ids, strict=True):
                event(sample, "span_end", name, span.attrs, span_id=span_id)
            raise
        for sample, span_id in zip(samples, ids, strict=True):
            event(sample, "span_end", name, span.attrs, span_id=span_id)

    def trace_event(target: Sample, name: str, *, attrs: Any = None) -> None:
        event(target, "event", name, attrs)

    def vllm_attrs(meta: dict[str, Any]) -> dict[str, Any]:
        usage = meta.get("usage") or {}
        attrs = {key: usage[key] for key in ("prompt_tokens", "completion_tokens") if key in usage}
        if meta.get("choices"):
            attrs["finish_reason"] = meta["choices"][0].get("finish_reason")
        return attrs

    def sglang_attrs(meta: dict[str, Any]) -> dict[str, Any]:
        attrs = {
            key: meta[key] for key in ("prompt_tokens", "completion_tokens", "e2e_latency") if key in meta
        }
        return {**attrs, "finish_reason": (meta.get("finish_reason") or {}).get("type")}

    build = (
        {"build_sglang_meta_trace_attrs": sglang_attrs}
        if sglang
        else {"build_vllm_meta_trace_attrs": vllm_attrs}
    )
    return {"trace_span": trace_span, "trace_event": trace_event, **build}
