"""Run a user's own generate function against a recording, and say how its samples differ.

    found = await run_through("my_rollout:generate", reader, entry)

The function has vime's signature, `async (args, sample, sampling_params)`, and gets what vime would give it,
with the address of a server that plays the recording: `args` with the router's host and port, a sample with
the recorded prompt's token ids, and the recorded sampling parameters under the trainer's names. Where the
recording was aborted, the function is aborted as vime does it, and called again where the sample went on.
"""

from __future__ import annotations

import asyncio
import enum
import inspect
import logging
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from importlib import import_module
from types import SimpleNamespace
from typing import Any

from rollout_log.errors import RolloutLogError, TrainerMissing
from rollout_log.events import Opened
from rollout_log.fold import Rollout
from rollout_log.log import Entry, LogReader
from rollout_log.replay.checking import CannotCheck, Difference, OneSample, first_place
from rollout_log.replay.matching import Report
from rollout_log.replay.recording import RecordedExchange, read_exchanges
from rollout_log.replay.server import ReplayServer, serve_replay

__all__ = ["FunctionNotFound", "PlainSample", "load_function", "run_through"]

_logger = logging.getLogger("rollout_log")

_ARRIVES_S, _ARRIVES_TURNS = 0.1, 500
"""How long what was sent may take to reach the function before its task is cancelled, and how many turns of
the event loop: each one asks the sockets, and on a busy machine there may be few in a second."""

_LEAVES_S = 30.0
"""How long the server may take to notice that a client has gone."""

Generate = Callable[..., Awaitable[Any]]

_NAMES = {
    "max_tokens": "max_new_tokens",
    "max_completion_tokens": "max_new_tokens",
    "min_tokens": "min_new_tokens",
    "include_stop_str_in_output": "no_stop_trim",
}
"""The trainer's name of an engine's parameter, where it is another one."""

_ASKED = {"logprobs", "prompt_logprobs", "return_token_ids", "return_tokens_as_token_ids"}
"""What the function asks for by itself, to read the answer; no trainer says it."""


class FunctionNotFound(RolloutLogError):
    """The path names no function."""


class PlainSample:
    """The fields of vime's and slime's `Sample`, for functions that import neither."""

    class Status(enum.Enum):
        PENDING = "pending"
        COMPLETED = "completed"
        TRUNCATED = "truncated"
        ABORTED = "aborted"
        FAILED = "failed"

    def __init__(self, **fields: Any) -> None:
        self.group_index: int | None = None
        self.index: int | None = None
        self.rollout_id: int | None = None
        self.prompt: Any = ""
        self.tokens: list[int] = []
        self.multimodal_inputs: Any = None
        self.multimodal_train_inputs: Any = None
        self.response = ""
        self.response_length = 0
        self.label: str | None = None
        self.reward: Any = None
        self.loss_mask: list[int] | None = None
        self.weight_versions: list[str] = []
        self.rollout_log_probs: list[float] | None = None
        self.rollout_routed_experts: Any = None
        self.remove_sample = False
        self.status = self.Status.PENDING
        self.metadata: dict[str, Any] = {}
        self.session_id: str | None = None
        self.__dict__.update(fields)


def load_function(path: str) -> Generate:
    """Import `module:function` or `module.function`. Raises `FunctionNotFound`."""
    module_name, _, name = path.rpartition(":") if ":" in path else path.rpartition(".")
    if "" not in sys.path:
        sys.path.insert(0, "")  # the user's own module lies where the command is called
    try:
        found = getattr(import_module(module_name), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise FunctionNotFound(f"there is no function {path!r} ({error}); give module:function") from error
    if not inspect.iscoroutinefunction(inspect.unwrap(found)):
        raise FunctionNotFound(f"{path!r} is no async function (args, sample, sampling_params)")
    return found  # type: ignore[no-any-return]


async def run_through(function: Generate, source: LogReader, entry: Entry) -> list[Difference]:
    """Run a generate function on one recorded sample, and return how what it made differs.

    What the function raises is a difference as well, and logged. Raises `CannotCheck` for a sample without
    a request it could be given, and `TrainerMissing` where the function is a plug-in's, without its trainer.
    """
    exchanges = read_exchanges(source, entry.ref, entry.name)
    if not exchanges or exchanges[0].dialect is None:
        raise CannotCheck(f"sample {entry.name!r} has no request for tokens, so there is nothing to call")
    opened = next(event for _, event in source.events(entry.ref) if isinstance(event, Opened))
    rollout = source.rollout(entry.ref)
    sample = _sample(opened, rollout)
    async with serve_replay(OneSample(source, entry)) as server:
        for _ in exchanges:
            try:
                sample = await _Run(function, server, exchanges).call(sample)
            except TrainerMissing:  # it says nothing of the sample, and the next one would say it as well
                raise
            except Exception as error:
                _logger.warning("the function raised on sample %r", entry.name, exc_info=True)
                return [_raised(entry.name, error, server), *_misses(entry.name, server.report())]
            if _status(sample) != "aborted" or not _unserved(server.report()):
                break
        return list(_differences(entry.name, rollout, sample, server.report()))


@dataclass
class _Run:
    """One call of the function."""

    function: Generate
    server: ReplayServer
    exchanges: list[RecordedExchange]
    args: SimpleNamespace = field(init=False)

    def __post_init__(self) -> None:
        host, port, model = self.server.host, self.server.port, self.exchanges[0].info.model
        self.args = SimpleNamespace(
            hf_checkpoint=model or "recorded",
            vllm_router_ip=host,
            vllm_router_port=port,
            sglang_router_ip=host,
            sglang_router_port=port,
            router_policy=None,
            partial_rollout=True,
            mask_offpolicy_in_partial_rollout=False,
            group_rm=False,
            use_rollout_routing_replay=False,
            use_score_centering=False,
            vllm_speculative_config=None,
            sglang_speculative_algorithm=None,
            vllm_enable_deterministic_inference=False,
            n_samples_per_prompt=1,
            rollout_seed=0,
        )

    async def call(self, sample: Any) -> Any:
        """Call it, and abort it where the recording was."""
        parameters = inspect.signature(self.function).parameters
        more = {"evaluation": False} if "evaluation" in parameters else {}
        task = asyncio.ensure_future(self.function(self.args, sample, self._sampling_params(), **more))
        by_task = getattr(self.function, "abort_mode", None) == "request"
        cancelled = False
        while not task.done():
            held = any(playback.held for playback in self.server.desk.playing)
            if held and not by_task:
                self.server.desk.abort()
            elif held and not cancelled:
                await _arrive()
                cancelled = task.cancel()
            await asyncio.wait([task], timeout=0.005)
        deadline = time.monotonic() + _LEAVES_S
        # Else the next call would be taken for the one that was held.
        while self.server.desk.playing and time.monotonic() < deadline:  # noqa: ASYNC110 - it has no event
            await asyncio.sleep(0.005)
        if task.cancelled():
            sample.status = type(sample).Status.ABORTED
            return sample
        return task.result()

    def _sampling_params(self) -> dict[str, Any]:
        """What the trainer would say to get the first recorded request."""
        recorded = self.exchanges[0].info.sampling_params
        if self.exchanges[0].requested.dialect == "sglang":
            return dict(recorded)
        return {_NAMES.get(name, name): value for name, value in recorded.items() if name not in _ASKED}


async def _arrive() -> None:
    """Let what was sent reach the function."""
    await asyncio.sleep(_ARRIVES_S)
    for _ in range(_ARRIVES_TURNS):
        await asyncio.sleep(0)


def _sample(opened: Opened, rollout: Rollout) -> Any:
    """Make a sample of the class that the function's module uses, if it imported one."""
    kind: Any = PlainSample
    for trainer in ("vime", "slime"):
        types = sys.modules.get(f"{trainer}.utils.types")
        kind = getattr(types, "Sample", kind)
    prompt = opened.metadata.get("prompt")
    return kind(
        group_index=opened.group_index,
        index=opened.index,
        prompt=prompt if isinstance(prompt, (str, list)) else "",
        tokens=list(rollout.prompt_token_ids),
        label=opened.metadata.get("label"),
        metadata={"rollout_log_key": opened.key},
        session_id=opened.key,
    )


def _differences(name: str, rollout: Rollout, sample: Any, report: Report) -> Iterator[Difference]:
    choice = rollout.choice_or_first()
    prompt = len(rollout.prompt_token_ids)
    versions = [span.version for span in choice.weight_versions(rollout.dispatched)]
    pairs: list[tuple[str, Any, Any]] = [
        ("status", rollout.status, _status(sample)),
        ("tokens", [*rollout.prompt_token_ids, *choice.token_ids], list(sample.tokens)),
        ("response_length", len(sample.tokens) - prompt, sample.response_length),
        ("loss_mask", choice.loss_mask, sample.loss_mask),
        ("rollout_log_probs", choice.logprobs, sample.rollout_log_probs),
        ("weight_versions", versions, sample.weight_versions),
    ]
    for label, recorded, theirs in pairs:
        if theirs is None or recorded == theirs or (label == "weight_versions" and not theirs):
            continue
        if repr(recorded) == repr(list(theirs) if isinstance(recorded, list) else theirs):
            continue  # NaN differs from itself
        yield Difference(name, *first_place(label, recorded, theirs))
    for number in _unserved(report):
        yield Difference(name, f"requests[{number}]", "made", "not made")
    yield from _misses(name, report)


def _raised(name: str, error: Exception, server: ReplayServer) -> Difference:
    """Say in a line what the function raised; the address it was given means nothing to a reader."""
    first = str(error).partition("\n")[0].replace(server.url, "")
    return Difference(name, "raised", None, f"{type(error).__name__}: {first}")


def _misses(name: str, report: Report) -> Iterator[Difference]:
    for miss in report.misses:
        yield Difference(name, "requests", "not made", miss)


def _status(sample: Any) -> str:
    return str(getattr(sample.status, "value", sample.status))


def _unserved(report: Report) -> list[int]:
    return [number for _, numbers in report.partly for number in numbers]
