"""Arguments that several verbs have, and opening what they name."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from rollout_log.cli._output import safe
from rollout_log.errors import SampleNotFound
from rollout_log.log import LogReader, Ref

__all__ = [
    "Json",
    "JsonLines",
    "LogDirectory",
    "LogPath",
    "Output",
    "Tokenizer",
    "address",
    "find",
    "say_nothing",
]


def _writable(file: Path | None) -> Path | None:
    if file is None:
        return None
    if str(file) == "-":
        return Path("/dev/stdout")
    folder = file.parent
    if not folder.is_dir():
        raise typer.BadParameter(f"there is no directory {safe(folder)}: make it, or name another file")
    if file.is_dir():
        raise typer.BadParameter(f"{safe(file)} is a directory: name a file in it")
    if not (file.exists() or file.is_symlink() or os.access(folder, os.W_OK)):
        raise typer.BadParameter(f"nothing can be written to the directory {safe(folder)}: name another file")
    return file


LogPath = Annotated[
    Path, typer.Argument(metavar="LOG", help="A log, a directory of logs (read as one), or a fixture.")
]
LogDirectory = Annotated[
    Path, typer.Argument(metavar="LOG", help="A log, or a directory of logs, each of them.")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON; `rollout-log schema` has its schema.")]
JsonLines = Annotated[
    bool, typer.Option("--json", help="Print JSON, a line each; `rollout-log schema` has its schema.")
]
Output = Annotated[
    Path,
    typer.Option(
        "--output", "-o", metavar="FILE", help="The file to write; - is standard output.", callback=_writable
    ),
]
Tokenizer = Annotated[
    str | None,
    typer.Option(metavar="PATH", help="A tokenizer.json, a model's directory, or a name on the hub."),
]

_MOST_RANGES = 8


def find(reader: LogReader, name: str) -> Ref:
    """Find a sample by its name, also as `ls` shows it: with escapes for what a terminal would obey.

    Raises SampleNotFound, which names the nearest keys.
    """
    try:
        return reader.find(name)
    except SampleNotFound:
        if "\\" in name:
            for key in {entry.summary.key for entry in reader.samples()}:
                shown = safe(key)
                if shown != key and name.startswith(shown):
                    try:
                        return reader.find(key + name[len(shown) :])
                    except SampleNotFound:
                        continue
        raise


def address(listen: str) -> tuple[str, int]:
    """Read `HOST:PORT`, the value of --listen; without a host it is loopback."""
    host, _, port = listen.rpartition(":")
    if not (port.isascii() and port.isdigit() and int(port) < 65536):
        raise typer.BadParameter(f"{listen!r} is no HOST:PORT, like 127.0.0.1:8900", param_hint="--listen")
    return host.strip("[]") or "127.0.0.1", int(port)


def say_nothing(reader: LogReader, step: int | None, asked: str = "") -> None:
    """Say on stderr that no sample is what was asked for, and which steps there are, if that is why.

    `asked` is the other filters, as they were given.
    """
    empty, steps = True, set[int]()
    for each in reader.summaries():
        empty = False
        steps.update(step for step in (each.step, each.resumed_from) if step is not None)
    if empty:
        what = "the log has no samples yet"
    elif step is not None and step not in steps:
        what = f"no sample took part in step {step}; there are {_ranges(steps) or 'no steps'}"
    else:
        where = "" if step is None else f" of step {step}"
        what = f"no sample{where} matches {asked}; without it there are some"
    typer.echo(f"rollout-log: {what}", err=True)


def _ranges(numbers: set[int]) -> str:
    """Show `step 3`, `steps 0 to 7, 9`; many stretches as the ends of the whole."""
    ends: list[list[int]] = []
    for number in sorted(numbers):
        if ends and number == ends[-1][1] + 1:
            ends[-1][1] = number
        else:
            ends.append([number, number])
    if len(ends) > _MOST_RANGES:
        return f"{len(numbers):,} steps from {ends[0][0]} to {ends[-1][1]}"
    shown = ", ".join(f"{a}" if a == b else f"{a} to {b}" for a, b in ends)
    return f"step{'s' * (len(numbers) > 1)} {shown}" if numbers else ""
