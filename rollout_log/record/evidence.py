"""What a stream that ended without a finish reason must have ended for. Pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

from rollout_log.counting import several
from rollout_log.engines import RequestInfo

__all__ = ["Evidence", "evidence_of_finish"]


class Evidence(NamedTuple):
    """A finish reason, and what it is concluded from."""

    finish_reason: str
    evidence: str


def evidence_of_finish(
    info: RequestInfo, tokens: Sequence[int], *, eos_token_ids: Collection[int] = (), text: str | None = None
) -> Evidence | None:
    """Return the finish that a request's output proves, None without evidence.

    `tokens`: what this request generated. `text`: its text, where the caller can decode it.
    """
    if info.max_tokens is not None and len(tokens) >= info.max_tokens > 0:
        return Evidence("length", f"the limit was {several(info.max_tokens, 'token')}")
    if not tokens:
        return None
    last = tokens[-1]
    params: dict[str, Any] = info.sampling_params
    stops = params.get("stop_token_ids") or ()
    if last in stops:
        return Evidence("stop", f"the last token is the stop token {last}")
    if last in eos_token_ids and not params.get("ignore_eos"):
        return Evidence("stop", f"the last token is the end-of-sequence token {last}")
    if text is not None:
        strings = params.get("stop") or ()
        for stop in (strings,) if isinstance(strings, str) else strings:
            if stop and text.endswith(stop):
                return Evidence("stop", f"the text ends with the stop string {stop!r}")
    return None
