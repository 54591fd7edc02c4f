"""Write a step as one page: a timeline, and each sample's tokens for a click.

The page is one file that loads nothing from anywhere. A lane is a sample, a bar a request. Samples of
several runs are in one page. Without --step it is all samples.

Example:

    rollout-log report runs/today --step 12 -o report.html
    rollout-log report runs/today --step 12 --tokenizer /models/qwen3 -o report.html
    rollout-log report runs/today --step 12 --max-mb 200 -o report.html
"""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from rollout_log.cli import _arguments as arguments
from rollout_log.cli._output import say_written
from rollout_log.cli._progress import progress
from rollout_log.cli._tokenizer import load_tokenizer
from rollout_log.cli.show import tokenizer_for
from rollout_log.counting import several
from rollout_log.errors import RolloutLogError
from rollout_log.export.report import Report, by_interest
from rollout_log.export.samples import Decode
from rollout_log.log import Entry, LogReader
from rollout_log.sources import open_source

_MB = 1_000_000


def run(
    log: arguments.LogPath,
    *,
    output: arguments.Output,
    step: Annotated[int | None, typer.Option(help="Only samples that took part in this step.")] = None,
    max_mb: Annotated[
        int,
        typer.Option(
            min=1, help="Beyond this, samples are drawn without their tokens, the uneventful first."
        ),
    ] = 40,
    tokenizer: arguments.Tokenizer = None,
) -> None:
    with open_source(log) as reader:
        entries = by_interest(arguments.chosen(reader, step=step))
        decode = _decode(reader, entries, tokenizer)
        page = Report(reader, step, decode, limit=max_mb * _MB)
        for entry in progress("report", entries, len(entries)):
            page.add(entry)
        page.write(output)
    say_written(output, len(entries))
    if page.left_out:
        print(
            f"rollout-log: {page.left_out:,} of {several(len(entries), 'sample')} are drawn WITHOUT THEIR "
            f"TOKENS: the page has reached {max_mb} MB; --max-mb raises that",
            file=sys.stderr,
        )


def _decode(reader: LogReader, entries: list[Entry], given: str | None) -> Decode | None:
    """Take the tokenizer that was given, else the one that the first sample names."""
    if given is not None:
        return load_tokenizer(given, download=True)
    try:
        return tokenizer_for(reader.rollout(entries[0].ref), None)
    except RolloutLogError:  # that sample cannot be read; the page will say so
        return None
