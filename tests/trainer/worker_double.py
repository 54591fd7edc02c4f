"""A fully asynchronous rollout: a worker generates on and on, in a thread with its own event loop.

    with Worker(trainer) as worker:
        samples = worker.step(0)

The worker keeps a few groups running or done, across steps and weight updates; a step takes what is done. A
group that comes back aborted goes to the data source, and is generated again from there.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from typing import Any

from trainer.checks import WatchedLoop
from trainer.sample_double import Sample, Status
from trainer.trainer_double import TrainerDouble

__all__ = ["Worker"]


class Worker:
    def __init__(self, trainer: TrainerDouble, running: int = 3) -> None:
        self.trainer = trainer
        self.running = running
        self.requeued = 0
        self._done: queue.Queue[list[Any]] = queue.Queue()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Worker:  # noqa: PYI034 - `Self` came with Python 3.11
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._thread.join(30)
        assert not self._thread.is_alive()

    def step(self, rollout_id: int) -> list[Sample]:
        """Take as many groups as a step has."""
        trainer = self.trainer
        trainer.hooks.set_current_rollout_id(rollout_id)
        samples: list[Sample] = []
        groups = 0
        while groups < trainer.args.rollout_batch_size:
            group = self._done.get(timeout=trainer.timeout)
            if any(sample.status is Status.ABORTED for sample in group):
                self.requeued += 1
                trainer.data_source.add_samples([group])
            else:
                groups += 1
                samples += group
        return samples

    def _run(self) -> None:
        loop = WatchedLoop()
        loop.on_tick = self.trainer.watch.look
        loop.run_until_complete(self._work())
        loop.close()

    async def _work(self) -> None:
        trainer = self.trainer
        trainer.http.init_http_client(trainer.args)
        tasks: set[asyncio.Task[Any]] = set()
        while tasks or not self._stopped.is_set():
            ahead = self._done.qsize()
            while len(tasks) + ahead < 2 * self.running and not self._stopped.is_set():
                (group,) = trainer.data_source.get_samples(1)
                tasks.add(asyncio.create_task(trainer.generate_group(group)))
            if not tasks:
                await asyncio.sleep(0.01)
                continue
            done, tasks = await asyncio.wait(tasks, timeout=0.05, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                self._done.put(task.result())
        await trainer.http._http_client.aclose()
        trainer.http._http_client = None
