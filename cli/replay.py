"""Play samples back: what was asked, what came, where it was cut and by what.

Tells each sample in order, also what was kept of a response and how it went on; with --speed at a multiple
of the recorded pace, frame by frame. --at-event and --at-time show the sample as it was then.

--check sends every recorded exchange through the real client code again and compares what comes of it with
the recording. --through calls your own generate function, of vime's signature, with the recording in the
engine's place. Exit status of both: 0 where all is as recorded, 1 where a field differs.

Example:

    rollout-log replay runs/today --step 12 --status aborted
    rollout-log replay runs/today math-17 --speed 1
    rollout-log replay runs/today math-17 --at-time 2.5
    rollout-log replay runs/today --check
    rollout-log replay runs/today math-17 --through my_rollout:generate
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Annotated

import msgspec
import typer

from rollout_log.ascii_json import to_json
from rollout_log.cli import _arguments as arguments
from rollout_log.cli._output import console, print_hanging, print_json, safe
from rollout_log.cli._progress import progress
from rollout_log.cli._times import clock, duration, parse_time
from rollout_log.cli._tokenizer import Decode
from rollout_log.cli.ls import status_of
from rollout_log.cli.show import print_sample, sample_view, tokenizer_for, words_asked
from rollout_log.counting import several
from rollout_log.errors import SampleNotFound
from rollout_log.fold import Rollout, fold
from rollout_log.log import Entry, LogReader
from rollout_log.replay.checking import CannotCheck, Difference, check_sample
from rollout_log.replay.narrative import Line, narrate, until
from rollout_log.replay.through import load_function, run_through
from rollout_log.sources import open_source


class Told(Line, kw_only=True):
    """What --json prints of each thing that happened."""

    sample: str
    """What finds it: `KEY`, or `KEY@n`."""


class Compared(msgspec.Struct):
    """What --json prints of each sample, with --check and --through."""

    sample: str
    run: str
    differences: list[Difference]
    """Fields that came out differently; empty where all is as recorded."""
    passed_over: str | None = None
    """Why the sample could not be compared."""


_LONGEST_WAIT_S = 10.0
_LONGEST = 200
"""Characters of a value that differs."""
_SHOWN = 6
"""Tokens shown at either end of a stretch."""


def run(
    log: arguments.LogPath,
    keys: Annotated[list[str] | None, typer.Argument(metavar="KEY", help="Only these samples.")] = None,
    *,
    step: Annotated[int | None, typer.Option(help="Only samples that took part in this step.")] = None,
    status: arguments.Status = None,
    speed: Annotated[
        float | None, typer.Option(metavar="X", help="At X times the recorded pace; default: at once.")
    ] = None,
    at_event: Annotated[
        int | None, typer.Option("--at-event", metavar="K", min=0, help="Show the sample after event K.")
    ] = None,
    at_time: Annotated[
        str | None,
        typer.Option("--at-time", metavar="T", help="Show it T seconds after it began, or at 22:30:05."),
    ] = None,
    check: Annotated[bool, typer.Option("--check", help="Send it through the client code again.")] = False,
    through: Annotated[
        str | None, typer.Option(metavar="MODULE:FUNCTION", help="Call this generate function with it.")
    ] = None,
    tokenizer: arguments.Tokenizer = None,
    json: arguments.JsonLines = False,
) -> None:
    if speed is not None and not speed > 0:
        raise typer.BadParameter(f"a speed is above 0, not {speed}")
    ways = arguments.given(
        {
            "--speed": speed,
            "--at-event": at_event,
            "--at-time": at_time,
            "--check": check,
            "--through": through,
        }
    )
    if len(ways) > 1:
        raise typer.BadParameter(f"{' and '.join(ways)} do not go together: give one of them")
    if check or through is not None:
        arguments.without(ways[0], {"--tokenizer": tokenizer})
    elif json and at_event is None and at_time is None:
        arguments.without("--json", {"--tokenizer": tokenizer})
    function = load_function(through) if through is not None else None
    with open_source(log) as reader:
        entries = arguments.chosen(reader, keys, step=step, status=status)
        if function is not None:
            _compare(entries, lambda entry: asyncio.run(run_through(function, reader, entry)), json=json)
        elif check:
            _compare(entries, lambda entry: asyncio.run(check_sample(reader, entry)), json=json)
        elif at_event is not None or at_time is not None:
            for number, entry in enumerate(entries):
                if number and not json:
                    print()
                _show_at(reader, entry, at_event, at_time, tokenizer, json=json)
        else:
            runs = len({entry.ref.run for entry in entries}) > 1
            for number, entry in enumerate(entries):
                if number and not json:
                    print()
                _tell(reader, entry, speed, tokenizer, json=json, run=entry.ref.run if runs else None)


# Telling


def _tell(
    reader: LogReader,
    entry: Entry,
    speed: float | None,
    tokenizer: str | None,
    *,
    json: bool,
    run: str | None,
) -> None:
    lines = narrate(reader.events(entry.ref), _state(reader, entry), each_frame=speed is not None)
    if speed is not None:
        lines = _paced(lines, speed)
    if json:
        for line in lines:
            print_json(Told(sample=entry.name, **msgspec.structs.asdict(line)))
        return
    decode = tokenizer_for(reader.rollout(entry.ref), tokenizer)
    title = f"{entry.name}: {status_of(entry.summary)}" + ("" if run is None else f", run {run}")
    began = clock(entry.summary.opened_unix_ns)
    console().print(safe(title) + (f", began {began}" if began else ""), style="bold")
    for line in lines:
        print_hanging(*_shown(line, decode), flush=speed is not None)


def _paced(lines: Iterable[Line], speed: float) -> Iterator[Line]:
    """Hold each line back until it is due; what is far apart is not waited for."""
    before = 0
    for line in lines:
        if before and line.clock_ns > before:
            time.sleep(min((line.clock_ns - before) / 1e9 / speed, _LONGEST_WAIT_S))
        before = line.clock_ns or before
        yield line


def _shown(line: Line, decode: Decode | None) -> tuple[str, str]:
    """Return when, and what."""
    if line.time == 0 and line.request is not None:
        return f"  request {line.request}, ", line.what
    at = f"+{duration(line.time / 1e6)}" if line.time is not None else ""
    tokens = f"  {_tokens(line.token_ids, decode)}" if line.token_ids else ""
    return f"    {at:>9}  ", line.what + tokens


def _tokens(token_ids: list[int], decode: Decode | None) -> str:
    head, tail = token_ids[:_SHOWN], token_ids[_SHOWN:][-_SHOWN:]
    gap = len(token_ids) > len(head) + len(tail)
    if decode is not None:
        parts = [decode(token_ids)] if not gap else [decode(head), decode(tail)]
        return " … ".join(repr(part) for part in parts)
    return " ".join([*map(str, head), *(["…"] if gap else []), *map(str, tail)])


# Time travel


def _show_at(
    reader: LogReader, entry: Entry, event: int | None, at: str | None, tokenizer: str | None, *, json: bool
) -> None:
    clock_ns = None if at is None else _clock(at, entry)
    events = list(until(reader.events(entry.ref), last=event, clock_ns=clock_ns))
    if clock_ns is not None and not events:
        late = duration((entry.summary.opened_unix_ns - clock_ns) / 1e9)
        print(f"rollout-log: {safe(entry.name)} had not begun then: it began {late} later", file=sys.stderr)
        return
    if event is not None and (not events or events[-1][0] < event):
        last = f"its last event is {events[-1][0]}" if events else "it has no events"
        raise SampleNotFound(f"there is no event {event} of sample {entry.name!r}: {last}")
    rollout = fold(events, _state(reader, entry))
    decode = tokenizer_for(rollout, tokenizer)
    if json:
        print_json(sample_view(rollout, entry.ref, decode))
        return
    number, latest = events[-1]
    whole = several(entry.summary.events, "event")
    console().print(f"as of event {number}, {type(latest).__name__}, of {whole}", style="bold")
    print_sample(rollout, entry.ref, decode, words_asked(events))


def _clock(text: str, entry: Entry) -> int:
    try:
        return entry.summary.opened_unix_ns + int(float(text) * 1e9)
    except (ValueError, OverflowError):
        pass
    try:
        return parse_time(text) or 0
    except typer.BadParameter as error:
        raise typer.BadParameter(f"{error}, or 2.5 for seconds after it began") from error


def _state(reader: LogReader, entry: Entry) -> Rollout | None:
    older = reader.continued(entry.ref)
    return None if older is None else Rollout.continue_from(reader.rollout(older[0]), older[1])


# Comparing


def _compare(entries: list[Entry], compare: Callable[[Entry], list[Difference]], *, json: bool) -> None:
    """Print what differs, sample by sample; exit 1 where anything does."""
    runs = len({entry.ref.run for entry in entries}) > 1
    differing = passed = 0
    for entry in progress("samples", entries, len(entries)):
        try:
            differences = compare(entry)
        except CannotCheck as error:
            passed += 1
            if json:
                print_json(Compared(entry.name, entry.ref.run, [], str(error)))
            print(f"rollout-log: passed over: {safe(error)}", file=sys.stderr)
            continue
        differing += bool(differences)
        run = f" (run {entry.ref.run})" if runs else ""
        if json:
            print_json(Compared(entry.name, entry.ref.run, differences))
        else:
            for each in differences:
                print(safe(f"{each.sample}{run}: {_differs(each)}"))
    if not json:
        checked = len(entries) - passed
        verdict = f"{differing} differ{'s' * (differing == 1)}" if differing else "all as recorded"
        print(
            f"{several(checked, 'sample')} replayed, {verdict}"
            + (f"; {passed} passed over" if passed else "")
        )
    raise typer.Exit(1 if differing else 0)


def _differs(difference: Difference) -> str:
    if difference.field == "raised":
        return f"the function raised {difference.replayed}"
    return f"{difference.field} is {_short(difference.replayed)}, recorded {_short(difference.recorded)}"


def _short(value: object) -> str:
    text = "absent" if value is None else to_json(value)
    if len(text) <= _LONGEST:
        return text
    return text[: _LONGEST - 2] + ('…"' if isinstance(value, str) else "…")
