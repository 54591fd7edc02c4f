"""Chrome's trace events, which ui.perfetto.dev opens: a track a sample, its requests nested in it.

Async events that share category and id nest on one track; a sample's id is its number in the file.
Times are microseconds since 1970.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from rollout_log.ascii_json import to_json
from rollout_log.events import Delta
from rollout_log.export.samples import Options, Sample, text_file
from rollout_log.fold import Rollout
from rollout_log.request import Request
from rollout_log.times import first_token_ns, request_end_ns, sample_span_ns, version_starts_ns

__all__ = ["trace_events", "write"]

JSON = dict[str, Any]


def write(samples: Iterable[Sample], path: Path, options: Options) -> None:
    """Write a trace file, an event at a time."""
    with text_file(path) as file:
        file.write('{"displayTimeUnit":"ms","traceEvents":[')
        for number, event in enumerate(trace_events(samples, chunks=options.chunks)):
            file.write(("," if number else "") + "\n" + to_json(event))
        file.write("\n]}\n")


def trace_events(samples: Iterable[Sample], *, chunks: bool = False) -> Iterator[JSON]:
    """Yield the events of a trace: a process a run, a track a sample."""
    runs: dict[str, int] = {}
    versions: dict[tuple[int, str], int] = {}
    for number, sample in enumerate(samples, 1):
        run = sample.entry.ref.run
        if run not in runs:
            runs[run] = len(runs) + 1
            yield {"ph": "M", "name": "process_name", "pid": runs[run], "tid": 0, "args": {"name": run}}
        track = _Track(runs[run], number)
        yield from _sample_events(sample, track)
        if chunks:
            yield from _chunk_events(sample, track)
        for version, sent_ns in version_starts_ns(sample.rollout):
            key = runs[run], version
            versions[key] = min(versions.get(key, sent_ns), sent_ns)
    for (pid, version), sent_ns in sorted(versions.items(), key=lambda item: item[1]):
        name = f"weights {version}"
        yield {
            "ph": "i",
            "s": "p",
            "cat": "weights",
            "name": name,
            "pid": pid,
            "tid": 0,
            "ts": sent_ns // 1000,
        }


class _Track:
    """Where a sample's events go."""

    def __init__(self, pid: int, number: int) -> None:
        self._place = {"cat": "sample", "id": f"0x{number:x}", "pid": pid, "tid": 0}

    def event(self, phase: str, name: str, ns: int, args: JSON | None = None) -> JSON:
        event = {"ph": phase, "name": name, **self._place, "ts": ns // 1000}
        return event if args is None else {**event, "args": args}


def _sample_events(sample: Sample, track: _Track) -> Iterator[JSON]:
    rollout, name = sample.rollout, sample.entry.name
    began, ended = sample_span_ns(rollout)
    opened, closed = rollout.opened, rollout.closed
    facts = {
        "status": rollout.status,
        "trainer_status": closed.status if closed else None,
        "step": rollout.step,
        "group_index": opened.group_index if opened else None,
        "index": opened.index if opened else None,
        "parent": opened.parent if opened else None,
        "tokens": sum(len(choice.token_ids) for choice in rollout.choices.values()),
        "thrown_away": rollout.discarded,
        "problems": ", ".join(sorted({problem.code for problem in rollout.problems})),
    }
    yield track.event("b", name, began, facts)
    for request in rollout.requests:
        yield from _request_events(rollout, request, track, ended)
    for mark in rollout.marks:
        if mark.marked_unix_ns:
            yield track.event("n", mark.name, mark.marked_unix_ns, mark.fields)
    yield track.event("e", name, ended)


def _request_events(rollout: Rollout, request: Request, track: _Track, last: int) -> Iterator[JSON]:
    name = f"request {request.number}: {request.cause}"
    outcome = rollout.ended_of(request)
    ended = request_end_ns(rollout, request)
    facts = {
        "base": request.base,
        "http_status": request.http_status,
        "ended": outcome,
        "detail": request.error or request.detail,
        "tokens": request.tokens,
        "weight_version": request.weight_version,
        "step": request.step,
        "request_id": request.request_id,
    }
    yield track.event("b", name, request.sent_unix_ns, facts)
    if request.cause in ("retry", "resume"):
        yield track.event("n", request.cause, request.sent_unix_ns, {"base": request.base})
    first = first_token_ns(request)
    if first is not None:
        yield track.event("n", "first token", first)
    end = last if ended is None else ended
    if outcome not in {None, "finished"}:
        yield track.event("n", str(outcome), end, {"detail": request.error or request.detail})
    yield track.event("e", name, end)


def _chunk_events(sample: Sample, track: _Track) -> Iterator[JSON]:
    sent = {request.number: request.sent_unix_ns for request in sample.rollout.requests}
    for number, event in sample.events():
        if isinstance(event, Delta) and event.number in sent:
            ns = sent[event.number] + 1000 * event.time
            yield track.event("n", "chunk", ns, {"event": number, "bytes": len(event.data)})
