"""The example project's tests, run as its reader would."""

from __future__ import annotations

import shutil
import subprocess
import sys

import pytest

from rollout_log.fixture import FixtureReader


@pytest.fixture
def project(root, tmp_path):
    """A copy of the project in a directory of its own."""
    target = tmp_path / "gpu_free_ci"
    shutil.copytree(root / "examples" / "gpu_free_ci", target, ignore=shutil.ignore_patterns(".*", "__*"))
    return target


def test_three_tests_pass_and_use_every_recording(project):
    command = [sys.executable, "-m", "pytest"]
    done = subprocess.run(command, cwd=project, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert "3 passed" in done.stdout
    assert "were not asked for" not in done.stdout


def test_its_recording_is_an_abort_and_a_resume_of_a_real_engine(project):
    with FixtureReader.open(project / "tests" / "fixtures" / "test_rollout.jsonl") as reader:
        rollouts = {entry.ref.run: reader.rollout(entry.ref) for entry in reader.samples()}
    assert sorted(rollouts) == [
        "test_a_connection_that_is_lost_twice",
        "test_a_whole_response",
        "test_an_abort_keeps_what_came_and_the_next_step_goes_on",
    ]
    aborted = rollouts["test_an_abort_keeps_what_came_and_the_next_step_goes_on"]
    assert [request.ended for request in aborted.requests[:1]] == ["cancelled"]
    assert [request.cause for request in aborted.requests] == ["first", "resume"]
    assert not any(rollout.problems for rollout in rollouts.values())
