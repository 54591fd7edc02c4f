"""A disk that fails: the run goes on, and nothing that was accepted is lost while there is hope."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import sys
import textwrap
import threading
import time
from contextlib import nullcontext

import pytest

from rollout_log.errors import RecordingFailed
from rollout_log.events import Opened, Requested
from rollout_log.log import Log
from rollout_log.log.committer import Committer

REQUEST = Requested(0, 0, "first", "vllm", "POST", "/x", b"{}")


@pytest.fixture
def disk(monkeypatch):
    """A switch: `disk["full"] = True` makes every commit fail."""
    state = {"full": False}
    write = Committer.write

    def writing(self, rows):
        if state["full"]:
            raise OSError(28, "No space left on device")
        return write(self, rows)

    monkeypatch.setattr(Committer, "write", writing)
    monkeypatch.setattr("rollout_log.log.queue.RETRY_S", 0.01)
    return state


async def test_a_commit_that_fails_is_kept_and_tried_again(log, disk, begin, deltas, read):
    sample = begin(log, "key")
    disk["full"] = True
    assert not await log.flush(sample)
    assert not log.accepting
    assert not await log.flush(sample), "waiting for a commit that fails does not hang"
    assert not log.append(sample, 1, [REQUEST])
    assert log.append(sample, 1, deltas(1, 3)), "what is under way is kept while there is room"
    disk["full"] = False
    while not log.accepting:  # noqa: ASYNC110 - the log has no event for it
        await asyncio.sleep(0.005)
    assert log.append(sample, 3, [REQUEST])
    assert await log.flush(sample)
    assert read("key")[1:] == [*deltas(1, 3), REQUEST]
    assert log.counters.dropped_requests == 1


def test_commits_that_go_on_failing_are_told_once(log, disk, begin, caplog):
    begin(log, "key")
    disk["full"] = True
    assert not log.flush_sync()
    while log.counters.failures < 4:
        time.sleep(0.005)
    disk["full"] = False
    while not log.accepting:
        time.sleep(0.005)
    log.close()  # its thread, which wakes who waits before it warns, has ended then
    warned, recovered = caplog.messages
    assert "No space left on device; requests go unrecorded until it works again" in warned
    assert recovered.endswith("records again")


def test_closing_a_log_that_cannot_be_written_says_what_is_lost(path, disk, begin, deltas, caplog):
    log = Log.open(path, window_ms=3_600_000)
    sample = begin(log, "key")
    log.append(sample, 1, deltas(1, 3))
    disk["full"] = True
    log.close()
    assert "closed with 3 events that could not be written" in caplog.text


def test_a_removed_directory_is_a_failure_and_not_a_loss_without_a_word(log, path, begin, deltas, caplog):
    sample = begin(log, "key")
    assert log.flush_sync(sample)
    shutil.rmtree(path)
    assert log.append(sample, 1, deltas(1, 2))
    assert not log.flush_sync(sample)
    assert log.durable(sample) == 1
    log.close()
    assert "is gone" in caplog.text


def test_a_full_disk_stops_the_recording_and_not_the_process(path):
    script = textwrap.dedent("""
        import resource, sys, time
        from rollout_log.events import Delta, Opened, Requested
        from rollout_log.log import Log
        import random

        log = Log.open(sys.argv[1], window_ms=10)
        sample = log.create(Opened("key"))
        log.append(sample, 0, [Opened("key")])
        assert log.flush_sync(sample)
        resource.setrlimit(resource.RLIMIT_FSIZE, (400_000, resource.RLIM_INFINITY))
        at = 1
        while log.accepting:
            at += log.append(sample, at, [Delta(0, random.randbytes(3000))])
            time.sleep(0.002)
        print(log.durable(sample), flush=True)
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        while not log.accepting:
            time.sleep(0.01)
        assert log.flush_sync(sample)
        assert log.durable(sample) == at
        log.close()
        print(at)
    """)
    done = subprocess.run(
        [sys.executable, "-c", script, str(path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    durable, events = map(int, done.stdout.split())
    assert 1 < durable < events
    assert done.stderr.count("cannot write to") == 1

    from rollout_log.log import LogReader
    from rollout_log.log.verify import verify

    assert verify(path).damage == []
    with LogReader.open(path) as reader:
        assert sum(1 for _ in reader.events(reader.find("key"))) == events


@pytest.mark.parametrize("strict", [False, True], ids=["", "strict"])
def test_a_system_that_has_no_thread_to_give_is_asked_again(path, caplog, monkeypatch, strict):
    opened = Opened("key")
    with Log.open(path, strict=strict) as log:
        sample = log.create(opened)
        with monkeypatch.context() as limited:
            limited.setattr(threading.Thread, "start", no_thread)
            for _ in range(2):
                with pytest.raises(RecordingFailed, match="no thread") if strict else nullcontext():
                    assert not log.append(sample, 0, [opened])
        assert log.counters.dropped_events == 2
        assert log.append(sample, 0, [opened])
        assert log.flush_sync(sample, timeout=30)
    assert [record.getMessage() for record in caplog.records] == [
        f"nothing is recorded into {path} for now: no thread is left"
    ]


def no_thread(self):
    raise RuntimeError("no thread is left")
