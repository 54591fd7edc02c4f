"""What is put off until a coroutine waits."""

from __future__ import annotations

import asyncio

import pytest

from rollout_log.record.bursts import before_waits


async def test_it_settles_before_every_wait_and_at_no_other_time():
    happened: list[str] = []

    async def work() -> str:
        for name in "ab":
            happened.append(name)
            happened.append(name)
            await asyncio.sleep(0)
        happened.append("end")
        return "done"

    assert await before_waits(work(), lambda: happened.append("settle")) == "done"
    assert happened == ["a", "a", "settle", "b", "b", "settle", "end"]


async def test_nothing_else_runs_between_the_work_and_its_settling():
    pending: list[int] = []
    seen: list[int] = []

    async def watch() -> None:
        while True:
            seen.append(len(pending))
            await asyncio.sleep(0)

    async def work() -> None:
        for number in range(5):
            pending.append(number)
            await asyncio.sleep(0)

    watcher = asyncio.create_task(watch())
    await before_waits(work(), pending.clear)
    watcher.cancel()
    assert len(seen) >= 5
    assert not any(seen)


async def test_what_settling_raises_is_raised_in_the_work():
    closed = []

    def settle() -> None:
        if not closed:
            raise ValueError("refused")

    async def work() -> None:
        try:
            await asyncio.sleep(20)
        finally:
            closed.append(True)
            await asyncio.sleep(0)

    with pytest.raises(ValueError, match="refused"):
        await before_waits(work(), settle)
    assert closed


async def test_a_cancellation_reaches_the_work():
    ended = []

    async def work() -> None:
        try:
            await asyncio.sleep(20)
        except asyncio.CancelledError:
            await asyncio.sleep(0)
            ended.append("cancelled")
            raise

    task = asyncio.create_task(before_waits(work(), lambda: None))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended == ["cancelled"]


async def test_the_work_may_go_on_after_a_cancellation():
    async def work() -> str:
        try:
            await asyncio.sleep(20)
        except asyncio.CancelledError:
            await asyncio.sleep(0)
        return "finished all the same"

    task = asyncio.create_task(before_waits(work(), lambda: None))
    await asyncio.sleep(0)
    task.cancel()
    assert await task == "finished all the same"
