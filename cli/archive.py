"""Copy sealed segments to another place, such as a network file system.

The copies are under FOLDER/<name of the log>, which is a log like any other. What is there already is not
copied again; what is not sealed yet is named (`rollout-log seal`). Exit status: 1 where a copy failed.

Example:

    rollout-log archive runs/today /mnt/archive
    rollout-log ls /mnt/archive/today
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from rollout_log.cli._arguments import JsonLines, LogDirectory
from rollout_log.cli._output import print_json
from rollout_log.cli._progress import progress
from rollout_log.cli._table import print_table
from rollout_log.counting import several
from rollout_log.errors import RolloutLogError
from rollout_log.log.archive import archive_folder, archive_path
from rollout_log.log.directory import SEALED, check_outside, logs_at, segments_of, writers_of
from rollout_log.log.keeper import Done


def run(
    log: LogDirectory,
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Where to copy to; made where missing.")],
    *,
    json: JsonLines = False,
) -> None:
    for one in logs_at(log):
        check_outside(archive_path(one, folder))
    folders = [each for one in logs_at(log) for each in writers_of(one)]
    done = list(progress("archive", _copy(folders, folder), None))
    if json:
        print_json(*done)
    elif done:
        print_table(
            ["", "copy", "bytes", "detail"],
            ([each.what, each.path, f"{each.bytes:,}", each.detail] for each in done),
            right=["bytes"],
        )
    else:
        print("nothing to copy")
    unsealed = sum(path.suffix != SEALED for each in folders for path in segments_of(each))
    if unsealed:
        typer.echo(f"{several(unsealed, 'segment')} not sealed yet (rollout-log seal)", err=True)
    if any(each.what == "failed" for each in done):
        raise typer.Exit(1)


def _copy(folders: list[Path], archive: Path) -> Iterator[Done]:
    for folder in folders:
        try:
            for copy in archive_folder(folder, archive):
                size = copy.stat().st_size
                yield Done("archived", str(copy), size, size)
        except (RolloutLogError, OSError) as error:
            yield Done("failed", str(archive_path(folder.parent, archive) / folder.name), detail=str(error))
