"""The engine's place in one test: replays its recordings, and in the modes that record asks a real engine.

| mode | a request that is recorded | one that is not |
|---|---|---|
| `none` | is replayed | fails the test |
| `once` | is replayed | fails the test, but for a test that has no recording at all: it is recorded |
| `new_episodes` | is replayed | is recorded |
| `all` | is recorded | is recorded, and all of it takes the place of what the test had |
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any, Literal

import httpx

from rollout_log.errors import RolloutLogError
from rollout_log.fixture import FixtureReader
from rollout_log.fixture.memory import MemoryLog
from rollout_log.http_server import Request, Responder, Server, serve
from rollout_log.log import Entry
from rollout_log.record.proxy import Proxy
from rollout_log.record.samples import Samples
from rollout_log.replay import ReplayMiss, ReplayTransport
from rollout_log.replay.asking import Asked
from rollout_log.replay.desk import HELD_S, Desk, Pace
from rollout_log.replay.faults import Faults
from rollout_log.replay.playback import AtCut, Playback
from rollout_log.replay.server import ReplayHandler
from rollout_log.testing.recordings import Recordings
from rollout_log.view import SampleView, view

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["Mode", "StandIn"]

Mode = Literal["none", "once", "new_episodes", "all"]

_REFUSED = frozenset({"http_error", "engine_error", "reset", "timeout", "no_terminal"})
"""Ends of a request that are the engine's doing."""


class StandIn:
    """An engine of recordings, for one test. The server runs in a thread of its own, from its first use."""

    def __init__(
        self,
        recordings: Recordings,
        mode: Mode = "none",
        *,
        upstream: str | None = None,
        pace: Pace = 0,
        at_cut: AtCut = "hold",
        faults: str | None = None,
        hold_s: float | None = HELD_S,
    ) -> None:
        """`pace`, `at_cut`, `hold_s`: as for `serve_replay`; `faults`: what strikes what is replayed."""
        self.recordings = recordings
        self.mode = mode
        self._pool = FixtureReader(recordings.path, []) if mode == "all" else recordings.load()
        empty = not any(True for _ in self._pool.samples())
        self.records = mode in ("all", "new_episodes") or (mode == "once" and empty)
        """Whether a real engine is asked for what is not recorded."""
        if self.records and upstream is None:
            raise RolloutLogError(
                f"mode {mode} records, so it needs an engine: give --rollout-log-upstream http://HOST:PORT"
            )
        if empty and not self.records:
            raise RolloutLogError(
                f"{recordings.path} has no recording for {recordings.test}: record it with "
                "--rollout-log-mode once --rollout-log-upstream http://HOST:PORT, or export it from a log "
                "with `rollout-log export --to fixture`"
            )
        self._upstream = upstream or ""
        self._log = MemoryLog()
        struck = Faults.parse(faults) if faults is not None else None
        self._replay = ReplayTransport(
            self._pool, pace=pace, cut="any", at_cut=at_cut, faults=struck, hold_s=hold_s
        )
        self._replay.desk.tells = False  # `failures` does
        self._thread: _ServerThread | None = None

    @property
    def url(self) -> str:
        """Address of a server that clients of any kind can talk to."""
        return self._server.url

    @property
    def host(self) -> str:
        return self._server.host

    @property
    def port(self) -> int:
        return self._server.port

    @property
    def transport(self) -> Any:
        """A transport for httpx clients, sync or async. When nothing is recorded it opens no socket."""
        return _Redirect(self.url) if self.records else self._replay

    @property
    def client(self) -> httpx.AsyncClient:
        """A new client of the stand-in; paths will do as URLs."""
        return httpx.AsyncClient(transport=self.transport, base_url=self._base, timeout=None)  # noqa: S113

    @property
    def sync_client(self) -> httpx.Client:
        """As `client`, for code without an event loop."""
        return httpx.Client(transport=self.transport, base_url=self._base, timeout=None)  # noqa: S113

    def samples(self) -> list[SampleView]:
        """Return the test's samples: as recorded before, and what it has recorded itself."""
        readers = (self._pool, FixtureReader(self.recordings.path, self._recorded()))
        return [
            view(reader.rollout(entry.ref), name=entry.name)
            for reader in readers
            for entry in reader.samples()
        ]

    @property
    def misses(self) -> list[str]:
        """What was asked for in vain, each with the nearest recording."""
        return [] if self.records else self._replay.report().misses

    @property
    def failures(self) -> list[str]:
        """Why the test fails whatever its client made of it: misses, and responses held for too long."""
        return [*self.misses, *self._replay.desk.held_out]

    @property
    def refusals(self) -> list[str]:
        """What the engine that was asked refused, or did not finish, each with what it said."""
        recorded = FixtureReader(self.recordings.path, self._recorded())
        found = []
        for entry in recorded.samples():
            rollout = recorded.rollout(entry.ref)
            for request in rollout.requests:
                ended = rollout.ended_of(request)
                if ended not in _REFUSED:
                    continue
                what = f"HTTP {request.http_status}" if ended == "http_error" else ended
                said = request.error or request.detail
                found.append(
                    f"{self._upstream} answered {request.path} with {what}" + (f": {said}" if said else "")
                )
        return found

    def used(self) -> dict[str, bool]:
        """Return the names of the recordings, and whether each was asked for."""
        unused = set(self._replay.report().unused)
        return {self._name(entry): entry.name not in unused for entry in self._pool.samples()}

    def close(self, *, save: bool = True) -> None:
        """End the server, and write what was recorded to the file."""
        if self._thread is not None:
            self._thread.stop()
            self._thread = None
        if save and (recorded := self._recorded()):
            self.recordings.save(recorded, instead=self.mode == "all")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _name(self, entry: Entry) -> str:
        """Name a recording so that no other test's of the same file is meant."""
        test = self.recordings.test
        alone = entry.ref.run != test or entry.name.startswith(test)
        return entry.name if alone else f"{test}: {entry.name}"

    @property
    def _base(self) -> str:
        return self.url if self.records else "http://recorded"

    @property
    def _server(self) -> Server:
        if self._thread is None:
            self._thread = _ServerThread(self._serve)
        return self._thread.server

    @contextlib.asynccontextmanager
    async def _serve(self) -> AsyncIterator[Server]:
        if not self.records:
            handler = ReplayHandler(self._replay.desk)
            async with serve(handler) as server:
                handler.controls.url = server.url
                yield server
            return
        proxy = Proxy(Samples(self._log.as_log()), self._upstream)
        try:
            replays = self.mode == "new_episodes"
            async with serve(_ReplayOrAsk(self._replay.desk, proxy) if replays else proxy) as server:
                yield server
        finally:
            await proxy.aclose()

    def _recorded(self) -> list[Any]:
        return [events for events in self._log.samples if events]


class _ReplayOrAsk(ReplayHandler):
    """Replays what is recorded, and asks a real engine for the rest."""

    def __init__(self, desk: Desk, proxy: Proxy) -> None:
        super().__init__(desk)
        self._proxy = proxy

    async def miss(self, request: Request, responder: Responder, miss: ReplayMiss) -> None:
        await self._proxy(request, responder)

    async def _take(self, asked: Asked, faults: Faults | None) -> Playback:
        return self.desk.take(asked, faults=faults, final=False)


class _Redirect(httpx.BaseTransport, httpx.AsyncBaseTransport):
    """Sends every request to one server, whatever its URL says; keeps no connection."""

    def __init__(self, url: str) -> None:
        self._url = httpx.URL(url)
        limits = httpx.Limits(max_keepalive_connections=0)
        self._sync = httpx.HTTPTransport(limits=limits, verify=False, trust_env=False)
        self._async = httpx.AsyncHTTPTransport(limits=limits, verify=False, trust_env=False)

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        self._redirect(request)
        return self._sync.handle_request(request)

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        self._redirect(request)
        return await self._async.handle_async_request(request)

    def _redirect(self, request: httpx.Request) -> None:
        request.url = request.url.copy_with(scheme="http", host=self._url.host, port=self._url.port)


class _ServerThread:
    """Runs a server beside the test, whose event loop may stand still, or not exist."""

    def __init__(self, serve: Any) -> None:
        self._serve = serve
        self._ready = threading.Event()
        self._server: Server | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="rollout-log stand-in", daemon=True)
        self._thread.start()

    @property
    def server(self) -> Server:
        self._ready.wait()
        if self._server is None:
            raise RolloutLogError(f"the stand-in could not be started: {self._error}") from self._error
        return self._server

    def stop(self) -> None:
        if self._server is not None:
            self._loop.call_soon_threadsafe(self._done.set)
        self._thread.join(10)

    def _run(self) -> None:
        try:
            asyncio.run(self._main())
        except BaseException as error:
            self._error = error
        finally:
            self._ready.set()

    async def _main(self) -> None:
        self._loop, self._done = asyncio.get_running_loop(), asyncio.Event()
        async with self._serve() as server:
            self._server = server
            self._ready.set()
            await self._done.wait()
