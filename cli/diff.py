"""Compare two samples, or one sample in two logs, token by token.

Shows the first token that differs, how far log-probs are apart before it, and the requests side by side.

Exit status: 0 where tokens, log-probs, loss mask and status are the same, 1 where they are not.

Example:

    rollout-log diff runs/today math-17 math-18
    rollout-log diff runs/today math-17 --in runs/yesterday
    rollout-log diff runs/today math-17@0 math-17 --json | jq .response.position
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Annotated

import typer

from rollout_log.cli import _arguments as arguments
from rollout_log.cli._output import console, print_json, safe
from rollout_log.cli._table import print_table
from rollout_log.cli._tokenizer import Decode
from rollout_log.cli.show import sample_view, tokenizer_for
from rollout_log.comparison import Comparison, Difference, Side, compare
from rollout_log.counting import several
from rollout_log.errors import SampleNotFound
from rollout_log.sources import open_source
from rollout_log.versions import version_words
from rollout_log.view import RequestView, SampleView

_CONTEXT = 8
"""Tokens shown on either side of the first one that differs."""


def run(
    log: arguments.LogPath,
    key: Annotated[str, typer.Argument(metavar="KEY", help="One sample's name.")],
    other: Annotated[
        str | None, typer.Argument(metavar="OTHER", help="The other's; by default the same.")
    ] = None,
    *,
    other_log: Annotated[
        Path | None, typer.Option("--in", metavar="LOG2", help="The log of the other; by default the same.")
    ] = None,
    tokenizer: arguments.Tokenizer = None,
    json: arguments.Json = False,
) -> None:
    if other is None and other_log is None:
        raise typer.BadParameter("name another sample, or another log with --in")
    a, decode = _read(log, key, tokenizer)
    b, _ = _read(other_log or log, other or key, tokenizer)
    found = compare(a, b)
    if json:
        print_json(found)
    else:
        _print(found, a, b, decode)
    raise typer.Exit(0 if found.same else 1)


def _read(log: Path, key: str, tokenizer: str | None) -> tuple[SampleView, Decode | None]:
    with open_source(log) as reader:
        try:
            ref = arguments.find(reader, key)
        except SampleNotFound as error:
            if not Path(key).exists():
                raise
            raise SampleNotFound(f"{error}; another log is named with --in {key}") from error
        rollout = reader.rollout(ref)
    return sample_view(rollout, ref), tokenizer_for(rollout, tokenizer)


def _print(found: Comparison, a: SampleView, b: SampleView, decode: Decode | None) -> None:
    _print_sides(found.a, found.b)
    print()
    _print_tokens("prompt", found.prompt, a.prompt_token_ids, b.prompt_token_ids, decode)
    _print_tokens("response", found.response, a.token_ids, b.token_ids, decode)
    if found.loss_mask is not None:
        print(f"loss mask: differs from token {found.loss_mask:,} on")
    _print_logprobs(found)
    print()
    _print_requests(found.a, found.b)


def _weights(side: Side) -> str:
    return ", ".join(map(version_words, side.weight_versions))


def _print_sides(a: Side, b: Side) -> None:
    rows: list[tuple[str, object, object]] = [
        ("sample", a.key, b.key),
        ("run", a.run, b.run),
        ("life", a.incarnation, b.incarnation),
        ("status", a.status, b.status),
        ("finish", a.finish_reason, b.finish_reason),
        ("stop", a.stop_reason, b.stop_reason),
        ("prompt tokens", a.prompt_tokens, b.prompt_tokens),
        ("response tokens", a.tokens, b.tokens),
        ("weights", _weights(a), _weights(b)),
        ("problems", ", ".join(a.problems), ", ".join(b.problems)),
    ]
    print_table(
        ["", "a", "b", ""],
        [
            [name, ours, theirs, "" if ours == theirs else "≠"]
            for name, ours, theirs in rows
            if ours or theirs
        ],
    )


def _print_tokens(
    what: str, at: Difference | None, a: list[int], b: list[int], decode: Decode | None
) -> None:
    out = console()
    if at is None:
        out.print(f"{what}: the same {several(len(a), 'token')}")
        return
    same = several(at.position, "token")
    where = f"the same for {same}, then" if at.position else "different from the first token on"
    out.print(f"{what}: {where}", style="bold red")
    start = max(at.position - _CONTEXT, 0)
    for name, ids in (("a", a), ("b", b)):
        part = ids[start : at.position + _CONTEXT]
        dots = ("… " if start else "", " …" if at.position + _CONTEXT < len(ids) else "")
        print(f"  {name}  " + dots[0] + _marked(part, at.position - start) + dots[1])
        if decode is not None:
            print("     " + safe(repr(decode(part))))


def _marked(token_ids: list[int], at: int) -> str:
    """Show ids, the one at a position in brackets; `[end]` where there is none."""
    shown = [f"[{token}]" if i == at else str(token) for i, token in enumerate(token_ids)]
    return " ".join(shown if at < len(shown) else [*shown, "[end]"])


def _print_logprobs(found: Comparison) -> None:
    logprobs = found.logprobs
    shown = []
    if logprobs.differing:
        shown.append(
            f"{logprobs.differing:,} of {logprobs.compared:,} differ, by {logprobs.mean:.3g} on average and "
            f"{logprobs.largest:.3g} at token {logprobs.largest_at:,}"
        )
    elif logprobs.compared:
        shown.append(f"the same for {several(logprobs.compared, 'token')}")
    if logprobs.missing:
        shown.append(f"missing on one side for {several(logprobs.missing, 'token')}")
    print(f"log-probs: {'; '.join(shown) or 'none to compare'}")


def _print_requests(a: Side, b: Side) -> None:
    def half(request: RequestView | None) -> list[object]:
        if request is None:
            return [""] * 4
        return [request.cause, request.base, request.ended or "open", request.tokens]

    header = ["cause", "base", "ended", "tokens"]
    print_table(
        ["request", *(f"a {name}" for name in header), *(f"b {name}" for name in header)],
        [
            [number, *half(ours), *half(theirs)]
            for number, (ours, theirs) in enumerate(itertools.zip_longest(a.requests, b.requests))
        ],
        right=["request", "a base", "a tokens", "b base", "b tokens"],
        spare=["a base", "b base", "a cause", "b cause"],
    )
