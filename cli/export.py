"""Write samples in another format: a fixture, a trace to look at, or a table.

    fixture   whole samples as text, which every verb and the pytest plugin
              read as they do a log; FILE.gz and FILE.zst are compressed
    perfetto  a trace for ui.perfetto.dev, a track a sample
    trace     vime's and slime's trace carrier: FILE.pt for their own timeline
              viewer (takes the extra torch), else JSON
    pt        the debug dump of one step, for --load-debug-rollout-data, or of
              its evaluation (takes the extra torch)
    jsonl     a sample a line, as `show --json` has it
    parquet   a row a sample, list columns (takes the extra parquet)

Without keys, --step, --status and --evaluation it is all samples. --redact leaves out of a fixture what
people and models wrote (text), what the trainer knew (metadata), or headers; token ids stay.

Example:

    rollout-log export runs/today --to fixture --status aborted -o aborted.jsonl
    rollout-log export runs/today --to perfetto --step 12 -o step-12.json
    rollout-log export runs/today --to pt --step 12 -o rollout_12.pt
    rollout-log export runs/today --to pt --step 12 --evaluation -o rollout_eval_12.pt
    rollout-log export runs/today --to parquet -o today.parquet
    rollout-log export runs/today --to jsonl -o - math-17 math-18
"""

from __future__ import annotations

from importlib import import_module
from typing import Annotated, cast

import typer

from rollout_log.cli import _arguments as arguments
from rollout_log.cli._output import say_written
from rollout_log.cli._progress import progress
from rollout_log.cli._tokenizer import load_tokenizer
from rollout_log.export.samples import Options, samples_of
from rollout_log.fixture.redaction import Redaction
from rollout_log.sources import open_source

FORMATS = ("fixture", "perfetto", "trace", "pt", "jsonl", "parquet")
OPTIONS = {"--redact": ("fixture",), "--chunks": ("perfetto",), "--tokenizer": ("jsonl", "parquet")}
"""Option -> the formats that can do something with it; all others are of the samples, for every format."""
REDACTIONS = ("text", "metadata", "headers")


def run(
    log: arguments.LogPath,
    keys: Annotated[list[str] | None, typer.Argument(metavar="KEY", help="Only these samples.")] = None,
    *,
    to: Annotated[str, typer.Option(metavar="FORMAT", help=f"One of {', '.join(FORMATS)}.")],
    output: arguments.Output,
    step: Annotated[int | None, typer.Option(help="Only samples that took part in this step.")] = None,
    status: arguments.Status = None,
    evaluation: Annotated[bool, typer.Option("--evaluation", help="Only samples of evaluations.")] = False,
    redact: Annotated[
        list[str] | None,
        typer.Option(metavar="WHAT", help=f"fixture: leave out {', '.join(REDACTIONS)}; repeatable."),
    ] = None,
    chunks: Annotated[bool, typer.Option("--chunks", help="perfetto: mark each data frame.")] = False,
    tokenizer: arguments.Tokenizer = None,
) -> None:
    if to not in FORMATS:
        raise typer.BadParameter(f"{to!r} is no format: there are {', '.join(FORMATS)}")
    for what in redact or ():
        if what not in REDACTIONS:
            raise typer.BadParameter(f"{what!r} cannot be redacted: there are {', '.join(REDACTIONS)}")
    for option in arguments.given({"--redact": redact, "--chunks": chunks, "--tokenizer": tokenizer}):
        if to not in OPTIONS[option]:
            raise typer.BadParameter(f"{option} is for --to {' and --to '.join(OPTIONS[option])}")
    left_out = cast("tuple[Redaction, ...]", tuple(redact or ()))
    decode = load_tokenizer(tokenizer, download=True) if tokenizer is not None else None
    write = import_module(f"rollout_log.export.{to}").write
    with open_source(log) as reader:
        entries = arguments.chosen(reader, keys, step=step, status=status, evaluation=evaluation)
        options = Options(chunks=chunks, decode=decode, step=step, evaluation=evaluation, redact=left_out)
        samples = progress(to, samples_of(reader, entries), len(entries))
        write(samples, output, options)
    say_written(output, len(entries))
