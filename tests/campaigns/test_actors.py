"""Actors: spawned processes that record into one log each with a recorder of its own, as under Ray.

What they are made of and what they are asked travels by pickle, and so does what they answer: calls,
rollouts, errors. Handles do not.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import pickle
import signal
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import pytest

from campaigns.actors import Actor
from record.test_kill import LENGTH, stream, token
from recorded import PATH
from rollout_log.events import Opened
from rollout_log.http_server import Request, Responder, serve
from rollout_log.log import Log, LogReader
from rollout_log.log.directory import writers_of
from rollout_log.log.verify import verify
from rollout_log.record import Call, GenerationRefused
from rollout_log.view import view

Ask = Callable[..., Awaitable[Any]]
"""`await ask(method, *arguments)` of one actor."""
_actor: Actor


def _begin(arguments: bytes) -> None:
    global _actor
    _actor = Actor(*pickle.loads(arguments))


def _call(method: str, arguments: tuple[Any, ...]) -> Any:
    return asyncio.run(getattr(_actor, method)(*arguments))


class Spawned:
    """Actors of multiprocessing."""

    def __init__(self) -> None:
        self._pools: list[ProcessPoolExecutor] = []

    def start(self, *arguments: object) -> Ask:
        pool = ProcessPoolExecutor(
            1, multiprocessing.get_context("spawn"), initializer=_begin, initargs=(pickle.dumps(arguments),)
        )
        self._pools.append(pool)
        return lambda method, *given: asyncio.wrap_future(pool.submit(_call, method, given))

    def stop(self) -> None:
        for pool in self._pools:
            pool.shutdown()


@pytest.fixture
def spawned() -> Iterator[Spawned]:
    actors = Spawned()
    yield actors
    actors.stop()


async def engine(request: Request, responder: Responder) -> None:
    if request.path == "/generate":
        await responder.answer(404, b"{}")
    else:
        await stream(request, responder)


def call(key: str, url: str, prompt: list[int], kept: list[int] | None = None) -> Call:
    body = {"token_ids": [*prompt, *(kept or [])], "sampling_params": {"max_tokens": 50, "logprobs": 1}}
    return Call(key=key, url=url, body=body, opened=Opened(key=key, step=3, metadata={"prompt": prompt}))


async def record_with(start: Callable[..., Ask], stop: Callable[[], None], died: type, path: Path) -> None:
    """Three actors record; one is killed in mid-stream, and another one goes on with what it left."""
    async with serve(engine) as server:
        url = server.url + PATH
        first, second, third = (start(str(path), 20) for _ in range(3))
        asked = (
            ask("generate", [call(f"{name}-{n}", url, [name, n]) for n in range(4)])
            for name, ask in enumerate((first, second))
        )
        rollouts = [rollout for answers in await asyncio.gather(*asked) for rollout in answers]

        (aborted,) = await first("generate", [call("moves", url, [7, 7])], 5)
        assert aborted.status == "aborted"
        kept = aborted.choice().token_ids
        moved = await second("go_on", call("moves", url, [7, 7], kept), Opened(key="moves"), aborted)

        with pytest.raises(
            GenerationRefused, match="sample 'wrong': the engine refused: HTTP 404"
        ) as refused:
            await first("generate", [call("wrong", server.url + "/generate", [1, 1])])
        assert refused.value.rollout.status == "failed"
        with pytest.raises(Exception, match="is open in this process alone: pass its path on"):
            await first("give_handle")

        await third("generate", [call("dies", url, [9, 9])], 4)
        os.kill(await third("pid"), signal.SIGKILL)
        with pytest.raises(died):
            await third("generate", [call("never", url, [1, 1])])
        with LogReader.open(path) as reader:
            left = reader.rollout("dies")
        heir = start(str(path), 20)
        again = call("dies", url, [9, 9], left.choice().token_ids)
        rescued = await heir("go_on", again, Opened(key="dies"), left)
        stop()

    assert verify(path).damage == []
    assert len(writers_of(path)) == 4
    with LogReader.open(path) as reader:
        for rollout in [*rollouts, moved, rescued]:
            prompt = rollout.prompt_token_ids
            assert rollout.choice().token_ids == [token(prompt, place) for place in range(LENGTH)]
            assert view(reader.rollout(rollout.opened.key)) == view(rollout), (
                "what came back is what is there"
            )
        assert view(reader.rollout("moves@0")) == view(aborted)
        assert reader.rollout("moves").opened.continues == (0, len(kept))
        assert pickle.loads(pickle.dumps(reader)).find("moves") == reader.find("moves")


async def test_spawned_actors(spawned, tmp_path):
    await record_with(spawned.start, spawned.stop, BrokenProcessPool, tmp_path / "log")


@pytest.mark.campaign
@pytest.mark.filterwarnings("ignore")  # what Ray warns of is its own
async def test_actors_of_ray(tmp_path, monkeypatch):
    ray = pytest.importorskip("ray", reason="pip install ray")
    paths = os.pathsep.join([str(Path(__file__).parent.parent), str(Path(__file__).parent.parent.parent)])
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")  # else it leaves a token in the home directory
    ray.init(
        num_cpus=4,
        include_dashboard=False,
        log_to_driver=False,
        runtime_env={"env_vars": {"PYTHONPATH": paths}},
    )
    made = []

    def start(*arguments: object) -> Ask:
        actor = ray.remote(Actor).remote(*arguments)
        made.append(actor)
        return lambda method, *given: getattr(actor, method).remote(*given)

    def stop() -> None:
        for actor in made:
            actor.__ray_terminate__.remote()

    try:
        await record_with(start, stop, ray.exceptions.RayActorError, tmp_path / "log")
    finally:
        ray.shutdown()


def test_a_handle_is_not_pickled(tmp_path):
    with Log.open(tmp_path / "log") as log, pytest.raises(TypeError, match="pass its path on"):
        pickle.dumps(log)
