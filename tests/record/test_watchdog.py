"""When a stream stands still, and who is told."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable
from time import monotonic

import pytest

from rollout_log.record.watchdog import Watchdog

LIMIT = 0.05


async def watched(
    healthy: Callable[[], Awaitable[bool]] | None = None,
    stop: Callable[[], bool] | None = None,
    *,
    touched: bool = True,
    seconds: float = 20.0,
) -> str | None:
    """Sleep under a watchdog; return what it fired for."""
    begun = monotonic()
    watchdog = Watchdog(LIMIT, lambda: begun if touched else None, healthy=healthy, stop=stop)
    watchdog.start()
    try:
        await asyncio.sleep(seconds)
    except asyncio.CancelledError:
        assert watchdog.absorb()
    finally:
        watchdog.close()
    return watchdog.fired


async def test_it_fires_after_the_limit():
    assert await watched() == "timeout"


async def test_it_does_not_fire_before_the_first_read():
    assert await watched(touched=False, seconds=6 * LIMIT) is None


async def test_health_is_asked_once_and_grants_one_more_limit():
    asked = []

    async def healthy() -> bool:
        asked.append(True)
        return True

    assert await watched(healthy) == "timeout"
    assert len(asked) == 1


@pytest.mark.parametrize("error", [None, RuntimeError("the client is closed")])
async def test_without_health_it_fires(error):
    async def healthy() -> bool:
        if error is not None:
            raise error
        return False

    assert await watched(healthy) == "timeout"


async def test_a_read_while_health_is_asked_counts():
    asked = asyncio.Event()

    async def healthy() -> bool:
        asked.set()
        reads.append(monotonic() + 60.0)
        return False

    reads = [monotonic()]
    watchdog = Watchdog(LIMIT, lambda: reads[-1], healthy=healthy)
    watchdog.start()
    await asked.wait()
    await asyncio.sleep(3 * LIMIT)
    watchdog.close()
    assert watchdog.fired is None


async def test_health_is_asked_again_of_a_stream_that_went_on_in_between():
    asked: list[float] = []

    async def healthy() -> bool:
        asked.append(monotonic())
        if len(asked) < 3:
            reads.append(monotonic() + LIMIT)  # it goes on a moment later
        return True

    reads = [monotonic()]
    watchdog = Watchdog(LIMIT, lambda: reads[-1], healthy=healthy)
    watchdog.start()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.sleep(20)
    watchdog.absorb()
    watchdog.close()
    assert len(asked) == 3, "and granted once for each time it stood still"


async def test_a_finished_stream_may_linger_ten_seconds(monkeypatch):
    monkeypatch.setattr("rollout_log.record.watchdog.LINGER_S", 3 * LIMIT)
    begun, asked = monotonic(), []

    def finished() -> bool:
        asked.append(monotonic())
        return len(asked) > 1

    watchdog = Watchdog(60.0, lambda: begun, finished=finished, interval=LIMIT)
    watchdog.start()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.sleep(20)
    assert watchdog.absorb()
    watchdog.close()
    assert watchdog.fired == "timeout"
    assert watchdog.verdict() == ("timeout", f"no bytes for {3 * LIMIT:g} s")
    assert asked[0] - begun >= LIMIT, "asked where nothing came for a while"
    assert asked[-1] - begun >= 3 * LIMIT


async def test_the_run_can_stop_while_health_is_asked():
    asked = asyncio.Event()

    async def healthy() -> bool:
        asked.set()
        await asyncio.sleep(60)
        return True

    assert await watched(healthy, asked.is_set) == "stopped"


async def test_a_cancellation_by_somebody_else_is_not_its_own():
    watchdog = Watchdog(60.0, lambda: None)
    watchdog.start()
    assert not watchdog.absorb()
    watchdog.close()


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 does not count cancellations")
async def test_a_cancellation_by_somebody_else_in_the_same_tick_is_not_absorbed():
    absorbed = []

    async def work() -> None:
        watchdog = Watchdog(60.0, lambda: None)
        watchdog.start()
        task = asyncio.current_task()
        assert task is not None
        watchdog.fire("timeout")
        task.cancel()  # by somebody else
        try:
            await asyncio.sleep(20)
        except asyncio.CancelledError:
            absorbed.append(watchdog.absorb())
            raise
        finally:
            watchdog.close()

    task = asyncio.create_task(work())
    with pytest.raises(asyncio.CancelledError):
        await task
    assert absorbed == [False]
