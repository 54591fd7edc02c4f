"""JSON Lines: a sample a line, as `show --json` has it; of several choices each is one."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from rollout_log.ascii_json import to_json
from rollout_log.export.samples import Options, Sample, text_file, views

__all__ = ["write"]


def write(samples: Iterable[Sample], path: Path, options: Options) -> None:
    """Write a line a sample."""
    with text_file(path) as file:
        for sample in samples:
            for view in views(sample, options.decode):
                file.write(to_json(view) + "\n")
