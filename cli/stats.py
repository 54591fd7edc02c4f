"""Print a log in numbers: sizes, rates, latencies, what sealing would gain.

Sizes and counts are of the whole log. Latencies, the timeline and compression are measured on samples
picked evenly over it. The loss window is how long tokens waited to be committed: what a killed process
loses at most. What was imported or sealed says nothing of it.

Example:

    rollout-log stats runs/today
    rollout-log stats runs/today --samples 0 --json | jq .first_token.p99
"""

from __future__ import annotations

from typing import Annotated

import typer

from rollout_log.cli._arguments import Json, LogPath
from rollout_log.cli._output import print_facts, print_json, size
from rollout_log.cli._times import clock, duration
from rollout_log.counting import several
from rollout_log.sources import open_source
from rollout_log.statistics import Distribution, Moment, Statistics, measure

_BARS = "▁▂▃▄▅▆▇█"


def run(
    log: LogPath,
    *,
    samples: Annotated[int, typer.Option(min=0, help="How many samples to look into; 0: all.")] = 1000,
    json: Json = False,
) -> None:
    with open_source(log) as reader:
        found = measure(reader, samples or None)
    if json:
        print_json(found)
    else:
        _print(found)


def _print(found: Statistics) -> None:
    statuses = ", ".join(f"{count:,} {status}" for status, count in found.statuses.items())
    facts: dict[str, str | None] = {
        "samples": f"{found.samples:,}" + (f": {statuses}" if statuses else ""),
        "requests": f"{found.requests:,}",
        "tokens": f"{found.tokens:,}" + (f", and {found.discarded:,} thrown away" if found.discarded else ""),
        "time": _time(found),
        "tokens a second": _rate(found.tokens_per_second),
        "over time": _timeline(found.timeline),
        "first token": _spread(found.first_token),
        "between tokens": _spread(found.between_tokens),
        "loss window": _spread(found.loss_window),
        "on disk": f"{size(found.disk_bytes)} in {_files(found)}",
        "responses": f"{size(found.response_bytes)} as they arrived",
        "blocks": _blocks(found),
        "sealing": _sealing(found),
    }
    if found.looked_at < found.samples:
        facts["looked into"] = f"{several(found.looked_at, 'sample')}, for all but counts and sizes"
    print_facts({name: value for name, value in facts.items() if value is not None})


def _time(found: Statistics) -> str | None:
    if not found.began_unix_ns:
        return None
    seconds = (found.updated_unix_ns - found.began_unix_ns) / 1e9
    without = (
        f"; without {several(found.undated, 'sample')} of fixtures, which have no date"
        if 0 < found.undated < found.samples
        else ""
    )
    return f"{clock(found.began_unix_ns)}, for {duration(seconds)}{without}"


def _rate(rate: float | None) -> str | None:
    return None if rate is None else f"{rate:,.0f} on average"


def _spread(found: Distribution) -> str | None:
    if not found.count:
        return None
    shown = [duration(value) for value in (found.median, found.p99, found.largest)]
    return f"median {shown[0]}, 99th percentile {shown[1]}, largest {shown[2]}"


def _timeline(moments: list[Moment]) -> str | None:
    rates = [moment.tokens / moment.seconds for moment in moments]
    if not any(rates):
        return None
    bars = "".join(_BARS[round(rate / max(rates) * (len(_BARS) - 1))] for rate in rates)
    return f"{bars} ({duration(moments[0].seconds)} each, at most {max(rates):,.0f} a second)"


def _files(found: Statistics) -> str:
    if not found.writers:
        return several(found.segments, "file")
    return f"{several(found.segments, 'segment')} of {several(found.writers, 'writer')}"


def _blocks(found: Statistics) -> str | None:
    if found.events_per_block is None:
        return None
    share = found.block_bytes / found.event_bytes if found.event_bytes else 1
    return f"{found.events_per_block:.1f} events each, compressed to {share:.0%}"


def _sealing(found: Statistics) -> str | None:
    if not found.block_bytes or not found.sealed_bytes:
        return None
    if found.sealed_bytes >= found.block_bytes:
        return "done"
    return f"would leave about {size(found.sealed_disk_bytes)} of {size(found.disk_bytes)}"
