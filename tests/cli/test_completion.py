"""Completion: what a shell would offer."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from rollout_log.cli import VERBS


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (["st"], ["steps", "stats"]),
        (["nothing"], []),
        (["verify", "--js"], ["--json"]),
        (["show", "log", "--tok"], ["--tokenizer"]),
        (["show", "lo"], []),
        (["nonsense", "--js"], []),
    ],
)
def test_what_is_offered(call, words, offered):
    result = call("completion", "words", "--", *words)
    assert (result.code, result.out.split()) == (0, offered)


def test_all_verbs_are_offered_at_the_start(call):
    assert call("completion", "words", "--", "").out.split() == list(VERBS)


def test_an_unknown_shell_is_refused(call):
    result = call("completion", "tcsh")
    assert result.code == 2
    assert "bash, zsh, fish" in result.err


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
def test_bash_completes():
    script = (
        'eval "$(rollout-log completion bash)"; COMP_WORDS=(rollout-log verify --j); COMP_CWORD=2; '
        '_rollout_log; echo "${COMPREPLY[@]}"'
    )
    path = f"{Path(sys.executable).parent}:/usr/bin:/bin"
    done = subprocess.run(
        ["bash", "-c", script], env={"PATH": path}, capture_output=True, text=True, check=True
    )
    assert done.stdout == "--json\n"
