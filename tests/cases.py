"""The small stream cases in `data/cases`, and what each says must come out."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from raw_server import RawStream
from rollout_log.view import SampleView

FOLDER = Path(__file__).parent / "data" / "cases"
PATHS = {"vllm": "/inference/v1/generate", "sglang": "/generate"}


@dataclass(frozen=True)
class Case:
    """One sample: what the client sends, what the engine answers, and the right result."""

    name: str
    path: str
    requests: list[dict[str, Any]]
    expect: dict[str, Any]

    def streams(self) -> list[bytes]:
        return [_stream(request) for request in self.requests]

    @property
    def splits(self) -> bool:
        return any("splits" in request for request in self.requests)

    def variants(self) -> Iterator[list[RawStream]]:
        """Every way in which the responses may be cut into reads; one way only, unless all are called for."""
        streams = self.streams()
        ends = [_END[request["end"]] for request in self.requests]
        cuts: list[list[int] | None] = [None]
        bodies = [streams]
        if self.splits:
            longest = max(map(len, streams))
            cuts += [[1] * longest, *([at] for at in range(1, longest))]
            bodies.append([stream.replace(b"\r\n", b"\r") for stream in streams])
        for versions in bodies:
            for reads in cuts:
                yield [
                    RawStream(body=body, reads=reads, end=end)
                    for body, end in zip(versions, ends, strict=True)
                ]


_END: dict[str, Any] = {"eof": "eof", "incomplete": "incomplete", "reset": "reset", "cancel": "hang"}


def _stream(request: dict[str, Any]) -> bytes:
    if "stream_base64" in request:
        return base64.b64decode(request["stream_base64"])
    return request["stream"].encode()


@cache
def load(name: str) -> Case:
    data = json.loads((FOLDER / f"{name}.json").read_text())
    return Case(name, PATHS[data["engine"]], data["requests"], data["expect"])


def names() -> list[str]:
    return sorted(path.stem for path in FOLDER.glob("*.json"))


def check(expect: dict[str, Any], sample: SampleView, choices: list[SampleView]) -> None:
    """Assert that a sample, and its choices' views, are what a case expects."""
    shown = json.loads(msgspec.json.encode(sample))
    found = {problem["code"] for problem in shown["problems"]}
    for name, value in expect.items():
        if name == "problems":
            assert set(value) <= found
        elif name == "problems_not":
            assert not set(value) & found
        elif name == "status_not":
            assert shown["status"] not in value
        elif name == "deltas":
            assert sum(request["deltas"] for request in shown["requests"]) == value
        elif name == "children":
            assert len(choices) == len(value)
            for one, view in zip(value, choices, strict=True):
                check(one, view, [])
        elif name == "requests":
            assert len(shown["requests"]) == len(value)
            for one, request in zip(value, shown["requests"], strict=True):
                _check_request(one, request)
        else:
            assert shown[name] == value, name


def _check_request(expect: dict[str, Any], request: dict[str, Any]) -> None:
    for name, value in expect.items():
        if name == "detail_contains":
            assert value in request["detail"]
        else:
            assert request[name] == value, name
