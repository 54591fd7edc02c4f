"""What a real engine sent is sent again: the same frames to the same client code, and the same samples."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

import httpx
import pytest

from engine.folded import told
from engine.wire import GENERATE, mixture
from rollout_log.events import Delta, Ended, Reads, Requested, Responded
from rollout_log.fold import Rollout
from rollout_log.log import Log, LogReader
from rollout_log.record import Recorder
from rollout_log.replay import ReplayTransport, serve_replay

pytestmark = pytest.mark.engine

REQUESTS = mixture(64)


@pytest.fixture(scope="module")
def recorded(engine, tmp_path_factory) -> Path:
    """A log of 64 streams, all at once."""
    path = tmp_path_factory.mktemp("recorded") / "log"
    asyncio.run(_generate(path, engine.url, httpx.AsyncHTTPTransport(limits=httpx.Limits())))
    return path


async def test_64_streams_through_the_transport_are_the_same_reads_and_samples(recorded, tmp_path):
    transport = ReplayTransport(recorded)
    returned = await _generate(tmp_path / "log", "http://replayed", transport)
    assert transport.report().unused == []
    with LogReader.open(recorded) as reader:
        assert [told(rollout) for rollout in returned] == [told(reader.rollout(key)) for key in REQUESTS]
    assert _exchanges(tmp_path / "log", reads=True) == _exchanges(recorded, reads=True)


async def test_64_streams_through_the_server_are_the_same_frames_and_samples(recorded, tmp_path):
    async with serve_replay(recorded) as server:
        transport = httpx.AsyncHTTPTransport(limits=httpx.Limits())
        returned = await _generate(tmp_path / "log", server.url, transport)
    assert server.report().unused == []
    with LogReader.open(recorded) as reader:
        assert [told(rollout) for rollout in returned] == [told(reader.rollout(key)) for key in REQUESTS]
    assert _exchanges(tmp_path / "log") == _exchanges(recorded)


async def _generate(path: Path, url: str, transport: httpx.AsyncBaseTransport) -> list[Rollout]:
    with contextlib.closing(Log.open(path)) as log:
        async with httpx.AsyncClient(timeout=120.0, transport=transport) as client:
            recorder = Recorder(log, client)
            calls = [recorder.generate(key, url + GENERATE, request) for key, request in REQUESTS.items()]
            return list(await asyncio.gather(*calls))


def _exchanges(path: Path, *, reads: bool = False) -> dict[str, list[object]]:
    """What went over the wire for each sample: the request, the head, the frames, the end, all as bytes."""
    found: dict[str, list[object]] = {}
    with LogReader.open(path) as reader:
        for entry in reader.samples():
            said: list[object] = []
            sizes: list[int] = []
            for _, event in reader.events(entry.ref):
                if isinstance(event, Requested):
                    said.append((event.path, event.body))
                elif isinstance(event, Responded):
                    said.append((event.status, dict(event.headers)["content-type"]))
                elif isinstance(event, Delta):
                    said.append(event.data)
                elif isinstance(event, Ended):
                    said.append(event.how)
                elif isinstance(event, Reads):
                    sizes += event.sizes
            found[entry.name] = [*said, sizes] if reads else said
    return found
