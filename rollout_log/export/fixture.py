"""A fixture: a text file of whole samples, for tests, reviews and bug reports (`rollout_log.fixture`)."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from rollout_log.export.samples import Options, Sample
from rollout_log.fixture import write_fixture
from rollout_log.fixture.files import write_lines

__all__ = ["write"]


def write(samples: Iterable[Sample], path: Path, options: Options) -> None:
    """Write samples of one log, and the older lives they continue."""
    found = list(samples)
    if found:
        write_fixture(found[0].reader, [each.entry for each in found], path, redact=options.redact)
    else:
        write_lines(path, ())
