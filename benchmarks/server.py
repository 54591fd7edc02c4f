"""A paced engine in a process of its own: `with engine() as url: …`.

`POST {url}/inference/v1/generate?tokens=N&chunk=K&rate=R&turn=T` streams N frames of one token, K a chunk and
R chunks a second (0: as fast as the client reads), the last of them with a finish reason. Streams of a turn
stand still while it is another's: `GET {url}/turn?turn=T` says whose it is.
"""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import cycle
from urllib.parse import parse_qs, urlsplit

from benchmarks.frames import chunks, frames
from rollout_log.http_server import Request, Responder, serve

__all__ = ["engine"]

FINISH = frames()[0].replace(b'"finish_reason":null', b'"finish_reason":"length"')
LAST = b"data: %b\n\ndata: [DONE]\n\n" % FINISH


class Turns:
    """Whose turn it is to get anything."""

    def __init__(self) -> None:
        self._turns: dict[str, asyncio.Event] = {}

    def of(self, name: str) -> asyncio.Event:
        """Return the event that is set while it is this turn; set for the turn without a name."""
        event = self._turns.setdefault(name, asyncio.Event())
        if not name:
            event.set()
        return event

    def pass_to(self, name: str) -> None:
        """Let only this turn's streams go on."""
        for event in self._turns.values():
            event.clear()
        self.of(name).set()

    async def answer(self, request: Request, responder: Responder) -> None:
        """Stream what the query asks for."""
        asked = {name: values[0] for name, values in parse_qs(urlsplit(request.target).query).items()}
        if "tokens" not in asked:
            if "turn" in asked:
                self.pass_to(asked["turn"])
            await responder.answer(200, b"")
            return
        left, each, rate = int(asked["tokens"]), int(asked["chunk"]), float(asked.get("rate", 0))
        turn = self.of(asked.get("turn", ""))
        await responder.start(200, [("content-type", "text/event-stream")])
        for chunk in cycle(chunks(each)):
            if not turn.is_set():
                await turn.wait()
            if rate:
                await asyncio.sleep(random.uniform(0.5, 1.5) / rate)
            left -= each
            if left <= 0:
                responder.send(chunk + LAST)
                break
            responder.send(chunk)
            if not rate:
                await responder.drain()
        await responder.finish()


async def main() -> None:
    """Serve until the parent closes our standard input."""
    async with serve(Turns().answer) as server:
        print(server.url, flush=True)
        await asyncio.to_thread(sys.stdin.read)


@contextmanager
def engine() -> Iterator[str]:
    """Run the server beside this process; yields its URL."""
    command = [sys.executable, "-m", "benchmarks.server"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield process.stdout.readline().strip()
    finally:
        process.communicate()


if __name__ == "__main__":
    asyncio.run(main())
