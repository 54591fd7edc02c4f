"""The `rollout-log` command: one file per verb, loaded when the verb is called.

To add a verb, write `cli/<verb>.py` (`import_.py`, where Python has the word) and one line of `VERBS`. Its
module has

- a docstring: the first line is the verb's line in `VERBS`; indented paragraphs (the example, which
  every verb has) are shown as they stand, the others are wrapped;
- a function `run`, whose parameters are typer's: `Annotated[Path, typer.Argument(help="…")]`; `_plain` gives
  what has no `metavar` a plain word, and numbers and choices their errors.

`run` prints through `cli._output` whatever comes from a log, raises `RolloutLogError` for what the user
can mend (one line on stderr, exit 2), and `typer.Exit(code)` for any other status. A verb called without
the arguments it needs shows its help, and exits 2 so that a script notices.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module
from keyword import iskeyword
from types import ModuleType
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from collections.abc import Sequence

VERBS = {
    "record": "Record whatever clients ask an engine for: a proxy between them.",
    "ls": "List the samples of a log, in the order they began.",
    "steps": "Print a line for each step: what became of its samples, and what it cost.",
    "show": "Show one sample: its requests, its tokens and who made them, its problems.",
    "diff": "Compare two samples, or one sample in two logs, token by token.",
    "verify": "Check a log: its bytes, and the problems of every sample.",
    "tail": "Watch a log being written: what runs, how fast, and what becomes of it.",
    "stats": "Print a log in numbers: sizes, rates, latencies, what sealing would gain.",
    "serve": "Serve recordings to clients, in the place of the engine.",
    "replay": "Play samples back: what was asked, what came, where it was cut and by what.",
    "export": "Write samples in another format: a fixture, a trace to look at, or a table.",
    "report": "Write a step as one page: a timeline, and each sample's tokens for a click.",
    "import": "Copy the samples of a fixture, or of another log, into a log.",
    "seal": "Seal what writers that are gone left: a tenth of the size, read as before.",
    "archive": "Copy sealed segments to another place, such as a network file system.",
    "prune": "Delete the oldest segments, by size, step or age, and say what went.",
    "recover": "Save what a damaged log still has into a new one, and count what is lost.",
    "schema": "Print the JSON Schema of what a verb prints with --json.",
    "completion": "Print what makes a shell complete verbs, options and files.",
    "version": "Print the version of rollout-log.",
}
"""Verb -> what it does, in the order of the help. Static, so that the help imports nothing."""


_NO_READER = 141
"""The exit status of what SIGPIPE ended, as a shell gives it."""


def main(args: Sequence[str] | None = None) -> None:
    """Run the command line, by default the process's own; ends in SystemExit.

    Where nobody reads the output any more (`| head`), it ends at once and in silence.
    """
    try:
        try:
            _run(args)
        finally:
            sys.stdout.flush()  # else the interpreter does, and complains
    except BrokenPipeError:
        _end_unread()
    except SystemExit as ended:
        if isinstance(ended.__context__, BrokenPipeError):  # typer and rich make it an exit of 1
            _end_unread()
        raise


def _end_unread() -> NoReturn:
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # stdout, for what is still buffered
    sys.exit(_NO_READER)


def _run(args: Sequence[str] | None) -> None:
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")  # a terminal in ASCII is no reason to fail
    verb, *rest = [*(sys.argv[1:] if args is None else args)] or ["--help"]
    if verb in {"-h", "--help", "help"}:
        if not rest:
            print(_overview())
            sys.exit(0)
        verb, rest = rest[0], ["--help"]
    if verb == "--version":
        verb = "version"
    if verb not in VERBS:
        _fail(_unknown(verb))
    _call(verb, rest)


def _overview() -> str:
    width = max(map(len, VERBS))
    verbs = "\n".join(f"  {verb:{width}}  {line}" for verb, line in VERBS.items())
    return (
        "Usage: rollout-log VERB [ARGUMENTS]\n\n"
        "A flight recorder for RL rollouts: record token streams, look at them, play them back.\n\n"
        f"{verbs}\n\n"
        "`rollout-log VERB --help` says more about one, with an example.\n"
        "Exit status: 0 where all is well; 1 where it is not, as a verb's help says; 2 for what cannot be."
    )


def _unknown(verb: str) -> str:
    from difflib import get_close_matches

    near = get_close_matches(verb, VERBS, n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    return f"there is no verb {verb!r}{hint} (rollout-log --help lists them)"


def _call(verb: str, args: list[str]) -> None:
    from rollout_log.errors import LogDamaged, RolloutLogError

    command = load(verb)
    if not args and any(parameter.required for parameter in command.params):
        print(command.get_help(command.make_context(f"rollout-log {verb}", [], resilient_parsing=True)))
        sys.exit(2)
    try:
        command.main(args=args, prog_name=f"rollout-log {verb}")
    except BrokenPipeError:
        raise
    except LogDamaged as error:
        _fail(f"{error}; `rollout-log verify` says what else is damaged")
    except RolloutLogError as error:
        _fail(str(error) or type(error).__name__)
    except OSError as error:
        _fail(_plainly(error))


def _plainly(error: OSError) -> str:
    """Give what the system says, without the number that it has for it."""
    if error.strerror is None or error.filename is None:
        return error.strerror or str(error) or type(error).__name__
    names = [
        os.fsdecode(name) for name in (error.filename, error.filename2) if isinstance(name, (str, bytes))
    ]
    return f"{' and '.join(names) or error.filename}: {error.strerror}"


def load(verb: str) -> Any:  # typer's Command, which it does not export
    """Import a verb's module and make its command."""
    import typer

    from rollout_log.cli._plain import PlainCommand, plain

    module = import_module(f"{__name__}.{verb}{'_' * iskeyword(verb)}")
    app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
    settings = {"help_option_names": ["-h", "--help"]}
    app.command(verb, cls=PlainCommand, help=_help(module), context_settings=settings)(plain(module.run))
    return typer.main.get_command(app)


def _help(module: ModuleType) -> str:
    """Give the module's docstring, its indented paragraphs marked (`\\b`) as not to be wrapped."""
    from inspect import getdoc

    paragraphs = (getdoc(module) or "").split("\n\n")
    return "\n\n".join(f"\b\n{text}" if text.startswith(" ") else text for text in paragraphs)


def _fail(message: str) -> NoReturn:
    from rollout_log.cli._output import safe

    print(f"rollout-log: {safe(message)}", file=sys.stderr)
    sys.exit(2)
