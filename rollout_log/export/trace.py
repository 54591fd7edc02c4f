"""vime's and slime's trace carrier: a dump of samples whose `trace` their timeline viewer draws.

To a name that ends in `.pt` it is what the viewer opens (`tools/trace_timeline_viewer.py DUMP.pt`), which
takes PyTorch to write; to any other the same as JSON. The samples have what the viewer shows and no
tokens: it is no dump to train from.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rollout_log.ascii_json import to_json
from rollout_log.errors import RolloutLogError
from rollout_log.export.samples import Options, Sample, text_file, whole
from rollout_log.extras import missing
from rollout_log.fold import Rollout
from rollout_log.request import Request
from rollout_log.times import first_token_ns, request_end_ns, sample_span_ns

__all__ = ["carrier", "dump", "write"]

JSON = dict[str, Any]
VERSION = 1
# A request's span is named as the trainers' own metrics look it up.
_SPANS = {"vllm": "vllm_generate", "sglang": "sglang_generate"}


def write(samples: Iterable[Sample], path: Path, options: Options) -> None:
    """Write the dump. Raises RolloutLogError where PyTorch is needed and missing."""
    data = dump(samples, options.step)
    if path.suffix != ".pt":
        with text_file(path) as file:
            file.write(to_json(data) + "\n")
        return
    try:
        import torch
    except ImportError as error:
        raise RolloutLogError(missing("a .pt file", "torch", error) + "; another name gives JSON") from error
    with whole(path) as draft:
        torch.save(data, draft)


def dump(samples: Iterable[Sample], step: int | None) -> JSON:
    """Return samples in the shape of the trainers' debug dumps."""
    return {"rollout_id": step, "samples": [_sample(sample) for sample in samples]}


def _sample(sample: Sample) -> JSON:
    rollout = sample.rollout
    opened, closed = rollout.opened, rollout.closed
    return {
        "group_index": opened.group_index if opened else None,
        "index": opened.index if opened else None,
        "status": (closed.status if closed else None) or rollout.status,
        "reward": closed.reward if closed else None,
        "response_length": len(rollout.choice_or_first().token_ids),
        "source": sample.entry.name,
        "metadata": {
            "run": sample.entry.ref.run,
            "step": rollout.step,
            "parent": opened.parent if opened else None,
        },
        "trace": carrier(sample),
    }


def carrier(sample: Sample) -> JSON:
    """Return a sample's trace: one span for it, one in it for each request, points for what went wrong."""
    rollout, ref = sample.rollout, sample.entry.ref
    opened = rollout.opened
    identity = f"{ref.run}\0{ref.key}\0{ref.incarnation}".encode("utf-8", "surrogatepass")
    trace = _Trace(
        hashlib.blake2b(identity, digest_size=16).hexdigest(),
        opened.index if opened else None,
        opened.group_index if opened else None,
    )
    began, ended = sample_span_ns(rollout)
    sample_span = trace.start("sample", began, None, {"key": sample.entry.name})
    for request in rollout.requests:
        _add_request(trace, rollout, request, sample_span)
    for mark in rollout.marks:
        if mark.marked_unix_ns:
            trace.add("event", mark.name, mark.marked_unix_ns, attrs=mark.fields)
    if rollout.status != "pending":
        attrs = {"status": rollout.status, "response_length": len(rollout.choice_or_first().token_ids)}
        trace.add("span_end", "sample", ended, span_id=sample_span, attrs=attrs)
    # The viewer nests by the order of the events.
    trace.events.sort(key=lambda event: event["ts"])
    return {
        "version": VERSION,
        "trace_id": trace.trace_id,
        "events": trace.events,
        "sample_id": trace.sample_id,
        "group_id": trace.group_id,
        "attempt": trace.attempt,
    }


def _add_request(trace: _Trace, rollout: Rollout, request: Request, parent: str) -> None:
    if request.cause in ("retry", "resume"):
        trace.attempt += 1
        trace.add("event", "attempt_start", request.sent_unix_ns, attrs={"attempt": trace.attempt})
    name = _SPANS.get(request.dialect, "generate")
    attrs: JSON = {"cause": request.cause, "base": request.base, "weight_version": request.weight_version}
    span = trace.start(name, request.sent_unix_ns, parent, attrs)
    first = first_token_ns(request)
    if first is not None:
        trace.add("event", "first_token", first)
    ended = request_end_ns(rollout, request)
    if ended is None:
        return
    usage = request.usage or {}
    outcome = rollout.ended_of(request) or "superseded"
    ends = {
        "ended": outcome,
        "http_status": request.http_status,
        "detail": request.error or request.detail,
        "completion_tokens": request.tokens,
        "prompt_tokens": usage.get("prompt_tokens"),
        "request_id": request.request_id,
        "e2e_latency": (ended - request.sent_unix_ns) / 1e9,
    }
    if outcome != "finished":
        trace.add("event", outcome, ended)
    known = {name: value for name, value in ends.items() if value is not None}
    trace.add("span_end", name, ended, span_id=span, attrs=known)


class _Trace:
    """A carrier while it is filled."""

    def __init__(self, trace_id: str, sample_id: int | None, group_id: int | None) -> None:
        self.trace_id = trace_id
        self.sample_id = sample_id
        self.group_id = group_id
        self.attempt = 0
        self.events: list[JSON] = []
        self._spans = 0

    def start(self, name: str, ns: int, parent: str | None, attrs: JSON) -> str:
        span_id = f"{self.trace_id[:16]}{self._spans:016x}"
        self._spans += 1
        self.add("span_start", name, ns, span_id=span_id, parent_span_id=parent, attrs=attrs)
        return span_id

    def add(self, kind: str, name: str, ns: int, **more: Any) -> None:
        event = {
            "type": kind,
            "name": name,
            "ts": ns / 1e9,
            "trace_id": self.trace_id,
            "sample_id": self.sample_id,
            "group_id": self.group_id,
            "attempt": self.attempt,
        }
        self.events.append(event | {name: value for name, value in more.items() if value})
