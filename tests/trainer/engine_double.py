"""A stand-in for vLLM and SGLang on a loopback port, in a thread of its own.

    with EngineDouble(plan=InOrder([Fault("rst")])) as engine:
        ...                                   # engine.url, engine.host, engine.port
        engine.set_version("1")
    assert engine.violations == []            # what requests got wrong, in words
    engine.served                             # every generate request and how it ended

It speaks `/inference/v1/generate` (deltas; weight versions as stock vLLM's spans, as a field on every frame,
or not at all) and `/generate` (cumulative or incremental), streamed and whole, and the control endpoints
that trainers use. What it answers is `truth`; how it misbehaves is `faults`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import urllib.parse
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any, Literal

from rollout_log.http_server import Request, Responder, serve
from trainer.faults import FaultPlan, InOrder
from trainer.served import Served, finish_of, frame_size, take
from trainer.truth import IMAGE, TOOL, decode, expected_tokens, holds_at, split_prompt
from trainer.wire import Encoder, SglangEncoder, VllmEncoder, Wire

__all__ = ["EngineDouble"]


class EngineDouble:
    def __init__(
        self,
        *,
        plan: FaultPlan = InOrder(),  # noqa: B008 - frozen
        versions: Literal["spans", "field", "none"] = "spans",
        incremental: bool = False,
        frame_tokens: int = 3,
        pace: float = 0.0,
        budget: int | None = None,
        weight_version: str = "0",
    ) -> None:
        """`frame_tokens`: most tokens in a frame. `budget`: what start + max_tokens has to be."""
        self.plan = plan
        self.version_style = versions
        self.incremental = incremental
        self.frame_tokens = frame_tokens
        self.pace = pace
        self.budget = budget
        self.weight_version = weight_version
        self.all_versions = [weight_version]
        self.served: list[Served] = []
        self.calls: list[tuple[str, str, dict[str, Any]]] = []
        """(method, target, JSON body) of everything else that was asked."""
        self.violations: list[str] = []
        self.host, self.port = "127.0.0.1", 0
        self._attempts: Counter[tuple[int, ...]] = Counter()
        self._asked_health = asyncio.Event()
        self._released = asyncio.Event()
        self._resumed = asyncio.Event()
        self._resumed.set()
        self._closed = False
        self._down_for: float | None = None
        self._ready = threading.Event()

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    @property
    def running(self) -> list[Served]:
        return [each for each in self.served if each.finish is None]

    @property
    def holding(self) -> int:
        """Streams that have come to the place where their prompt says to hold."""
        return sum(each.holding for each in self.running)

    @property
    def stalling(self) -> int:
        """Streams that sent their last byte for now, by a fault."""
        return sum(each.stalling for each in self.served)

    @property
    def lingering(self) -> int:
        """Streams that sent their finish and not yet their end, on purpose."""
        return sum(each.lingering for each in self.served)

    def set_version(self, version: str) -> None:
        self.weight_version = version
        if version not in self.all_versions:
            self.all_versions.append(version)

    def release(self) -> None:
        """Let every stream that holds go on, now and from now on."""
        self._loop.call_soon_threadsafe(self._released.set)

    def abort_all(self) -> None:
        """As if somebody else had told the engine to abort."""
        self._loop.call_soon_threadsafe(self._abort)

    def crash(self, seconds: float | None = None) -> None:
        """Cut every stream and refuse connections for so long, or until `restart`."""
        self._loop.call_soon_threadsafe(self._crash, seconds)

    def restart(self) -> None:
        self._loop.call_soon_threadsafe(self._restarted.set)

    def __enter__(self) -> EngineDouble:  # noqa: PYI034 - `Self` came with Python 3.11
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), daemon=True)
        self._thread.start()
        if not self._ready.wait(10):
            raise RuntimeError("the engine double did not start")
        return self

    def __exit__(self, *_: object) -> None:
        self._closed = True
        self._loop.call_soon_threadsafe(self._end)
        self._thread.join(10)

    def _end(self) -> None:
        self._ending.set()
        self._restarted.set()

    async def _run(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._ending, self._restarted = asyncio.Event(), asyncio.Event()
        while not self._closed:
            async with serve(self._handle, self.host, self.port) as server:
                self.port = server.port
                self._ready.set()
                await self._ending.wait()
            self._ending.clear()
            if not self._closed:
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(self._restarted.wait(), self._down_for)
                self._restarted.clear()

    def _crash(self, seconds: float | None) -> None:
        self._down_for = seconds
        self._ending.set()

    # Control

    async def _handle(self, request: Request, responder: Responder) -> None:
        body = json.loads(request.body or b"{}")
        if request.path in {"/inference/v1/generate", "/generate"}:
            with contextlib.suppress(asyncio.CancelledError):  # the client left; `Served` says so
                await self._generate(request, body, responder)
            return
        self.calls.append((request.method, request.target, body))
        status, answer = self._control(request, body)
        await responder.answer(status, json.dumps(answer).encode(), [("content-type", "application/json")])

    def _control(self, request: Request, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        match request.path:
            case "/health":
                self._asked_health.set()
                dead = any(each.stalling and each.fault.kind == "stall_dead" for each in self.served)
                return (503 if dead else 200), {}
            case "/workers":
                return 200, {"workers": [{"url": self.url}]}
            case "/abort_requests" | "/inference/v1/abort_requests":
                return 200, {"status": "aborted", "aborted": self._abort(body.get("request_ids"))}
            case "/abort_request":
                return 200, {"aborted": self._abort(None if body.get("abort_all") else [body["rid"]])}
            case "/load":
                return 200, {"server_load": len(self.running)}
            case "/v1/loads":
                return 200, {"loads": [{"num_running_reqs": len(self.running), "num_waiting_reqs": 0}]}
            case "/pause":
                self._resumed.clear()
                if urllib.parse.parse_qs(request.query).get("mode", ["abort"]) == ["abort"]:
                    self._abort()
                return 200, {"status": "paused"}
            case "/resume":
                self._resumed.set()
                return 200, {"status": "resumed"}
            case "/update_weight_version":
                self.set_version(body["new_version"])
                return 200, {"success": True, "new_version": self.weight_version}
            case "/get_weight_version" | "/model_info" | "/weight_info":
                return 200, {"weight_version": self.weight_version}
            case "/v1/chat/completions/render":
                return 200, _render(body)
            case _:
                self.violations.append(f"{request.method} {request.target} does not exist")
                return 404, {"error": {"message": "Not Found", "code": 404}}

    def _abort(self, ids: Sequence[str] | None = None) -> int:
        stopped = [each for each in self.running if ids is None or each.id in ids]
        for each in stopped:
            each.aborted.set()
        return len(stopped)

    # Generation

    async def _generate(self, request: Request, body: dict[str, Any], responder: Responder) -> None:
        served = self._admit(request, body)
        fault, status = served.fault, None
        try:
            if fault.kind == "status":
                served.finish, status = fault.kind, fault.code
            elif error := self._refusal(served):
                served.finish, status = "refused", 400
                self.violations.append(error)
            if status is not None:
                headers = [("content-type", "application/json")]
                if fault.retry_after is not None:
                    headers.append(("retry-after", str(fault.retry_after)))
                answer = {"error": {"message": "refused on purpose", "type": "Fault", "code": status}}
                await responder.answer(status, json.dumps(answer).encode(), headers)
                return
            encoder: Encoder = (
                VllmEncoder(served, self.version_style)
                if served.path == "/inference/v1/generate"
                else SglangEncoder(served, incremental=self.incremental)
            )
            if not body.get("stream"):
                pieces = [piece async for piece in self._pieces(served)]
                await responder.answer(
                    200, json.dumps(encoder.whole(pieces)).encode(), [("content-type", "application/json")]
                )
                return
            await responder.start(200, [("content-type", "text/event-stream; charset=utf-8")])
            await self._stream(served, encoder, responder)
        except asyncio.CancelledError:
            served.finish = served.finish or "dropped"
            raise

    def _admit(self, request: Request, body: dict[str, Any]) -> Served:
        prompt, response = split_prompt(body.get("token_ids") or body.get("input_ids") or [])
        params = body.get("sampling_params") or {}
        vllm = request.path == "/inference/v1/generate"
        served = Served(
            number=len(self.served),
            path=request.path,
            headers=dict(request.headers),
            body=body,
            prompt=prompt,
            start=len(response),
            max_tokens=params.get("max_tokens" if vllm else "max_new_tokens", 16),
            fault=self.plan(prompt, self._attempts[tuple(prompt)]),
        )
        self._attempts[tuple(prompt)] += 1
        self.served.append(served)
        self.violations += self._faults_of(served, response)
        return served

    def _faults_of(self, served: Served, response: list[int]) -> Iterator[str]:
        """What a client must not do, whatever the engine then makes of it."""
        where = f"request {served.number} ({decode(served.prompt)!r} from {served.start})"
        said = expected_tokens(served.prompt, 0, served.start)
        for at, (token, expected) in enumerate(zip(response, said)):  # noqa: B905 - lengths are compared below
            if token not in {expected, *range(TOOL, TOOL + 1000)}:
                yield f"{where}: token {at} is {token}, the engine said {expected}"
                break
        if len(said) < served.start and not any(token >= TOOL for token in response):
            yield f"{where}: goes on after the end of the response"
        if self.budget is not None and served.start + served.max_tokens != self.budget:
            yield f"{where}: max_tokens {served.max_tokens}, not {self.budget} - {served.start}"
        wants = (
            served.body.get("sampling_params", {}).get("logprobs")
            if served.path == "/inference/v1/generate"
            else served.body.get("return_logprob")
        )
        if not wants:
            yield f"{where}: asks for no log-probs"

    def _refusal(self, served: Served) -> str | None:
        if not served.prompt:
            return f"request {served.number} has no token ids"
        if served.max_tokens <= 0:
            return f"request {served.number} asks for {served.max_tokens} tokens"
        return None

    async def _stream(self, served: Served, encoder: Encoder, responder: Responder) -> None:
        fault = served.fault
        wire = Wire(responder, fault.delivery)
        frames = 0
        if fault.strikes_by_itself and fault.after == 0 and await self._strike(served, encoder, wire):
            return
        async for tokens, finish, stop in self._pieces(served):
            if finish == "abort" and fault.kind == "silent_abort":
                served.finish = fault.kind
                break
            await wire.frame(encoder.frame(tokens, finish, stop))
            served.finish = finish
            if finish is not None:
                break
            frames += 1
            if (
                fault.strikes_by_itself
                and frames == fault.after
                and await self._strike(served, encoder, wire)
            ):
                return
        for place, frame in enumerate([*encoder.closing(), None]):
            if fault.kind == "linger" and fault.after == place:
                await wire.flush()
                served.lingering = True
                try:
                    await self._released.wait()
                finally:
                    served.lingering = False
            if frame is not None:
                await wire.frame(frame)
        await wire.flush()
        await responder.finish()

    async def _strike(self, served: Served, encoder: Encoder, wire: Wire) -> bool:
        """Whether the response is over by it."""
        await wire.flush()
        self._asked_health.clear()
        served.stalling = served.fault.kind in {"stall", "stall_once", "stall_dead"}
        try:
            return await self._misbehave(served, encoder, wire)
        finally:
            served.stalling = False

    async def _misbehave(self, served: Served, encoder: Encoder, wire: Wire) -> bool:
        fault, responder = served.fault, wire.responder
        if fault.kind == "stall_once":
            await _first(self._asked_health, served.aborted)
            return False
        served.finish = None if fault.kind in {"stall", "stall_dead"} else fault.kind
        match fault.kind:
            case "fin":
                responder.cut()
            case "rst":
                responder.reset()
            case "crash":
                self._crash(fault.seconds)
                await asyncio.Event().wait()
            case "error_frame":
                await wire.frame(encoder.error(fault.code))
                await wire.frame("[DONE]")
                await wire.flush()
                await responder.finish()
            case "no_terminal":
                if fault.done:
                    await wire.frame("[DONE]")
                await wire.flush()
                await responder.finish()
            case "stall":
                await served.aborted.wait()
                return False
            case "stall_dead":
                await asyncio.Event().wait()
        return True

    async def _pieces(self, served: Served) -> AsyncIterator[tuple[list[int], str | None, Any]]:
        """(new tokens, finish reason, stop reason) until one finishes."""
        params = served.body.get("sampling_params") or {}
        hold = holds_at(served.prompt)
        while True:
            await asyncio.sleep(self.pace)
            if not self._resumed.is_set():
                await _first(self._resumed, served.aborted)
            if hold is not None and served.start < hold <= served.end:
                served.holding = True
                await _first(self._released, served.aborted)
                served.holding, hold = False, None
            aborted = served.aborted.is_set()
            if aborted and served.fault.kind != "finish_on_abort":
                count = 1 if served.fault.kind == "token_on_abort" else 0
                yield take(served, self.weight_version, count), "abort", None
                return
            count = served.max_tokens if aborted else frame_size(served, self.frame_tokens)
            if hold is not None and served.end < hold:
                count = min(count, hold - served.end)
            tokens = take(served, self.weight_version, min(count, served.max_tokens - len(served.versions)))
            finish, stop = finish_of(served, tokens, params)
            yield tokens, finish, stop
            if finish is not None:
                return


async def _first(*events: asyncio.Event) -> None:
    tasks = [asyncio.ensure_future(event.wait()) for event in events]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()


def _render(body: dict[str, Any]) -> dict[str, Any]:
    """The engine's own ids differ from a trainer's: a preamble, and the images where it puts them."""
    content = body["messages"][0]["content"]
    images = sum(part["type"] == "image_url" for part in content)
    ids = [*range(50, 55), *[IMAGE] * 4 * images, 60]
    places = [{"offset": 5 + 4 * place, "length": 4} for place in range(images)]
    return {
        "token_ids": ids,
        "features": {"mm_placeholders": {"image": places}, "mm_hashes": {"image": ["h"] * images}},
    }
