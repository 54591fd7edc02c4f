"""Copy the samples of a fixture, or of another log, into a log.

The log is made where there is none. A sample that it has already, or one that has lost events, is an error,
and nothing is copied then.

Example:

    rollout-log import tests/fixtures/aborted.jsonl runs/aborted
    rollout-log import runs/today runs/kept --step 12
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rollout_log.cli import _arguments as arguments
from rollout_log.counting import several
from rollout_log.fixture import import_samples
from rollout_log.sources import open_source


def run(
    source: Annotated[
        Path, typer.Argument(metavar="FIXTURE", help="A fixture, a log, or a directory of logs.")
    ],
    log: Annotated[Path, typer.Argument(metavar="LOG", help="The log to write to.")],
    keys: Annotated[list[str] | None, typer.Argument(metavar="KEY", help="Only these samples.")] = None,
    *,
    step: Annotated[int | None, typer.Option(help="Only samples that took part in this step.")] = None,
) -> None:
    with open_source(source) as reader:
        copied = import_samples(reader, arguments.chosen(reader, keys, step=step), log)
    print(f"{several(copied, 'sample')} copied to {log}")
