"""Start-up (target 9): processes that import the package, or print the command's help."""

from __future__ import annotations

import resource
import statistics
import subprocess
import sys
from collections.abc import Iterator

from benchmarks.measure import Row

__all__ = ["rows"]

EMPTY_TYPER = "import typer; app = typer.Typer(); app.command()(lambda: None); app(['--help'])"
HELP = "import sys; sys.argv = ['rollout-log', '--help']; from rollout_log.cli import main; main()"


def cpu_of(code: str) -> float:
    """Return the CPU seconds of a Python process that runs this."""

    def used() -> float:
        usage = resource.getrusage(resource.RUSAGE_CHILDREN)
        return usage.ru_utime + usage.ru_stime

    before = used()
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)
    return used() - before


def rows(*, quick: bool = False) -> Iterator[Row]:
    """Measure target 9; a process that does nothing is subtracted from all."""
    codes = ["pass", "import msgspec", "import rollout_log", EMPTY_TYPER, HELP]
    times: list[list[float]] = [[] for _ in codes]
    for _ in range(2 if quick else 15):
        for code, found in zip(codes, times, strict=True):
            found.append(cpu_of(code))
    nothing, msgspec, package, typer, command = map(statistics.median, times)
    yield Row("9", "import rollout_log", "import msgspec", (package - nothing) / (msgspec - nothing), 1.0)
    yield Row(
        "9",
        "rollout-log --help",
        "help of an empty typer program",
        (command - nothing) / (typer - nothing),
        1.0,
    )
