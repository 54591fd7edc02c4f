"""Which weights made the tokens of an exchange, from whichever place its engine says it in."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

from rollout_log.replay.recording import RecordedExchange

__all__ = ["spans_of", "versions_of"]


def versions_of(exchange: RecordedExchange) -> list[str | None]:
    """Return the weight version of each token of the first choice; None where nothing says it."""
    versions: list[str | None] = []
    for frame in exchange.decoded:
        for delta in frame.choices:
            if delta.index == 0:
                versions += [frame.weight_version] * len(delta.token_ids)
    for frame in exchange.decoded:
        for delta in frame.choices:
            if delta.index == 0:
                for span in delta.weight_versions or ():
                    end = min(span.end, len(versions))
                    versions[span.start : end] = [span.version] * max(end - span.start, 0)
    known = exchange.requested.weight_version
    return [known if version is None else version for version in versions]


def spans_of(versions: Sequence[str | None], otherwise: str) -> list[dict[str, Any]]:
    """Return versions by token as vLLM's spans; a token of no version is of `otherwise`."""
    spans: list[dict[str, Any]] = []
    for version, run in groupby(otherwise if version is None else version for version in versions):
        start = spans[-1]["end"] if spans else 0
        spans.append({"version": version, "start": start, "end": start + len(list(run))})
    return spans
