"""What listing a sample needs without touching a block."""

from __future__ import annotations

import msgspec

__all__ = ["Summary", "decode_summary", "encode_summary"]


class Summary(msgspec.Struct, array_like=True, omit_defaults=False, gc=False):
    """One row of the samples table: written when a sample opens, ends and closes, not every window.

    A msgpack array; fields are only ever added at the end, each with a default.
    """

    key: str = ""
    run: str = ""
    incarnation: int = 0
    """As the writer declared it; a reader numbers the lives of a key over all writers."""
    parent: str | None = None
    status: str = "pending"
    step: int | None = None
    evaluation: bool = False
    group_index: int | None = None
    index: int | None = None
    tokens: int = 0
    requests: int = 0
    events: int = 0
    opened_unix_ns: int = 0
    updated_unix_ns: int = 0
    problems: dict[str, int] = {}
    """How often each problem code occurred."""
    errors: int = 0
    """Problems of severity error."""
    retries: dict[str, int] = {}
    """How the requests that were retried had ended, and how many of each."""
    resumes: int = 0
    discarded: int = 0
    """Tokens that were generated and thrown away."""
    versions: list[str] = []
    """Weight versions of the response in order, each where it differs from the one before."""
    finish_reason: str | None = None
    trainer_status: str | None = None
    prompt_tokens: int = 0
    resumed_from: int | None = None
    """The trainer's step that the sample went on from."""
    bytes: int = 0
    """Response bytes as they arrived."""
    spans: list[tuple[int, int, int]] = []
    """Where requests were in several steps: each step, when its first request was sent and when its last one
    that was followed by another ended, in ns since 1970."""


encode_summary = msgspec.msgpack.Encoder().encode
decode_summary = msgspec.msgpack.Decoder(Summary).decode
