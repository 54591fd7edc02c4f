"""The demo, where it is not let run to its end."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from rollout_log.log import LogReader


def test_ctrl_c_ends_it_in_a_line_and_leaves_no_sample_open(root, tmp_path):
    command = [sys.executable, "-u", root / "examples" / "demo.py"]
    with subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("step 0: ")
        while not any(_statuses(tmp_path / "demo-log")):
            pass
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=30)
    assert process.returncode == 1
    assert errors.splitlines()[-1] == "interrupted; what was recorded so far is in demo-log/"
    assert "Traceback" not in errors
    assert "pending" not in _statuses(tmp_path / "demo-log")


def _statuses(log):
    with LogReader.open(log) as reader:
        return [entry.summary.status for entry in reader.samples()]


@pytest.mark.parametrize(("argument", "code"), [("--help", 0), ("x", 2)])
def test_an_argument_leaves_the_log_alone(argument, code, root, tmp_path):
    (tmp_path / "demo-log").mkdir()
    done = subprocess.run(
        [sys.executable, root / "examples" / "demo.py", argument],
        cwd=tmp_path,
        capture_output=True,
        check=False,
    )
    assert done.returncode == code
    assert (tmp_path / "demo-log").is_dir()
