"""What a request means, whoever spells it: endpoint, token ids or text, parameters; never its ids.

Two requests mean the same when these are equal. Where they are not, `difference` says in what.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import msgspec

from rollout_log.engines import RequestInfo, dialect_for
from rollout_log.engines.wire import object_in

__all__ = ["Asked", "body_difference", "endpoint_of", "meaning_of", "parameter_differences"]

_ENDPOINTS = (
    "/inference/v1/generate",
    "/generate",
    "/v1/completions",
    "/v1/chat/completions/render",
    "/v1/chat/completions",
)
_BUDGETS = ("max_tokens", "max_new_tokens", "max_completion_tokens")
# A client that goes on lowers these by what it has, or leaves them.
_LOWERED = frozenset({*_BUDGETS, "min_tokens", "min_new_tokens"})
_IDENTITY = frozenset({"request_id", "rid", "user", "session_id", "session_params", "stream_options"})


class Asked(msgspec.Struct, frozen=True):
    """One request of a client."""

    endpoint: str
    body: bytes
    info: RequestInfo
    key: str | None = None
    """The sample the client named."""
    hint: str | None = None
    """A name that counts only where a sample has it: a session."""

    @classmethod
    def of(
        cls, method: str, path: str, body: bytes, *, key: str | None = None, hint: str | None = None
    ) -> Asked:
        """Read a request."""
        dialect = dialect_for(path)
        info = dialect.read_request(body) if dialect else RequestInfo()
        return cls(endpoint_of(method, path), body, info, key, hint)


def endpoint_of(method: str, path: str) -> str:
    """Return the path without a router's prefix, a query, or a slash after it."""
    path = path.partition("?")[0].rstrip("/")
    known = next((suffix for suffix in _ENDPOINTS if path.endswith(suffix)), path or "/")
    return known if method == "POST" else f"{method} {known}"


def meaning_of(body: bytes) -> str:
    """Return a JSON body in one spelling, without what only names the request; other bodies as they are."""
    found = object_in(body)
    if not found:
        return body.decode("latin-1")
    kept = {name: value for name, value in found.items() if name not in _IDENTITY and value is not None}
    return json.dumps(kept, sort_keys=True)


def parameter_differences(
    asked: RequestInfo, recorded: RequestInfo, *, at: int = 0, base: int = 0
) -> list[str]:
    """Return each parameter that differs, with both values.

    `at` and `base` are the response tokens each request starts from: a budget is compared by where it
    ends, or as it stands (a turn has its own).
    """
    found = []
    ours, theirs = asked.max_tokens, recorded.max_tokens
    if ours != theirs and not (
        ours is not None and theirs is not None and at != base and at + ours == base + theirs
    ):
        found.append(_differ("max_tokens", ours, theirs))
    if asked.model and recorded.model and asked.model != recorded.model:
        found.append(_differ("model", asked.model, recorded.model))
    if asked.n != recorded.n:
        found.append(_differ("n", asked.n, recorded.n))
    if asked.stream != recorded.stream:
        found.append(_differ("stream", asked.stream, recorded.stream))
    return found + _differences(
        {name: value for name, value in asked.sampling_params.items() if name not in _LOWERED},
        {name: value for name, value in recorded.sampling_params.items() if name not in _LOWERED},
    )


def body_difference(asked: bytes, recorded: bytes) -> tuple[int, str]:
    """Return how many fields of two bodies are equal, and the first that is not."""
    ours, theirs = object_in(asked), object_in(recorded)
    for name in _IDENTITY:
        ours.pop(name, None)
        theirs.pop(name, None)
    equal = sum(theirs.get(name) == value for name, value in ours.items() if value is not None)
    return equal, next(iter(_differences(ours, theirs)), "the bodies differ")


def _differences(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[str]:
    names = sorted(name for name in {*ours, *theirs} if ours.get(name) != theirs.get(name))
    return [_differ(name, ours.get(name), theirs.get(name)) for name in names]


def _differ(name: str, ours: Any, theirs: Any) -> str:
    return f"{name} is {_short(ours)}, recorded {_short(theirs)}"


def _short(value: Any) -> str:
    text = "absent" if value is None else json.dumps(value, ensure_ascii=True, default=str)
    return text if len(text) <= 80 else text[:77] + "…"
