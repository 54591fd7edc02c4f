"""A choice's tokens for people: as text or ids, coloured by log-prob, in spans, cut points marked.

Model text stands behind a bar, so that nothing a model says can pass for a line of this program.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from rollout_log.cli._output import console, safe
from rollout_log.cli._tokenizer import Decode, pieces
from rollout_log.counting import several
from rollout_log.fold import Rollout
from rollout_log.response import Choice, Origin, Run
from rollout_log.versions import version_words
from rollout_log.words import Said

if TYPE_CHECKING:
    from rich.text import Text

__all__ = ["print_prompt", "print_response"]

BAR = "│ "
CUT = "✂"
# Probability of the token at least this: its style.
_STYLES = ((0.9, ""), (0.5, "green"), (0.2, "yellow"), (0.05, "dark_orange"), (0.0, "bold red"))
_MISSING = "magenta underline"
_OBSERVED = "cyan"
_LEGEND = (
    (" ≥ 0.9 ", ""),
    (" ≥ 0.5 ", "green"),
    (" ≥ 0.2 ", "yellow"),
    (" ≥ 0.05 ", "dark_orange"),
    (" less ", "bold red"),
    (" no log-prob ", _MISSING),
    (" observed ", _OBSERVED),
)
_ORIGINS = {
    Origin.OBSERVED: "added by the environment",
    Origin.UNRECORDED: "generated while recording was off",
    Origin.INHERITED: "from an older life of the sample",
}


def print_prompt(token_ids: Sequence[int], decode: Decode | None, words: Sequence[Said] = ()) -> None:
    """Print the prompt's text, or its ids; where those do not read as text, the words that were asked."""
    from rich.text import Text

    out = console()
    out.print(f"prompt, {several(len(token_ids), 'token')}", style="bold")
    if token_ids:
        shown = decode(token_ids) if decode else " ".join(map(str, token_ids))
        _print_behind_bar(Text(safe(shown, keep="\n")))
    if words and not (token_ids and decode):
        out.print("what the client sent" if token_ids else "the client sent text and no tokens", style="dim")
        text = "\n".join(said.text if said.by is None else f"{said.by}: {said.text}" for said in words)
        _print_behind_bar(Text(safe(text, keep="\n")))


def print_response(rollout: Rollout, choice: Choice, decode: Decode | None) -> None:
    """Print the response span by span: who made it, with which weights, and where it was cut."""
    from rich.text import Text

    out = console()
    known = [logprob for logprob in choice.logprobs if not math.isnan(logprob)]
    mean = f", mean log-prob {sum(known) / len(known):.3f}" if known else ""
    out.print(f"response, {several(len(choice.token_ids), 'token')}{mean}", style="bold")
    if out.is_terminal and not out.no_color and choice.token_ids:
        legend = Text("probability")
        for label, style in _LEGEND:
            legend.append(label, style)
        out.print(legend)
    texts = pieces(decode, choice.token_ids) if decode else [f"{i} " for i in choice.token_ids]
    before: Run | None = None
    for run, start, end, version in _spans(rollout, choice):
        if before is not None and run is not before:
            _print_cut(rollout, before)
        before = run
        made = _ORIGINS.get(run.origin) or f"request {run.request}"
        weights = f", weights {safe(version_words(version))}" if version is not None else ""
        out.print(f"tokens {start:,} to {end:,}: {made}{weights}", style="dim")
        span = Text()
        for position in range(start, end):
            span.append(safe(texts[position], keep="\n"), _style(choice.logprobs[position], run.origin))
        _print_behind_bar(span)
    if not choice.token_ids and choice.wire_text:
        out.print("the engine sent text and no tokens", style="dim")
        _print_behind_bar(Text(safe("".join(choice.wire_text), keep="\n")))
    _print_end(rollout, choice)


def _spans(rollout: Rollout, choice: Choice) -> Iterator[tuple[Run, int, int, str | None]]:
    """Yield stretches of one origin and one weight version: (run, start, end, version)."""
    versions = choice.weight_versions(rollout.dispatched)
    for run in choice.runs:
        edges = {run.start, run.end}
        for span in versions:
            edges.update(edge for edge in (span.start, span.end) if run.start < edge < run.end)
        ordered = sorted(edges)
        for start, end in pairwise(ordered):
            version = next((span.version for span in versions if span.start <= start < span.end), None)
            yield run, start, end, version


def _style(logprob: float, origin: Origin) -> str:
    if origin is Origin.OBSERVED:
        return _OBSERVED
    if math.isnan(logprob):
        return _MISSING
    return next((style for least, style in _STYLES if logprob >= math.log(least or 1e-300)), "bold red")


def _print_cut(rollout: Rollout, run: Run) -> None:
    """Say why a span stops where it does, unless it was simply finished."""
    request = next((request for request in rollout.requests if request.number == run.request), None)
    if request is None:
        return
    ended = rollout.end_in_a_word(request)
    if ended != "finished":
        what = f"cut at token {run.end:,}: request {request.number} ended {ended}"
        _print_mark(what, request.error or request.detail)


def _print_end(rollout: Rollout, choice: Choice) -> None:
    request = rollout.request
    if request is None:
        return
    length = len(choice.token_ids)
    ended = rollout.end_in_a_word(request)
    if choice.finish_reason is not None and ended == "finished":
        stop = "" if choice.stop_reason is None else f" ({safe(choice.stop_reason)})"
        console().print(f"finished: {safe(choice.finish_reason)}{stop}", style="dim")
    elif ended == "open":
        console().print(f"open: token {length:,} is the last so far", style="dim")
    elif ended != "finished":
        what = f"cut at token {length:,}: request {request.number} ended {ended}"
        _print_mark(what, request.error or request.detail)


def _print_mark(what: str, detail: str | None) -> None:
    console().print(f"{CUT} {what}" + (f" ({safe(detail)})" if detail else ""), style="bold red")


def _print_behind_bar(text: Text) -> None:
    from rich.text import Text

    out = console()
    wrapped = text.wrap(out, max(out.width - len(BAR), 20)) if out.is_terminal else None
    for line in text.split("\n", allow_blank=True) if wrapped is None else wrapped:
        line.rstrip()
        out.print(Text.assemble((BAR, "dim"), line), no_wrap=True, overflow="ignore", crop=False)
