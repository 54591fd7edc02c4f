"""Disks that fill, slow down, refuse or go away while a recorder records: the tokens come all the same."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from raw_server import RawStream, play
from recorded import PATH, frame
from rollout_log.errors import RecordingFailed
from rollout_log.events import Opened
from rollout_log.fold import Rollout
from rollout_log.log import Log, LogReader
from rollout_log.log.committer import Committer
from rollout_log.log.keeper import Plan, run_child
from rollout_log.log.verify import verify
from rollout_log.record import Recorder

TOKENS = list(range(1, 9))


def answer(padding: int = 0) -> RawStream:
    """Eight tokens, and frames as large as wanted that do not compress."""
    noise = b": " + os.urandom(padding // 2).hex().encode() + b"\n"
    frames = [noise + frame(token, finish="stop" if token == TOKENS[-1] else None) for token in TOKENS]
    return RawStream(body=b"".join(frames))


async def record(log: Log, keys: list[str], padding: int = 0) -> list[Rollout]:
    """Generate for keys, all at once."""
    body = {"token_ids": [1, 2], "sampling_params": {"logprobs": 1, "max_tokens": 100}}
    async with play(choose=lambda _: answer(padding)) as engine, httpx.AsyncClient(timeout=None) as client:
        recorder = Recorder(log, client)
        calls = (recorder.generate(key, engine.url + PATH, body) for key in keys)
        return await asyncio.gather(*calls)


def check(rollouts: list[Rollout]) -> None:
    """Assert that the consumer got everything."""
    assert [rollout.choice().token_ids for rollout in rollouts] == [TOKENS] * len(rollouts)
    assert {rollout.status for rollout in rollouts} == {"completed"}


def recorded(path: Path) -> dict[str, Rollout]:
    with LogReader.open(path) as reader:
        return {entry.summary.key: reader.rollout(entry.ref) for entry in reader.samples()}


def run(*command: object) -> str:
    """Run what may not be allowed or installed here; the test is skipped then."""
    try:
        done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
    except FileNotFoundError:
        pytest.skip(f"{command[0]} is not installed here")
    if done.returncode or "failed" in done.stderr:
        pytest.skip(f"{command[0]} does not work here: {done.stderr.strip()}")
    return done.stdout.strip()


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> dict[str, bool]:
    """A switch for commits that fail."""
    state = {"on": False}
    write = Committer.write

    def writing(self: Committer, rows: list) -> int:
        if state["on"]:
            raise OSError(28, "No space left on device")
        return write(self, rows)

    monkeypatch.setattr(Committer, "write", writing)
    monkeypatch.setattr("rollout_log.log.queue.RETRY_S", 0.01)
    return state


async def test_a_sample_that_goes_on_once_there_is_room_says_what_it_lacks(tmp_path, failing, caplog):
    log = Log.open(tmp_path / "log", window_ms=10)
    body = {"token_ids": [1, 2], "sampling_params": {"logprobs": 1, "max_tokens": 100}}
    half = RawStream(body=frame(11) + frame(12) + frame(13, finish="abort"))
    rest = RawStream(body=frame(14, finish="stop"))
    async with play(half, rest) as engine, httpx.AsyncClient() as client:
        recorder = Recorder(log, client)
        failing["on"] = True
        probe = log.create(Opened("probe"))
        log.append(probe, 0, [Opened("probe")])
        assert not await log.flush(probe)
        first = await recorder.generate("k", engine.url + PATH, body)
        assert (first.status, first.choice().token_ids) == ("aborted", [11, 12, 13])
        failing["on"] = False
        while not log.accepting:  # noqa: ASYNC110 - the log has no event for it
            await asyncio.sleep(0.005)
        again = {**body, "token_ids": [1, 2, 11, 12, 13]}
        second = await recorder.generate("k", engine.url + PATH, again)
    assert second.choice().token_ids == [11, 12, 13, 14]
    log.close()
    found = recorded(tmp_path / "log")["k"]
    assert found.choice().token_ids == [11, 12, 13, 14]
    assert [run.origin.name for run in found.choice().runs] == ["UNRECORDED", "GENERATED"]
    assert "log_gap" in [problem.code for problem in found.problems]
    assert len([message for message in caplog.messages if "cannot write" in message]) == 1


@pytest.mark.parametrize("streams", [4, pytest.param(64, marks=pytest.mark.campaign)])
async def test_a_disk_that_takes_two_seconds_delays_nobody(tmp_path, monkeypatch, streams):
    """Each finished request goes on after 100 ms, counted; what was late is there at the end."""
    write = Committer.write

    def slow(self: Committer, rows: list) -> int:
        time.sleep(2)
        return write(self, rows)

    monkeypatch.setattr(Committer, "write", slow)
    log = Log.open(tmp_path / "log", window_ms=10)
    check(await record(log, [f"k{n}" for n in range(streams)]))
    assert log.counters.late_flushes == streams, "nobody has waited for a commit of two seconds"
    assert log.accepting
    log.close()
    found = recorded(tmp_path / "log")
    assert len(found) == streams
    check(list(found.values()))


async def test_a_directory_that_is_removed_stops_the_recording_alone(tmp_path, caplog):
    log = Log.open(tmp_path / "log", window_ms=10)
    check(await record(log, ["before"]))
    shutil.rmtree(tmp_path / "log")
    check(await record(log, ["after-1", "after-2"]))
    check(await record(log, ["after-3"]))
    log.close()
    assert len([message for message in caplog.messages if "cannot write" in message]) == 1
    assert not (tmp_path / "log").exists()


@pytest.fixture
def read_only(tmp_path: Path) -> Iterator[Callable[[], None]]:
    """Makes the log read-only; root, who may write anywhere, by mounting it upon itself."""
    path = tmp_path / "log"

    def make() -> None:
        if os.geteuid():
            for folder in (path, *path.iterdir()):
                folder.chmod(0o500)
        else:
            run("mount", "--bind", path, path)
            run("mount", "-o", "remount,bind,ro", path)

    yield make
    if not os.geteuid():
        subprocess.run(["umount", "-l", str(path)], check=False)
    for folder in (path, *path.iterdir()):
        folder.chmod(0o700)


async def test_a_directory_that_becomes_read_only_keeps_its_open_file(tmp_path, read_only, caplog):
    log = Log.open(tmp_path / "log", window_ms=10)
    check(await record(log, ["before"]))
    read_only()
    check(await record(log, ["after"]))
    log.rotate()
    check(await record(log, ["in the old segment"]))
    log.close()
    assert [message for message in caplog.messages if "no new segment" in message] == caplog.messages
    assert len(caplog.messages) == 1
    found = recorded(tmp_path / "log")
    assert len(found) == 3
    check(list(found.values()))


async def test_a_directory_that_is_read_only_is_said_at_once(tmp_path, read_only):
    Log.open(tmp_path / "log").close()
    read_only()
    with pytest.raises(RecordingFailed, match=r"cannot record into .*; give a local directory"):
        Log.open(tmp_path / "log")


async def test_a_map_that_is_full_grows_beneath_many_streams(tmp_path, monkeypatch):
    monkeypatch.setattr("rollout_log.log.environment.MAP_SIZE", 1 << 20)
    monkeypatch.setattr("rollout_log.log.environment._MAP_LEAST", 1 << 16)
    log = Log.open(tmp_path / "log", window_ms=10)
    check(await record(log, [f"k{n}" for n in range(16)], padding=60_000))
    log.close()
    assert log.counters.bytes > 3 << 20
    assert log.counters.failures == 0
    found = recorded(tmp_path / "log")
    assert len(found) == 16
    check(list(found.values()))


CRAMPED = textwrap.dedent("""
    import asyncio, resource, sys
    sys.path.insert(0, sys.argv[2])
    resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
    from campaigns.test_disk import check, record
    from rollout_log.log import Log

    with Log.open(sys.argv[1], window_ms=10) as log:
        check(asyncio.run(record(log, [f"k{n}" for n in range(8)], padding=60_000)))
        print(log._committer._segment._environment._env.info()["map_size"], log.counters.failures)
""")


def test_a_process_with_little_address_space_has_a_smaller_map(tmp_path):
    tests = Path(__file__).parent.parent
    done = subprocess.run(
        [sys.executable, "-c", CRAMPED, tmp_path / "log", tests], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    size, failures = map(int, done.stdout.split())
    assert 1 << 20 <= size < 1 << 30
    assert failures == 0
    check(list(recorded(tmp_path / "log").values()))


FILLING = textwrap.dedent("""
    import asyncio, json, logging, os, resource, sys
    sys.path.insert(0, sys.argv[2])
    logging.basicConfig(format="%(message)s")
    from campaigns.test_disk import answer, check, record
    from rollout_log.log import Log

    async def main():
        log = Log.open(sys.argv[1], window_ms=10, max_bytes=1 << 40)  # the cap would make room
        if sys.argv[3] != "0":
            resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[3]), resource.RLIM_INFINITY))
        rounds = 0
        while log.accepting:
            check(await record(log, [f"{rounds}-{n}" for n in range(4)], padding=30_000))
            rounds += 1
        full = rounds
        check(await record(log, [f"{rounds}-{n}" for n in range(4)]))
        if sys.argv[3] != "0":
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        else:
            os.unlink(sys.argv[4])
        while not log.accepting:
            await asyncio.sleep(0.05)
        check(await record(log, ["last"]))
        counters = log.counters
        log.close()
        print(json.dumps([full, counters.dropped_requests, counters.failures, counters.dropped_events]))

    asyncio.run(main())
""")


def fill(log: Path, limit: int, ballast: Path | None = None) -> None:
    """Record until the disk is full, go on, make room, and look at what is there."""
    tests = Path(__file__).parent.parent
    done = subprocess.run(
        [sys.executable, "-c", FILLING, log, tests, str(limit), str(ballast)],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stderr.count("cannot write to") == 1
    assert done.stderr.count("records again") == 1
    assert verify(log).damage == []
    found = recorded(log)
    check([found["last"]])
    whole = [rollout for rollout in found.values() if rollout.status == "completed"]
    assert {tuple(rollout.choice().token_ids) for rollout in whole} == {tuple(TOKENS)}
    assert len(whole) >= 2


def test_a_file_that_may_not_grow(tmp_path):
    fill(tmp_path / "log", 600_000)


@pytest.fixture
def tmpfs(tmp_path: Path) -> Iterator[Path]:
    """A file system of 8 MB."""
    path = tmp_path / "tmpfs"
    path.mkdir()
    run("mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", path)
    yield path
    subprocess.run(["umount", "-l", str(path)], check=True)


@pytest.fixture
def exfat(tmp_path: Path) -> Iterator[Path]:
    """A file system of 8 MB without sparse files, links and modes (Debian: exfat-fuse, exfatprogs)."""
    path, image = tmp_path / "exfat", tmp_path / "image"
    path.mkdir()
    image.write_bytes(bytes(8 << 20))
    run("mkfs.exfat", image)
    device = run("losetup", "--show", "-f", image)
    try:
        run("mount.exfat-fuse", device, path)
        yield path
        subprocess.run(["umount", "-l", str(path)], check=True)
    finally:
        subprocess.run(["losetup", "-d", device], check=True)


async def test_a_file_system_without_sparse_files_links_and_modes(exfat):
    log = Log.open(exfat / "log", window_ms=10)
    check(await record(log, [f"k{n}" for n in range(8)]))
    log.rotate()
    check(await record(log, [f"l{n}" for n in range(8)]))
    assert os.statvfs(exfat).f_bfree * 4096 > 5 << 20, "a map of a terabyte takes no disk"
    log.close()
    assert log.counters.failures == 0
    for _ in run_child(Plan(exfat / "log" / log.writer)):
        pass
    assert verify(exfat / "log").damage == []
    found = recorded(exfat / "log")
    assert len(found) == 16
    check(list(found.values()))


@pytest.mark.parametrize("small_disk", ["tmpfs", pytest.param("exfat", marks=pytest.mark.campaign)])
def test_a_small_file_system_that_fills(request, small_disk):
    disk: Path = request.getfixturevalue(small_disk)
    ballast = disk / "ballast"
    ballast.write_bytes(bytes(4 << 20))
    fill(disk / "log", 0, ballast)
