"""`tail`: what happens while a log is written."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import signal
import subprocess
import sys
import threading

import msgspec
import pytest

from recorded import Writer, frame
from rollout_log.events import Closed
from rollout_log.log import LogReader
from rollout_log.watching import Happening, Watcher

COMMAND = [sys.executable, "-m", "rollout_log.cli", "tail"]


@pytest.fixture
def watched(tmp_path):
    """A writer, and a watcher of its log that has looked once."""
    with Writer(tmp_path / "log") as writer:
        writer.request("before", [frame(1, finish="stop")])
        writer.log.flush_sync()
        with LogReader.open(tmp_path / "log") as reader:
            watcher = Watcher(reader)
            glance = watcher.look()
            assert (glance.samples, glance.statuses) == (1, {"completed": 1})
            assert (glance.happened, glance.running, glance.tokens_per_second) == ([], [], 0.0)
            yield writer, watcher


def told(glance):
    return [(one.name, one.what, one.tokens, one.detail) for one in glance.happened]


def test_a_stream_is_followed_as_it_grows(watched):
    writer, watcher = watched
    exchange = writer.request("k", [frame(1, 2)], step=3, how=None)
    writer.log.flush_sync()
    glance = watcher.look()
    (running,) = glance.running
    assert (running.name, running.step, running.tokens, running.cause) == ("k", 3, 2, "first")
    assert running.seconds >= 0
    assert glance.tokens_per_second > 0
    assert told(glance) == []
    exchange.feed(frame(3, 4, 5))
    writer.log.flush_sync()
    glance = watcher.look()
    assert glance.running[0].tokens == 5
    assert glance.running[0].tokens_per_second > 0
    exchange.feed(frame(6, finish="stop"))
    exchange.end("eof")
    writer.log.flush_sync()
    glance = watcher.look()
    assert glance.running == []
    assert glance.statuses == {"completed": 2}
    assert told(glance) == [("k", "completed", 6, "stop")]
    glance = watcher.look()
    assert (told(glance), glance.tokens_per_second) == ([], 0.0)


def test_aborts_retries_and_resumptions_are_told(watched):
    writer, watcher = watched
    writer.request("k", [frame(1, 2), frame(finish="abort")], step=1)
    writer.log.flush_sync()
    assert told(watcher.look()) == [("k", "aborted", 2, "abort")]
    exchange = writer.request("k", [frame(3)], step=2, how=None)
    writer.log.flush_sync()
    assert told(watcher.look()) == [("k", "resume", 2, "from step 1")]
    exchange.end("reset")
    writer.request("k", [frame(4, finish="length")], step=2)
    writer.log.flush_sync()
    assert told(watcher.look()) == [("k", "retry", 4, "after reset"), ("k", "truncated", 4, "length")]


def test_what_came_and_went_between_two_looks_is_told(watched):
    writer, watcher = watched
    writer.request("k", status=500, body=b"broken")
    writer.log.flush_sync()
    assert told(watcher.look()) == [("k", "failed", 0, "so far")]


def test_a_sample_that_the_trainer_took_as_failed_is_no_longer_so_far(watched):
    writer, watcher = watched
    exchange = writer.request("k", status=500, body=b"broken")
    exchange.sample.rollout.apply(closed := Closed(status="failed"))
    exchange.sample.write([closed], summarized=True)
    writer.log.flush_sync()
    assert told(watcher.look()) == [("k", "failed", 0, None)]


def test_a_fixture_is_not_watched(root, call):
    result = call("tail", root / "fixtures" / "demo.jsonl.zst")
    assert (result.code, result.out) == (2, "")
    assert "is a fixture, which does not grow" in result.err


def lines_of(process):
    """Reads a process's lines until it has said so many."""
    found = []

    def read(count):
        while len(found) < count:
            found.append(process.stdout.readline())
        return found

    return read


@pytest.mark.parametrize("ended_by", [signal.SIGINT, signal.SIGTERM])
def test_in_a_pipe_it_is_a_line_a_happening_until_it_is_told_to_end(tmp_path, ended_by):
    hostile = "two\nlines\x1b[2J"
    with Writer(tmp_path / "log") as writer:
        command = [*COMMAND, tmp_path / "log", "--every", "0.05"]
        processes = [
            subprocess.Popen([*command, *more], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            for more in ([], ["--json"])
        ]
        try:
            # Nothing says when the first look has been; a sample that is there by then is not told.
            stop = threading.Event()

            def record():
                number = 0
                while not stop.wait(0.1):
                    writer.request(f"{hostile}{number}", [frame(1, finish="abort")])
                    number += 1

            thread = threading.Thread(target=record)
            thread.start()
            standing, *plain = lines_of(processes[0])(3)
            as_json = lines_of(processes[1])(2)
            stop.set()
            thread.join()
            assert standing.endswith("; nothing is running\n")
            assert "two\\nlines\\x1b[2J" in plain[0]
            assert plain[0].endswith(" aborted (abort), 1 token\n")
            happening = msgspec.json.decode(as_json[0], type=Happening)
            assert happening.name.startswith(hostile)
            assert (happening.what, happening.tokens) == ("aborted", 1)
            assert json.loads(as_json[1])["unix_ns"] >= happening.unix_ns
            for process in processes:
                process.send_signal(ended_by)
            for process in processes:
                _, errors = process.communicate(timeout=30)
                assert (process.returncode, errors) == (0, "")
        finally:
            stop.set()
            for process in processes:
                process.kill()
                process.wait()


def test_on_a_terminal_it_leaves_the_screen_as_it_was(tmp_path):
    with Writer(tmp_path / "log") as writer:
        writer.request("[bold]k[/bold]\x1b[2J", [frame(1)], how=None)
        writer.log.flush_sync()
        ours, theirs = pty.openpty()
        environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "100", "LINES": "20"}
        command = [*COMMAND, tmp_path / "log", "--every", "0.05"]
        with subprocess.Popen(
            command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment
        ) as process:
            os.close(theirs)
            shown = b""
            while b"and" not in shown and b"first" not in shown:
                shown += os.read(ours, 4096)
            process.send_signal(signal.SIGINT)
            with contextlib.suppress(OSError):  # how a terminal ends on Linux
                while more := os.read(ours, 4096):
                    shown += more
            assert process.wait(30) == 0
        os.close(ours)
    assert shown.count(b"\x1b[?1049h") == shown.count(b"\x1b[?1049l") == 1
    assert shown.rindex(b"\x1b[?25h") > shown.rindex(b"\x1b[?25l")
    assert rb"[bold]k[/bold]\x1b[2J" in shown
    assert shown.endswith(b"1 sample: 1 pending; 0 tokens a second\r\n")
