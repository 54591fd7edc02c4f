"""A process of the package's own has its modules, wherever this one is at."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from rollout_log.child import command_of


def test_a_child_has_the_modules_of_its_parent_and_none_of_the_working_directory(tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    (tmp_path / "there").mkdir()
    (tmp_path / "here" / "msgspec.py").write_text("raise AssertionError('of the working directory')")
    (tmp_path / "there" / "told.py").write_text("import msgspec\ndef tell(*words): print(*words)")
    monkeypatch.chdir(tmp_path)
    ours = [entry for entry in sys.path if Path(entry).name == "site-packages" or "lib" in entry]
    monkeypatch.setattr(sys, "path", ["", Path("there"), *ours])
    command = command_of("told:tell", "two words", "'quoted'")
    told = subprocess.run(command, cwd="here", capture_output=True, text=True, check=True)
    assert told.stdout == "two words 'quoted'\n"
    package = command_of("rollout_log.counting:several", "1", "word")  # which nothing on the path has
    assert "ValueError" in subprocess.run(package, capture_output=True, text=True, check=False).stderr
