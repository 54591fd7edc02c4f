"""What the writers of this package are given."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import msgspec

from rollout_log.events import Event
from rollout_log.fixture.redaction import Redaction
from rollout_log.fold import Rollout
from rollout_log.log import Entry, LogReader
from rollout_log.view import SampleView, view

__all__ = ["Decode", "Options", "Sample", "samples_of", "text_file", "views", "whole"]

Decode = Callable[[Sequence[int]], str]


class Sample(msgspec.Struct):
    """One sample on its way out."""

    entry: Entry
    rollout: Rollout
    reader: LogReader

    def events(self) -> Iterator[tuple[int, Event]]:
        """Yield its numbered events, read anew."""
        return self.reader.events(self.entry.ref)


class Options(msgspec.Struct, frozen=True):
    """What a format can be asked for."""

    chunks: bool = False
    """A mark for each data frame."""
    decode: Decode | None = None
    """Token ids -> text."""
    step: int | None = None
    """The step that was asked for."""
    evaluation: bool = False
    """Its evaluation, not its training."""
    redact: tuple[Redaction, ...] = ()
    """What a fixture leaves out."""


def samples_of(reader: LogReader, entries: Iterable[Entry]) -> Iterator[Sample]:
    """Fold samples one by one."""
    for entry in entries:
        yield Sample(entry, reader.rollout(entry.ref), reader)


def views(sample: Sample, decode: Decode | None = None) -> Iterator[SampleView]:
    """Yield a sample as `show --json` has it; of several choices each one."""
    ref, rollout = sample.entry.ref, sample.rollout
    several = len(rollout.choices) > 1
    for index in sorted(rollout.choices) if several else [None]:
        name = sample.entry.name if index is None else f"{sample.entry.name}#{index}"
        found = view(rollout, name=name, choice=index)
        found.incarnation, found.run = ref.incarnation, ref.run
        if decode is not None and found.token_ids:
            found.text = decode(found.token_ids)
        yield found


@contextmanager
def text_file(path: Path) -> Iterator[IO[str]]:
    """Open a file for text that appears whole or not at all; a device or a pipe is written as it is."""
    with whole(path) as draft, draft.open("w", encoding="utf-8") as file:
        yield file


@contextmanager
def whole(path: Path) -> Iterator[Path]:
    """Give a path to write to, which takes the place of `path` when all is well.

    A pipe, a device and a link (`/dev/stdout`) are not replaced, but written to.
    """
    if path.is_symlink() or (path.exists() and not path.is_file()):
        yield path
        return
    draft = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        yield draft
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
