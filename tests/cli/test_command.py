"""The command line's frame: verbs, help, and how errors look."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from keyword import iskeyword
from pathlib import Path
from types import ModuleType
from typing import Annotated, Literal

import pytest
import typer

import rollout_log
from rollout_log import cli
from rollout_log.errors import LogNotFound


def call(*args: str) -> int:
    """Run the command line in this process; its exit status."""
    with pytest.raises(SystemExit) as ended:
        cli.main(args)
    return int(ended.value.code or 0)


@pytest.fixture
def verb(monkeypatch):
    """Adds a verb made of a function and a docstring."""

    def add(run, doc="Do a thing.\n\nExample:\n\n    rollout-log thing  x\n    rollout-log thing  y\n"):
        module = ModuleType("rollout_log.cli.thing", doc)
        module.run = run
        monkeypatch.setitem(sys.modules, module.__name__, module)
        monkeypatch.setitem(cli.VERBS, "thing", doc.splitlines()[0])

    return add


def test_every_file_is_a_verb_and_every_verb_a_file():
    files = {
        path.stem.removesuffix("_")
        for path in Path(cli.__file__).parent.glob("*.py")
        if not path.stem.startswith("_")
    }
    assert files == set(cli.VERBS)


@pytest.mark.parametrize("name", cli.VERBS)
def test_the_help_of_a_verb_is_its_modules(name, capsys):
    assert call(name, "-h") == 0
    short = capsys.readouterr().out
    assert call(name, "--help") == 0
    out = capsys.readouterr().out
    assert out == short
    assert cli.VERBS[name] in out
    assert f"  rollout-log {name}" in out, "the docstring has no example"
    doc = sys.modules[f"rollout_log.cli.{name}{'_' * iskeyword(name)}"].__doc__
    assert doc.splitlines()[0] == cli.VERBS[name]


@pytest.mark.parametrize("args", [(), ("--help",), ("-h",), ("help",)])
def test_the_overview_lists_the_verbs(args, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["rollout-log"])
    assert call(*args) == 0
    out = capsys.readouterr().out
    for name, line in cli.VERBS.items():
        assert any(text.split(maxsplit=1) == [name, line] for text in out.splitlines())


def test_the_overview_imports_no_verb_and_no_typer():
    code = (
        "import atexit, sys; atexit.register(lambda: print(*sys.modules));"
        "from rollout_log.cli import main; main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.splitlines()[-1].split())
    assert "rollout_log.cli" in loaded
    assert not loaded & {"typer", "rich", "httpx", "lmdb", "msgspec", "rollout_log.cli.version"}


def test_the_installed_command_prints_the_version():
    command = Path(sys.executable).with_name("rollout-log")
    for argv in (
        [command, "version"],
        [command, "--version"],
        [sys.executable, "-m", "rollout_log.cli", "version"],
    ):
        done = subprocess.run(argv, capture_output=True, text=True, check=True)
        assert done.stdout == f"rollout-log {rollout_log.__version__}\n"


@pytest.mark.parametrize(
    "args",
    [
        ["--help"],
        ["ls", "--help"],
        ["show"],
        ["ls", "LOG"],
        ["replay", "LOG"],
        ["show", "LOG", "math-1"],
        ["export", "LOG", "--to", "jsonl", "-o", "/dev/stdout"],
    ],
)
def test_output_that_nobody_reads_ends_in_silence(args, run_log):
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "rollout_log.cli"]
    done = subprocess.run(
        [*command, *(str(run_log) if arg == "LOG" else arg for arg in args)],
        stdout=writer,
        stderr=subprocess.PIPE,
        check=False,
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, b"")


def test_an_unknown_verb_names_the_nearest(capsys):
    assert call("versoin", "x") == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err == (
        "rollout-log: there is no verb 'versoin'; did you mean version? (rollout-log --help lists them)\n"
    )


def test_a_verb_without_its_arguments_shows_its_example(verb, capsys):
    def run(log: str):
        raise AssertionError("not called")

    verb(run)
    assert call("thing") == 2
    out = capsys.readouterr().out
    assert "Usage: rollout-log thing" in out
    assert "rollout-log thing  x\n" in out


def test_a_verb_that_needs_no_arguments_just_runs(verb, capsys):
    verb(lambda: print("ran"))
    assert call("thing") == 0
    assert capsys.readouterr().out == "ran\n"


@pytest.mark.parametrize(
    "error", [LogNotFound("there is no log at\n\x1b[2Jx"), PermissionError("no\n\x1b[2Jx")]
)
def test_what_the_user_can_mend_is_one_safe_line_and_exit_2(error, verb, capsys):
    def run():
        raise error

    verb(run)
    assert call("thing") == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err == f"rollout-log: {str(error).splitlines()[0]}\\n\\x1b[2Jx\n"


def test_a_verb_chooses_its_exit_status(verb):
    def run():
        raise typer.Exit(1)

    verb(run)
    assert call("thing") == 1


@pytest.mark.parametrize("name", cli.VERBS)
def test_help_speaks_no_types(name, capsys):
    assert call(name, "--help") == 0
    out = capsys.readouterr().out
    usage = out.splitlines()[0]
    assert re.fullmatch(rf"Usage: rollout-log {name} \[OPTIONS\]( [A-Z]+…?)*( \[[A-Z]+…?\])*", usage)
    assert not re.search(r"<|\bx>=|range", out.partition("\nArguments:")[2])


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--count", "x"], "--count: 'x' is not a whole number of 1 or more"),
        (["--count", "0"], "--count: '0' is not a whole number of 1 or more"),
        (["--share", "nan"], "--share: 'nan' is not a number from 0 to 1"),
        (["--any", "x"], "--any: 'x' is not a whole number"),
        (["--kind", "c"], "--kind: 'c' is not one of a, b"),
        (["--kind"], "option '--kind' requires an argument"),
        (["--kine", "a"], "there is no option --kine, but --kind"),
        (["--count", "1", "--count", "2"], "--count: given 2 times, and it takes one value"),
        (["y", "z"], "2 arguments too many: 'y', 'z'"),
        (["\x1b[2J"], r"1 argument too many: '\x1b[2J'"),
    ],
)
def test_what_a_verb_does_not_take_is_said_in_plain_words(args, said, verb, capsys):
    def run(
        log: str,
        *,
        count: Annotated[int, typer.Option(min=1)] = 5,
        share: Annotated[float | None, typer.Option(min=0, max=1)] = None,
        any_: Annotated[int | None, typer.Option("--any")] = None,
        kind: Annotated[Literal["a", "b"], typer.Option()] = "a",
        many: Annotated[list[str] | None, typer.Option()] = None,
        flag: Annotated[bool, typer.Option("--flag")] = False,
    ):
        print(log, count, share, any_, kind, len(many or ()), flag)

    verb(run)
    assert call("thing", "x", *args) == 2
    assert capsys.readouterr() == ("", f"rollout-log: {said}; rollout-log thing --help says more\n")
    several = ["--many", "p", "--many", "q", "--flag", "--flag"]
    assert call("thing", "x", "--share", ".5", "--any", "-3", "--kind", "b", *several) == 0
    assert capsys.readouterr().out == "x 5 0.5 -3 b 2 True\n"
    assert call("thing", "--help") == 0
    assert "[default: 5]" in capsys.readouterr().out


def test_a_verb_that_lacks_an_argument_names_it(verb, capsys):
    def run(log: str, key: Annotated[str, typer.Argument(metavar="KEY")]):
        raise AssertionError("not called")

    verb(run)
    assert call("thing", "x") == 2
    assert (
        capsys.readouterr().err == "rollout-log: missing argument 'KEY'; rollout-log thing --help says more\n"
    )


def test_a_bug_is_not_hidden(verb):
    def run():
        raise ZeroDivisionError

    verb(run)
    with pytest.raises(ZeroDivisionError):
        cli.main(["thing"])
