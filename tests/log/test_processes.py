"""Several processes, forks, and writers that are killed."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import textwrap

import pytest

from rollout_log.errors import LogInUse
from rollout_log.events import Delta, Opened
from rollout_log.log import Log, LogReader
from rollout_log.log.directory import claim_folder, writers_of
from rollout_log.log.retention import prune
from rollout_log.log.verify import verify

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")


def script(code, *arguments, **keywords):
    command = [sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, **keywords)


WRITE = """
    import sys
    from rollout_log.events import Delta, Opened
    from rollout_log.log import Log

    path, name, count = sys.argv[1:]
    log = Log.open(path)
    sample = log.create(Opened(name))
    log.append(sample, 0, [Opened(name), *(Delta(0, b"%d" % at) for at in range(1, int(count)))])
"""


def test_processes_write_into_one_directory_and_close_at_exit(path):
    writers = [script(WRITE, path, f"key-{number}", 100) for number in range(3)]
    assert [writer.communicate() and writer.returncode for writer in writers] == [0, 0, 0]
    assert len(writers_of(path)) == 3
    with LogReader.open(path) as reader:
        assert {entry.name for entry in reader.samples()} == {"key-0", "key-1", "key-2"}
        for number in range(3):
            events = [event for _, event in reader.events(reader.find(f"key-{number}"))]
            assert events[1:] == [Delta(0, b"%d" % at) for at in range(1, 100)]


def test_a_reader_in_another_process_follows_a_live_writer(log, path, begin, deltas):
    sample = begin(log, "key")
    log.flush_sync()
    reading = script(
        """
        import sys
        from rollout_log.log import LogReader
        with LogReader.open(sys.argv[1]) as reader:
            ref = reader.find("key")
            for line in sys.stdin:
                print(sum(1 for _ in reader.events(ref)), flush=True)
        """,
        path,
        stdin=subprocess.PIPE,
    )
    for at in range(1, 8):
        log.append(sample, at, deltas(at, at + 1))
        if at == 4:
            log.rotate()
        log.flush_sync()
        reading.stdin.write("\n")
        reading.stdin.flush()
        assert int(reading.stdout.readline()) == at + 1
    reading.communicate()
    assert reading.returncode == 0


def test_a_map_that_another_process_outgrew_is_opened_larger(path, begin):
    sample_bytes = 50_000
    log = Log.open(path, window_ms=3_600_000)
    sample = begin(log, "key")
    log.flush_sync()
    reading = script(
        """
        import sys
        from rollout_log.log import LogReader, environment
        environment.READ_MAP_SIZE = 1 << 18
        with LogReader.open(sys.argv[1]) as reader:
            ref = reader.find("key")
            for line in sys.stdin:
                print(sum(len(block.payload) for block in reader.blocks(ref)), flush=True)
        """,
        path,
        stdin=subprocess.PIPE,
    )
    for at in range(1, 12):
        log.append(sample, at, [Delta(0, os.urandom(sample_bytes))])
        log.flush_sync()
        reading.stdin.write("\n")
        reading.stdin.flush()
        assert int(reading.stdout.readline()) > at * sample_bytes
    reading.communicate()
    assert reading.returncode == 0
    log.close()


def test_a_folder_belongs_to_one_process(log, path):
    trying = script(
        """
        import sys
        from pathlib import Path
        from rollout_log.errors import LogInUse
        from rollout_log.log.directory import claim_folder
        try:
            claim_folder(Path(sys.argv[1]), sys.argv[2])
        except LogInUse as error:
            print(error)
        """,
        path,
        log.writer,
    )
    assert "is written by another process" in trying.communicate()[0]


def test_the_lock_is_free_when_the_writer_is_gone(path):
    log = Log.open(path)
    log.close()
    os.close(claim_folder(path, log.writer))


def in_fork(work):
    """Run in a forked child; returns what `work` returned."""
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.write(write_end, json.dumps(work()).encode())
            code = 0
        finally:
            os._exit(code)
    os.close(write_end)
    with os.fdopen(read_end, "rb") as pipe:
        data = pipe.read()
    assert os.waitpid(child, 0)[1] == 0
    return json.loads(data)


def test_a_forked_child_writes_a_folder_of_its_own(path, begin, deltas, read):
    log = Log.open(path, window_ms=3_600_000)
    mine = begin(log, "mine")
    log.flush_sync()
    log.append(mine, 1, deltas(1, 3))
    parent = log.writer

    def work():
        assert Log.open(path) is log
        assert log.writer != parent
        assert not log.append(mine, 3, deltas(3, 4)), "the parent's sample is the parent's"
        theirs = begin(log, "theirs")
        log.append(theirs, 1, deltas(1, 3))
        assert log.flush_sync(theirs, timeout=30)
        log.close()
        log.close()
        return [theirs, log.durable(theirs)]

    ordinal, durable = in_fork(work)
    assert ordinal != mine
    assert durable == 3
    assert log.writer == parent
    log.append(mine, 3, deltas(3, 5))
    assert log.flush_sync()
    log.close()
    assert len(writers_of(path)) == 2
    assert read("mine")[1:] == deltas(1, 5)
    assert read("theirs")[1:] == deltas(1, 3)
    assert verify(path).damage == []


def test_a_forked_child_leaves_the_folder_of_a_parent_that_recorded_nothing(path, begin):
    log = Log.open(path)
    assert in_fork(log.close) is None
    assert [folder.name for folder in writers_of(path)] == [log.writer]
    begin(log, "key")
    log.close()
    with LogReader.open(path) as reader:
        assert [entry.name for entry in reader.samples()] == ["key"]


def test_writers_that_come_and_go_are_no_trouble_to_readers(path, begin):
    with Log.open(path) as log:
        begin(log, "key")
    coming = script(
        """
        import sys
        from rollout_log.log import Log
        for _ in range(50):
            Log.open(sys.argv[1]).close()
        """,
        path,
    )
    with LogReader.open(path) as reader:
        while coming.poll() is None:
            assert [entry.name for entry in reader.samples()] == ["key"]
            assert prune(path, keep_bytes=1 << 40) == []
    coming.communicate()
    assert coming.returncode == 0
    assert len(writers_of(path)) == 1


def test_a_forked_child_neither_closes_nor_reads_what_it_inherited(log, path, begin, deltas):
    sample = begin(log, "key")
    log.flush_sync()
    reader = LogReader.open(path)
    ref = reader.find("key")
    events = reader.events(ref)
    next(events)

    def work():
        try:
            list(reader.events(ref))
        except LogInUse as error:
            refused = str(error)
        reader.close()
        log.close()
        return refused

    assert "forked" in in_fork(work)
    log.append(sample, 1, deltas(1, 3))
    assert log.flush_sync()
    assert sum(1 for _ in reader.events(ref)) == 3
    reader.close()


def _work_in_child(log):
    sample = log.create(Opened("from the pool"))
    log.append(sample, 0, [Opened("from the pool"), Delta(0, b"x")])


def test_a_child_of_multiprocessing_writes_what_it_has_when_it_leaves(log, path, begin, read):
    begin(log, "key")
    process = multiprocessing.get_context("fork").Process(target=_work_in_child, args=(log,))
    process.start()
    process.join()
    assert process.exitcode == 0
    assert len(read("from the pool")) == 2


KILLED = """
    import asyncio, random, sys
    from rollout_log.events import Delta, Opened
    from rollout_log.log import Log

    async def main():
        log = Log.open(sys.argv[1], window_ms=20, segment_bytes=300_000)
        random.seed(int(sys.argv[2]))

        async def run(name):
            sample = log.create(Opened(name))
            log.append(sample, 0, [Opened(name)])
            for at in range(1, 10_000):
                data = b"%s %d " % (name.encode(), at) + random.randbytes(random.randrange(900))
                log.append(sample, at, [Delta(0, data)])
                if random.random() < 0.1:
                    await log.flush(sample)
                    print(name, log.durable(sample), flush=True)
                await asyncio.sleep(0.001 * random.random())

        await asyncio.gather(*(run(f"key-{number}") for number in range(5)))

    asyncio.run(main())
"""


@pytest.mark.parametrize("seed", range(6))
def test_a_killed_writer_leaves_prefixes_down_to_its_durable_marks(path, seed):
    marks = {}
    with script(KILLED, path, seed) as writer:
        for number, line in enumerate(writer.stdout):
            name, durable = line.split()
            marks[name] = int(durable)
            if number == 5 + 11 * seed:
                writer.send_signal(signal.SIGKILL)
    assert writer.returncode == -signal.SIGKILL
    report = verify(path)
    assert report.damage == []
    with LogReader.open(path) as reader:
        for name, durable in marks.items():
            events = list(reader.events(reader.find(name)))
            assert len(events) >= durable > 0
            assert [number for number, _ in events] == list(range(len(events)))
            for number, event in events[1:]:
                assert event.data.startswith(b"%s %d " % (name.encode(), number))
