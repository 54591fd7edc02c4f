"""One line of a listing: what `ls --json` prints of a sample, from its summary alone."""

from __future__ import annotations

import msgspec

from rollout_log.log import Entry

__all__ = ["SampleLine", "line"]


class SampleLine(msgspec.Struct):
    """A sample in brief."""

    name: str
    """What finds it: the key, or `KEY@n` for an older life of it."""
    key: str
    incarnation: int
    run: str
    parent: str | None
    status: str
    trainer_status: str | None
    step: int | None
    """Its latest."""
    evaluation: bool
    group_index: int | None
    index: int | None
    prompt_tokens: int
    tokens: int
    """Of the response, over all choices."""
    discarded: int
    """Tokens that were generated and thrown away."""
    finish_reason: str | None
    requests: int
    resumes: int
    resumed_from: int | None
    """The step it began in, where that is an earlier one."""
    retries: dict[str, int]
    """How the requests that were retried had ended, and how many of each."""
    versions: list[str]
    """Weight versions of the response, in order."""
    problems: dict[str, int]
    """How often each problem code occurred."""
    errors: int
    """Problems of severity error."""
    events: int
    bytes: int
    """Of response bodies, as they arrived."""
    opened_unix_ns: int
    updated_unix_ns: int
    """When it last began, ended a request, or was closed."""


_SAME = set(SampleLine.__struct_fields__) - {"name", "incarnation"}


def line(entry: Entry) -> SampleLine:
    """Return a sample in brief."""
    same = {name: getattr(entry.summary, name) for name in _SAME}
    return SampleLine(name=entry.name, incarnation=entry.ref.incarnation, **same)
