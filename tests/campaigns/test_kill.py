"""`kill -9` of recording processes, alone and in pairs, and of readers in mid-read."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import defaultdict
from hashlib import sha256
from pathlib import Path

import pytest

from record.test_kill import LENGTH, stream, token
from recorded import Writer, frame
from rollout_log.http_server import serve
from rollout_log.log import LogReader
from rollout_log.log.directory import segments_of, writers_of
from rollout_log.log.verify import _Answer, verify
from rollout_log.log.verify_segment import main

HERE = Path(__file__).parent
Told = list[tuple[str, list[str]]]
"""What each writer of a log said before it died."""


@pytest.fixture(autouse=True)
def verify_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Walk segments in this process, not in one each: a kill leaves nothing that LMDB dies of."""

    def ask(segment: Path) -> _Answer:
        with contextlib.redirect_stdout(io.StringIO()) as said:
            main(str(segment))
        return _Answer(segment, said.getvalue().encode())

    monkeypatch.setattr("rollout_log.log.verify._ask", ask)


def check_said(log: Path, told: Told) -> tuple[int, int]:
    """Hold what a log has against what its killed writers said. Returns samples found, and returned ones."""
    assert verify(log).damage == []
    found = {}
    with LogReader.open(log) as reader:
        for entry in reader.samples():
            rollout = found[entry.summary.key] = reader.rollout(entry.ref)
            prompt, tokens = rollout.prompt_token_ids, rollout.choice().token_ids
            assert tokens == [token(prompt, position) for position in range(len(tokens))]
            assert not [problem for problem in rollout.problems if problem.severity == "error"]
    returned = 0
    for _, said in told:
        late = {line.split()[1] for line in said if line.startswith("L ")}
        durable: dict[str, int] = defaultdict(int)
        for kind, key, *count in (line.split() for line in said):
            if kind == "D":
                durable[key] = max(durable[key], int(count[0]))
            if kind == "R" and key not in late:
                returned += 1
                assert (found[key].length, found[key].status) == (LENGTH, "completed")
                assert int(count[0]) == LENGTH
        for key, events in durable.items():
            assert events == 0 or found[key].events >= events
    return len(found), returned


async def kill_writers(folder: Path, first: int, end: int, writers: int) -> dict[Path, Told]:
    async with serve(stream) as server:
        url = server.url + "/inference/v1/generate"
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            HERE / "killed_writers.py",
            url,
            folder,
            *map(str, (first, end, writers)),
            stdout=subprocess.PIPE,
        )
        output, _ = await process.communicate()
    assert process.returncode == 0
    told: dict[Path, Told] = defaultdict(list)
    for line in output.splitlines():
        answer = json.loads(line)
        told[Path(answer["log"])].append((answer["name"], answer["said"]))
    return told


async def run_kills(folder: Path, first: int, end: int, writers: int) -> None:
    told = await kill_writers(folder, first, end, writers)
    assert sum(map(len, told.values())) == (end - first) * writers
    totals = [check_said(log, theirs) for log, theirs in told.items() if log.exists()]
    samples, returned = (sum(column) for column in zip(*totals, strict=True))
    print(f"{(end - first) * writers} kills, {samples} samples found, {returned} returned ones all there")
    assert samples > 0


async def test_pairs_of_writers_killed_in_one_directory(tmp_path):
    await run_kills(tmp_path / "logs", 0, 5, 2)


@pytest.mark.campaign
@pytest.mark.parametrize("batch", range(20))
async def test_a_thousand_kills(tmp_path, batch):
    """50 a batch: 25 rounds of one writer alone, then 13 rounds of two in one directory."""
    await run_kills(tmp_path / "alone", batch * 25, batch * 25 + 25, 1)
    await run_kills(tmp_path / "pairs", batch * 25, batch * 25 + 13, 2)


COMMITTING = """
import asyncio, json, os, random, sys
from hashlib import sha256
from rollout_log.events import Delta, Opened
from rollout_log.log import Log
from rollout_log.log.committer import Committer

write, number = Committer.write, 0

def telling(self, rows):
    global number
    number += 1
    batches = [sha256(data).hexdigest() for table, _, data in rows if table == "batches"]
    os.write(1, (json.dumps([number, batches]) + "\\n").encode())
    size = write(self, rows)
    os.write(1, (json.dumps([number, None]) + "\\n").encode())
    return size

Committer.write = telling

async def main():
    log = Log.open(sys.argv[1], window_ms=10, segment_bytes=200_000, seal=False)
    random.seed(int(sys.argv[2]))

    async def run(name):
        sample = log.create(Opened(name))
        log.append(sample, 0, [Opened(name)])
        for at in range(1, 100_000):
            log.append(sample, at, [Delta(0, random.randbytes(random.randrange(3000)))])
            if random.random() < 0.1:
                await log.flush(sample)
            await asyncio.sleep(0.001 * random.random())

    await asyncio.gather(*(run(f"key-{number}") for number in range(8)))

asyncio.run(main())
"""


def kill_in_commits(log: Path, seed: int) -> tuple[int, int]:
    """Kill a writer that tells its commits; return how many it had done, and how many its log has."""
    begun: dict[int, set[str]] = {}
    done = 0
    chance = random.Random(seed)
    with subprocess.Popen(
        [sys.executable, "-c", COMMITTING, log, str(seed)], stdout=subprocess.PIPE, text=True
    ) as writer:
        assert writer.stdout is not None
        last = chance.randrange(1, 400)
        for line in writer.stdout:
            number, batches = json.loads(line)
            if batches is None:
                done = number
            else:
                begun[number] = set(batches)
            if number >= last and writer.poll() is None:
                if chance.random() < 0.5:
                    time.sleep(0.002 * chance.random())
                writer.send_signal(signal.SIGKILL)
    assert writer.returncode == -signal.SIGKILL
    with LogReader.open(log) as reader:
        (folder,) = reader._folders()
        rows = (row for segment in reader._of(folder) for row in segment.rows("batches"))
        found = {sha256(data).hexdigest() for _, data in rows}
    so_far: set[str] = set()
    for number in range(max(begun, default=0) + 1):
        so_far |= begun.get(number, set())
        if so_far == found:
            assert done <= number <= done + 1, "nothing that was done is missing, nothing came out of turn"
            return done, number
    raise AssertionError("what is there is no number of commits, in their order")


@pytest.mark.parametrize("seeds", [range(3), pytest.param(range(3, 63), marks=pytest.mark.campaign)])
def test_a_killed_writer_leaves_its_commits_in_their_order(tmp_path, seeds):
    counts = [kill_in_commits(tmp_path / str(seed), seed) for seed in seeds]
    inside = sum(done != found for done, found in counts)
    print(
        f"{len(counts)} kills after {sum(done for done, _ in counts)} commits, {inside} of them in mid-commit"
    )


READER = """
import sys
from rollout_log.log import LogReader
with LogReader.open(sys.argv[1]) as reader:
    segment = reader._of(next(reader._folders()))[0]
    with segment.snapshot() as snapshot:
        rows = snapshot.rows("batches")
        next(rows)
        print("reading", flush=True)
        sys.stdin.read()
"""


def kill_readers(log: Path, writer: Writer, readers: int, at_once: int) -> list[int]:
    """Kill readers that hold a read transaction; return the slots in use after each batch."""
    (folder,) = writers_of(log)
    used = []
    for _ in range(readers // at_once):
        processes = [
            subprocess.Popen(
                [sys.executable, "-c", READER, log], stdin=subprocess.PIPE, stdout=subprocess.PIPE
            )
            for _ in range(at_once)
        ]
        for process in processes:
            assert process.stdout is not None
            assert process.stdin is not None
            assert process.stdout.readline() == b"reading\n"
            os.kill(process.pid, signal.SIGKILL)
        for process in processes:
            process.wait()
            process.stdout.close()
            process.stdin.close()
        (segment,) = segments_of(folder)
        environment = writer.log._committer._segment._environment
        used.append(environment._env.info()["num_readers"])
        environment._commits = 255  # the writer looks for dead readers at every 256th commit
        writer.request(f"after-{len(used)}", [frame(1, finish="stop")])
        assert writer.log.flush_sync()
        assert environment._env.readers().count("\n") <= 1, "dead readers are gone"
        assert segment.exists()
    return used


def test_killed_readers_leave_no_slot(tmp_path):
    with Writer(tmp_path / "log") as writer:
        writer.request("k", [frame(1), frame(2, finish="stop")])
        assert writer.log.flush_sync()
        kill_readers(tmp_path / "log", writer, 2, 2)


@pytest.mark.campaign
def test_two_hundred_killed_readers_leave_no_slot(tmp_path):
    with Writer(tmp_path / "log") as writer:
        writer.request("k", [frame(1), frame(2, finish="stop")])
        assert writer.log.flush_sync()
        used = kill_readers(tmp_path / "log", writer, 200, 10)
        assert max(used) <= 11, "slots are used again"
