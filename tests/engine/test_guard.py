"""Nothing that a test run started outlives it; no engine is needed to show that."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

GUARD = Path(__file__).with_name("guard.py")

# A server with a child in a session of its own, which ignores SIGTERM; it says the child's id, and waits.
SERVER = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import signal, time;"
    "signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"],
    start_new_session=True, stdout=subprocess.PIPE, text=True)
child.stdout.readline()
print(child.pid, flush=True)
time.sleep(600)
"""

# A test run: starts the guard with the server as `Server` does, passes on what it says, and waits.
STARTER = """
import subprocess, sys, time
guard = subprocess.Popen([sys.executable, "-I", *sys.argv[1:]], stdin=subprocess.PIPE, start_new_session=True)
time.sleep(600)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_everything_ends_when_the_starter_is_killed(number):
    with subprocess.Popen(
        [sys.executable, "-c", STARTER, str(GUARD), sys.executable, "-c", SERVER],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as starter:
        grandchild = int(starter.stdout.readline())
        assert _lives(grandchild)
        starter.send_signal(number)
        # The pipe is at its end when the last process that holds it is gone: the server and the guard too.
        assert starter.stdout.read() == ""
    assert not _lives(grandchild)


@pytest.mark.parametrize("order", [b"", b"k"])
def test_everything_ends_when_the_starter_says_so(order):
    guard = subprocess.Popen(
        [sys.executable, "-I", str(GUARD), sys.executable, "-c", SERVER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    grandchild = int(guard.stdout.readline())
    guard.communicate(order)
    assert guard.returncode == (-signal.SIGKILL if order else -signal.SIGTERM) % 256
    assert not _lives(grandchild)


def test_a_server_that_ends_takes_its_children_along():
    command = [sys.executable, "-c", SERVER.replace("time.sleep(600)\n", "sys.exit(3)\n")]
    with subprocess.Popen(
        [sys.executable, "-I", str(GUARD), *command], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as guard:
        grandchild = int(guard.stdout.readline())
        assert guard.wait() == 3
    assert not _lives(grandchild)


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
