"""What an actor of a trainer does: records in a process of its own into the log that all of them share."""

from __future__ import annotations

import asyncio
import os

import httpx

from rollout_log.events import Opened
from rollout_log.fold import Rollout
from rollout_log.log import Log
from rollout_log.record import Call, Recorder
from rollout_log.record.retry import Backoff
from rollout_log.record.samples import Samples


class Actor:
    """Its configuration and the arguments and results of its methods travel; the log it opens stays."""

    def __init__(self, log: str, window_ms: int) -> None:
        self.log = Log.open(log, window_ms=window_ms)
        self.samples = Samples(self.log)

    async def pid(self) -> int:
        return os.getpid()

    async def generate(self, calls: list[Call], most: int | None = None) -> list[Rollout]:
        """Serve calls together; abort each once `most` tokens were read."""
        async with httpx.AsyncClient(timeout=None) as client:
            recorder = Recorder(self.log, client, samples=self.samples, backoff=Backoff(0.01, 0.01))
            return await asyncio.gather(*(self._one(recorder, call, most) for call in calls))

    async def go_on(self, call: Call, opened: Opened, older: Rollout) -> Rollout:
        """Serve a call for a sample that another actor left."""
        self.samples.adopt(opened, older, older.length, path=older.requests[-1].path, model=None)
        return (await self.generate([call]))[0]

    async def give_handle(self) -> Log:
        return self.log

    async def _one(self, recorder: Recorder, call: Call, most: int | None) -> Rollout:
        if most is not None:
            read = bytearray()
            call.on_chunk = read.extend
            call.should_stop = lambda: read.count(b'"token_ids"') >= most
        return await recorder.run(call)
