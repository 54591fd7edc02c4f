"""A stand-in for the engine: serves recordings over HTTP to clients that know nothing of it.

async with serve_replay("runs/today") as server:
    ... server.url ...
server.report()
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from ipaddress import ip_address

from rollout_log.errors import RolloutLogError
from rollout_log.http_server import Request, Responder, serve
from rollout_log.record.headers import KEY_HEADER
from rollout_log.replay.asking import Asked
from rollout_log.replay.controls import Controls, settle
from rollout_log.replay.desk import Desk, Pace, Sources
from rollout_log.replay.errors import ReplayMiss
from rollout_log.replay.faults import FAULT_HEADER, Faults
from rollout_log.replay.matching import Cut, Report
from rollout_log.replay.playback import AtCut, Playback, play

__all__ = ["ReplayHandler", "ReplayServer", "serve_replay"]

_JSON = [("content-type", "application/json")]
_PATIENCE_S = 1.0
"""How long a request may wait for a recording whose client has gone, which the server may not know yet."""


@dataclass(frozen=True)
class ReplayServer:
    """A running server."""

    host: str
    port: int
    url: str
    desk: Desk

    def report(self) -> Report:
        """Say which recordings were not asked for, and what was asked for in vain."""
        return self.desk.report()


@contextlib.asynccontextmanager
async def serve_replay(
    source: Sources,
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    pace: Pace = 0,
    cut: Cut = "any",
    at_cut: AtCut = "hold",
    faults: Faults | None = None,
    hold_s: float | None = None,
) -> AsyncIterator[ReplayServer]:
    """Serve recordings until the block is left.

    `pace` is a factor on the recorded waits, 0 for none, "recorded" for as they were. `cut="any"` serves a
    request from whatever token it goes on from, "exact" only where a recorded one did. `at_cut` says what
    a response does where the recorded one was aborted: "hold" until this client aborts or leaves, "go" on
    with what the next request got, or "end" as it did. `faults` are put into every response.
    What is held for `hold_s` seconds while nothing else moves is ended, as if its connection were lost; None:
    it is held on, and after some seconds that is said.
    """
    desk = Desk(source, cut=cut, at_cut=at_cut, pace=pace, faults=faults, hold_s=hold_s)
    handler = ReplayHandler(desk)
    async with serve(handler, host, port) as server:
        handler.controls.url = server.url
        handler.controls.loopback = ip_address(server.host).is_loopback
        yield ReplayServer(server.host, server.port, server.url, desk)


class ReplayHandler:
    """A handler for `rollout_log.http_server.serve` that answers from a desk."""

    def __init__(self, desk: Desk) -> None:
        self.desk = desk
        self.controls = Controls(desk)

    async def __call__(self, request: Request, responder: Responder) -> None:
        answer = self.controls.answer(request)
        if answer is not None:
            await settle(answer)
            await responder.answer(answer.status, answer.body, [("content-type", answer.content_type)])
            return
        key, hint = request.header(KEY_HEADER), request.header("x-session-id")
        asked = Asked.of(request.method, request.target, request.body, key=key, hint=hint)
        try:
            header = request.header(FAULT_HEADER)
            faults = Faults.parse(header) if header is not None else None
            playback = await self._take(asked, faults)
        except ReplayMiss as miss:
            await self.miss(request, responder, miss)
            return
        except RolloutLogError as error:
            await _refuse(responder, 400, error)
            return
        playback.stalls = True
        try:
            await self._play(playback, responder)
        finally:
            self.desk.leave(playback)

    async def miss(self, request: Request, responder: Responder, miss: ReplayMiss) -> None:
        """Answer what was not recorded."""
        await _refuse(responder, 404, miss)

    async def _take(self, asked: Asked, faults: Faults | None) -> Playback:
        deadline = asyncio.get_running_loop().time() + _PATIENCE_S
        while True:
            late = asyncio.get_running_loop().time() > deadline
            try:
                return self.desk.take(asked, faults=faults, final=late)
            except ReplayMiss as miss:
                if late or not miss.busy:
                    raise
            await asyncio.sleep(0.02)

    async def _play(self, playback: Playback, responder: Responder) -> None:
        script = playback.script
        pieces = play(playback)
        await pieces.head()
        if script.status is not None:
            await responder.start(script.status, script.headers)
        with contextlib.suppress(StopAsyncIteration):
            while True:
                responder.send(*await pieces.due())
                await responder.drain()
        await _end(playback, responder)


async def _end(playback: Playback, responder: Responder) -> None:
    ending = playback.script.ending
    if playback.script.status is None and ending == "eof":
        ending = "cut"
    if ending == "eof":
        await responder.finish()
    elif ending == "reset":
        responder.reset()
    else:
        responder.cut()


async def _refuse(responder: Responder, status: int, error: RolloutLogError) -> None:
    told = {"message": str(error), "type": type(error).__name__, "param": None, "code": status}
    await responder.answer(status, json.dumps({"error": told}).encode(), _JSON)
