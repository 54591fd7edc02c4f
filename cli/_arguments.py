"""Arguments that several verbs have, and opening what they name."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rollout_log.cli._output import safe
from rollout_log.errors import SampleNotFound
from rollout_log.log import LogReader, Ref

__all__ = ["Json", "LogPath", "Tokenizer", "find"]

LogPath = Annotated[
    Path, typer.Argument(metavar="LOG", help="A log, a directory of logs (read as one), or a fixture.")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON; `rollout-log schema` has its schema.")]
Tokenizer = Annotated[
    str | None,
    typer.Option(metavar="PATH", help="A tokenizer.json, a model's directory, or a name on the hub."),
]


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
