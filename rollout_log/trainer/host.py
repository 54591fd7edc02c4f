"""What differs between vime and slime, and between their versions: where things are, and what is asked.

Nothing of either is imported before the first call, and each thing is looked up where it is at that moment,
since trainers and their tests replace module attributes.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from types import ModuleType
from typing import Any, Protocol

import httpx
import msgspec

from rollout_log.errors import RolloutLogError, TrainerMissing

__all__ = ["Heads", "Host", "Prepared", "Unsupported"]


class Unsupported(RolloutLogError):
    """A combination of the trainer's settings that cannot be served; names the flag to change."""

    def __init__(self, feature: str, remedy: str) -> None:
        super().__init__(f"rollout-log cannot serve {feature}: {remedy}")


class Heads(Protocol):
    """Reads more than the fold does, for the fields of a sample that have a row a token."""

    def begin(self, sample: Any, base: int, start: int) -> None:
        """A request begins: the response is `base` tokens long, `start` of them from before the call."""

    def feed(self, chunk: bytes) -> None:
        """A read of the response came."""

    def extend(self, sample: Any, count: int, start: int) -> None:
        """The sample has `count` more tokens."""

    def finish(self, sample: Any, start: int) -> None:
        """The call is over. Raises `RolloutLogError` where something did not come."""


class Prepared(msgspec.Struct):
    """One request, ready to be sent."""

    url: str
    body: dict[str, Any]
    headers: dict[str, str] = {}
    heads: Heads | None = None
    """What else is read from the stream, token by token."""


class Host(msgspec.Struct, frozen=True):
    """One trainer."""

    name: str
    rollout: str
    """Module that has `GenerateState`."""
    prefix: str
    """Of the engine's settings in `args`: `vllm` or `sglang`."""
    span: str
    """Name of the trace span that the trainer's request metrics read."""
    meta_attrs: str
    """Function of the trace module that turns an answer into span attributes."""
    speculative: str
    """Setting in `args` that says whether speculative decoding is on."""
    version_path: str | None = None
    """Where an engine that does not put its weight version on every frame says it."""

    def module(self, *paths: str) -> ModuleType | None:
        """Return the first of these modules of the trainer that can be imported."""
        for path in paths:
            name = f"{self.name}.{path}"
            with contextlib.suppress(ImportError):
                return sys.modules.get(name) or importlib.import_module(name)
        return None

    def state(self, args: Any) -> Any:
        """Return the trainer's `GenerateState`."""
        module = self.module(self.rollout)
        if module is None:
            raise TrainerMissing(f"{self.name}.{self.rollout} cannot be imported: is {self.name} installed?")
        return module.GenerateState(args)

    def base_url(self, args: Any) -> str:
        """Return the address of the engines' router."""
        ip, port = (getattr(args, f"{self.prefix}_router_{part}", None) for part in ("ip", "port"))
        if ip is None or port is None:
            missing = f"args has no {self.prefix}_router_ip or {self.prefix}_router_port"
            raise Unsupported("a run without engines", f"{missing}, which {self.name} sets when they start")
        return f"http://{ip}:{port}"

    def client(self, args: Any) -> httpx.AsyncClient:
        """Return the trainer's shared httpx client."""
        http_utils = self.module("utils.http_utils")
        client = getattr(http_utils, "_http_client", None)
        if client is None and http_utils is not None and hasattr(http_utils, "init_http_client"):
            http_utils.init_http_client(args)
            client = getattr(http_utils, "_http_client", None)
        if client is None:
            raise RolloutLogError(f"{self.name} has no HTTP client yet (utils.http_utils._http_client)")
        return client  # type: ignore[no-any-return]

    def step(self) -> int | None:
        """Return the rollout step that the caller belongs to, None where the trainer does not say."""
        hooks = self.module("rollout.sample_hooks")
        variable = getattr(hooks, "_task_rollout_id", None)
        step = variable.get(None) if variable is not None else None
        if step is None:
            step = getattr(hooks, "_current_rollout_id", None)
        return step if isinstance(step, int) else None

    @contextlib.contextmanager
    def traced(self, sample: Any, attrs: dict[str, Any]) -> Iterator[Callable[[Mapping[str, Any]], None]]:
        """Trace one generation; yields what takes the engine's answer in. Closes on a cancel as well."""
        trace = self.module("observability.trace_utils", "utils.trace_utils")
        raised: BaseException | None = None
        with _span(trace, sample, self.span, attrs) as span:

            def answered(meta: Mapping[str, Any]) -> None:
                build = getattr(trace, self.meta_attrs, None)
                if build is not None and hasattr(span, "update"):
                    with contextlib.suppress(Exception):  # an odd figure of the engine's is no reason to fail
                        span.update(build(meta))

            try:
                yield answered
            except Exception:
                raise
            except BaseException as error:  # the trainer's span would stay open
                raised = error
        if raised is not None:
            raise raised


def _span(
    trace: ModuleType | None, sample: Any, name: str, attrs: dict[str, Any]
) -> AbstractContextManager[Any]:
    if trace is None or not hasattr(trace, "trace_span"):
        return contextlib.nullcontext()
    return trace.trace_span(sample, name, attrs=attrs)  # type: ignore[no-any-return]
