"""Measure everything: `make bench`, or `python -m benchmarks [--quick] [--output FILE] [TOPIC …]`.

Prints a line for each figure as it is found, and writes the table as Markdown. `--quick` takes far too few
runs for the figures to mean anything: it checks that they can be had.
"""

from __future__ import annotations

import argparse
from importlib import import_module
from pathlib import Path

from benchmarks.measure import Row

TOPICS = (
    "hot_path",
    "streaming",
    "short_requests",
    "plain_loop",
    "writing",
    "reading",
    "replaying",
    "growth",
    "starting",
    "long_sample",
)
"""Modules here, each with a function `rows`; sizes have a table of their own (`benchmarks.size`)."""
HEADER = "| target | what | baseline | measured | limit | met |\n|---|---|---|---:|---:|---|\n"


def line(row: Row) -> str:
    """Return a row of the table."""
    unit = "" if row.unit == "×" else f" {row.unit}"
    sign = "≥" if row.at_least else "≤"
    limit = "" if row.limit is None else f"{sign} {number(row.limit)}{unit}"
    met = {None: "", True: "yes", False: "**no**"}[row.met]
    return f"| {row.target} | {row.what} | {row.baseline} | {number(row.value)}{unit} | {limit} | {met} |"


def number(value: float) -> str:
    """Format with three digits that count."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def main() -> None:
    """Parse the command line and measure."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks")
    parser.add_argument("topics", nargs="*", metavar="TOPIC", help=f"of {', '.join(TOPICS)}; default: all")
    parser.add_argument("--quick", action="store_true", help="only check that it runs")
    parser.add_argument(
        "--output", type=Path, default=Path(".cache/benchmarks.md"), help="where the table goes"
    )
    options = parser.parse_args()
    lines = []
    for topic in options.topics or TOPICS:
        for row in import_module(f"benchmarks.{topic}").rows(quick=options.quick):
            lines.append(line(row))
            print(lines[-1], flush=True)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(HEADER + "\n".join(lines) + "\n")
    print(f"written to {options.output}")


if __name__ == "__main__":
    main()
