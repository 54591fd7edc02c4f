"""Arguments that several verbs have, and opening what they name."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, get_args

import msgspec
import typer

from rollout_log.cli._output import STDOUT, safe
from rollout_log.counting import several
from rollout_log.errors import SampleNotFound
from rollout_log.log import Entry, LogReader, Ref
from rollout_log.log.directory import check_outside
from rollout_log.request import Status as _Status

__all__ = [
    "Json",
    "JsonLines",
    "LogDirectory",
    "LogPath",
    "Output",
    "Status",
    "Tokenizer",
    "address",
    "chosen",
    "find",
    "given",
    "say_nothing",
    "without",
]


def _writable(file: Path | None) -> Path | None:
    if file is None:
        return None
    if str(file) == "-":
        return STDOUT
    check_outside(file)
    folder = file.parent
    if not folder.is_dir():
        raise typer.BadParameter(f"there is no directory {safe(folder)}: make it, or name another file")
    if file.is_dir():
        raise typer.BadParameter(f"{safe(file)} is a directory: name a file in it")
    if not (file.exists() or file.is_symlink() or os.access(folder, os.W_OK)):
        raise typer.BadParameter(f"nothing can be written to the directory {safe(folder)}: name another file")
    return file


def _status(word: str | None) -> str | None:
    if word is not None and word not in _STATUSES:
        raise typer.BadParameter(f"{word!r} is no status: there are {', '.join(_STATUSES)}")
    return word


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
_STATUSES = get_args(_Status)
Status = Annotated[
    str | None, typer.Option(help=f"Only samples that are {', '.join(_STATUSES)}.", callback=_status)
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


def chosen(
    reader: LogReader,
    keys: Sequence[str] | None = None,
    *,
    step: int | None = None,
    status: str | None = None,
    evaluation: bool = False,
) -> list[Entry]:
    """Return the samples that were named, each once and in that order, else all; of them those asked for.

    Two choices of one sample are the sample as a whole. Raises SampleNotFound for a name that there is not,
    and where no sample is left.
    """
    found: Iterable[Entry]
    if not keys:
        found = reader.samples(step=step, status=status)
    elif step is None and status is None:
        found = _named(reader, keys).values()
    else:
        there = {_place(entry.ref) for entry in reader.samples(step=step, status=status)}
        found = [entry for place, entry in _named(reader, keys).items() if place in there]
    entries = [entry for entry in found if entry.summary.evaluation or not evaluation]
    if not entries:
        asked = [*([f"--status {status}"] if status else []), *["--evaluation"] * evaluation]
        raise SampleNotFound(_why_none(reader, step, " ".join(asked), named=bool(keys)))
    return entries


def _named(reader: LogReader, keys: Sequence[str]) -> dict[tuple[Path, int], Entry]:
    named: dict[tuple[Path, int], Entry] = {}
    for key in keys:
        ref = find(reader, key)
        before = named.get(_place(ref))
        if before is not None and before.ref != ref:
            ref = msgspec.structs.replace(ref, choice=None)
        named[_place(ref)] = Entry(reader.summary(ref), before.name if before is not None else key, ref)
    return named


def _place(ref: Ref) -> tuple[Path, int]:
    return ref.folder, ref.ordinal


def given(options: Mapping[str, object]) -> list[str]:
    """Return the names of the options that have been given a value."""
    return [
        name for name, value in options.items() if value is not None and value is not False and value != []
    ]


def without(what: str, options: Mapping[str, object]) -> None:
    """Refuse options that would do nothing beside `what`. Raises typer's BadParameter."""
    if names := given(options):
        raise typer.BadParameter(f"{what} has no use for {', '.join(names)}")


def address(listen: str) -> tuple[str, int]:
    """Read `HOST:PORT`, the value of --listen; without a host it is loopback."""
    host, _, port = listen.rpartition(":")
    if not (port.isascii() and port.isdigit() and int(port) < 65536):
        raise typer.BadParameter(f"{listen!r} is no HOST:PORT, like 127.0.0.1:8900", param_hint="--listen")
    return host.strip("[]") or "127.0.0.1", int(port)


def say_nothing(reader: LogReader, step: int | None, asked: str = "") -> None:
    """Say on stderr that no sample is what was asked for, and why; `asked` is the other filters, as given."""
    typer.echo(f"rollout-log: {_why_none(reader, step, asked)}", err=True)


def _why_none(reader: LogReader, step: int | None, asked: str, *, named: bool = False) -> str:
    empty, steps = True, set[int]()
    for each in reader.summaries():
        empty = False
        steps.update(step for step in (each.step, each.resumed_from) if step is not None)
    if empty and (pruned := reader.pruned()):
        return f"the log has no samples any more: {several(len(pruned), 'segment')} pruned"
    if empty:
        return "the log has no samples yet"
    if step is not None and step not in steps:
        return f"no sample took part in step {step}; there are {_ranges(steps) or 'no steps'}"
    if named:
        filters = " ".join([*([] if step is None else [f"--step {step}"]), *([asked] if asked else [])])
        return f"no sample that was named matches {filters}"
    where = "" if step is None else f" of step {step}"
    return f"no sample{where} matches {asked}; without it there are some"


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
