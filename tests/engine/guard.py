"""Runs a command, and ends it with all its descendants when whoever started the guard goes away.

    python guard.py COMMAND ...

The guard obeys its standard input: `k` kills everything at once, as `kill -9` would; the end of the
input, which comes also when the starter is killed, asks the command to end, and kills after `GRACE_S`
whatever is left.
Signals of the terminal do not reach it, since it runs in a session of its own.

Descendants that lose their parent become the guard's children (Linux calls it a subreaper), so none escapes,
whatever process groups they made for themselves. The guard itself starts no thread and needs no package.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

GRACE_S = 15.0
_PR_SET_CHILD_SUBREAPER = 36


def main(command: list[str]) -> int:
    """Run the command to its end, or to ours; return its exit status."""
    if ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        sys.exit("guard: this system cannot adopt orphans")
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
    ended = os.pidfd_open(process.pid)
    try:
        ready, _, _ = select.select([0, ended], [], [])
        if 0 in ready and not os.read(0, 1):
            process.terminate()
            select.select([ended], [], [], GRACE_S)
    finally:
        if process.poll() is None:
            process.kill()
        status = process.wait()
        _kill_children()
    return status


def _kill_children() -> None:
    """Kill children, then the grandchildren that this made ours, until there are none."""
    children = Path(f"/proc/self/task/{os.getpid()}/children")
    while True:
        for child in children.read_text().split():
            os.kill(int(child), signal.SIGKILL)
        try:
            os.wait()
        except ChildProcessError:
            return


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
