"""Every command in README.md and docs/*.md is run, each block in an empty directory of its own.

A ```bash block is a script, a ```console block has commands after `$ ` (and `> ` where one goes on);
the output shown in it is for the reader, and compared only where it is of a shipped fixture and so always the
same. A comment on the line before says what is special:

    <!-- test: setup NAME -->          the fixture `docs_NAME` (conftest.py) prepares the directory
    <!-- test: skip because REASON --> not run
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
_BLOCK = re.compile(
    r"(?:^[ ]*<!-- test: (?P<note>.*?) -->\n)?"
    r"^(?P<indent>[ ]*)```(?P<language>bash|console)\n(?P<text>.*?)^(?P=indent)```$",
    re.DOTALL | re.MULTILINE,
)
_NOTE = re.compile(r"setup (?P<setup>[a-z_]+)|skip because (?P<skip>.+)")


@dataclass(frozen=True)
class Block:
    """A block of commands in a document."""

    place: str
    script: str
    setup: str | None = None
    skip: str | None = None
    shown: str | None = None
    """What a ```console block says comes out."""


def blocks(document: str, name: str) -> list[Block]:
    """Find a document's blocks of commands; `name` says where they are."""
    found = []
    for match in _BLOCK.finditer(document):
        place = f"{name}:{document.count(chr(10), 0, match.start('language')) + 1}"
        lines = [line.removeprefix(match["indent"]) for line in match["text"].splitlines()]
        shown = None
        if match["language"] == "console":
            shown = "".join(f"{line}\n" for line in lines if not line.startswith(("$ ", "> ")))
            lines = [line[2:] for line in lines if line.startswith(("$ ", "> "))]
        note = _NOTE.fullmatch(match["note"] or "")
        if match["note"] and not note:
            raise ValueError(
                f"{place}: `test: {match['note']}` is neither `setup NAME` nor `skip because REASON`"
            )
        found.append(Block(place, "\n".join(lines), **(note.groupdict() if note else {}), shown=shown))
    return found


def run(script: str, directory: Path, seconds: float = 60) -> subprocess.CompletedProcess[str]:
    """Run a script as a reader would, stopping at the first command that fails; then end its servers."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    # A file, not a pipe: a server that is still running would keep a pipe open.
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        process = subprocess.Popen(
            ["bash", "-euo", "pipefail", "-c", script],
            cwd=directory,
            env={**os.environ, "PATH": path, "TZ": "UTC"},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            status = process.wait(seconds)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        output.seek(0)
        return subprocess.CompletedProcess(script, status, output.read())


DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCKS = [block for path in DOCUMENTS for block in blocks(path.read_text(), str(path.relative_to(ROOT)))]


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.place)
def test_the_commands_in_the_documentation_work(block, tmp_path, request):
    if block.skip:
        pytest.skip(f"{block.place}: {block.skip}")
    if block.setup:
        request.getfixturevalue(f"docs_{block.setup}")
    done = run(block.script, tmp_path)
    assert done.returncode == 0, f"{block.place}\n{done.stdout}"
    if block.setup == "fixtures":
        assert done.stdout == block.shown


def test_the_program_in_the_readme_runs_against_the_demo_log(docs_demo_log, tmp_path):
    (program,) = re.findall(r"^```python\n(.*?)^```$", DOCUMENTS[0].read_text(), re.DOTALL | re.MULTILINE)
    (tmp_path / "program.py").write_text(program)
    script = (
        "rollout-log serve demo-log --listen 127.0.0.1:0 > serving &\n"
        "until grep -qs serves serving; do sleep 0.1; done\n"
        "grep -q http://127.0.0.1:8901/ program.py\n"
        "sed -i \"s|http://127.0.0.1:8901|$(cut -d' ' -f1 serving)|\" program.py\n"
        "python program.py"
    )
    done = run(script, tmp_path)
    assert done.returncode == 0, done.stdout
    first, *samples = done.stdout.splitlines()
    assert first.startswith("truncated [")
    assert [line.split()[1] for line in samples] == ["truncated", "truncated"]


def test_blocks_are_found_with_their_notes():
    document = (
        "Text\n"
        "```bash\necho a\necho b\n```\n"
        "<!-- test: setup log -->\n"
        "```console\n$ for x in 1; do\n>   echo $x\n> done\n1\n$ true\n```\n"
        "- item\n\n  <!-- test: skip because it needs a GPU -->\n  ```bash\n  false\n  ```\n"
        "```python\nraise SystemExit(1)\n```\n"
    )
    assert blocks(document, "x.md") == [
        Block("x.md:2", "echo a\necho b"),
        Block("x.md:7", "for x in 1; do\n  echo $x\ndone\ntrue", setup="log", shown="1\n"),
        Block("x.md:17", "false", skip="it needs a GPU"),
    ]


@pytest.mark.parametrize("note", ["skip", "skip because ", "setup", "sikp because x"])
def test_a_note_that_means_nothing_is_refused(note):
    with pytest.raises(ValueError, match=r"^x\.md:2: .* is neither"):
        blocks(f"<!-- test: {note} -->\n```bash\ntrue\n```\n", "x.md")


def test_a_script_stops_at_its_first_failure_and_its_servers_end(tmp_path):
    done = run("sleep 600 & echo $! > server; rollout-log version; false | true; echo unreached", tmp_path)
    assert done.returncode == 1
    assert done.stdout.startswith("rollout-log ")
    assert "unreached" not in done.stdout
    server = Path("/proc") / (tmp_path / "server").read_text().strip() / "stat"
    while server.exists() and server.read_text().rsplit(")", 1)[1].split()[0] not in "XZ":
        os.sched_yield()  # the signal is sent, and the kernel may still be at it
