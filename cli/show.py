"""Show one sample: its requests, its tokens and who made them, its problems.

KEY is the sample's newest life, KEY@n an older one, KEY#i choice i of several, KEY~k a child. Prompt and
response are text where the log names a tokenizer that is on this machine, or --tokenizer gives one. On a
terminal the tokens are coloured by their probability.

Example:

    rollout-log show runs/today math-17
    rollout-log show runs/today math-17 --tokenizer /models/qwen3
    rollout-log show runs/today 'math-17#2' --json | jq .problems
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Annotated

import typer

from rollout_log.ascii_json import to_json
from rollout_log.cli import _arguments as arguments
from rollout_log.cli._output import print_facts, print_json, safe
from rollout_log.cli._response import print_prompt, print_response
from rollout_log.cli._table import print_table
from rollout_log.cli._times import clock, duration
from rollout_log.cli._tokenizer import Decode, TokenizerNotFound, load_tokenizer
from rollout_log.counting import several
from rollout_log.errors import SampleNotFound
from rollout_log.events import Event, Requested
from rollout_log.fold import Rollout
from rollout_log.log import Ref
from rollout_log.problems import PROBLEMS, Problem
from rollout_log.sources import open_source
from rollout_log.view import SampleView, view
from rollout_log.words import Said, words_in


def run(
    log: arguments.LogPath,
    key: Annotated[str, typer.Argument(metavar="KEY", help="The sample's name, as `ls` prints it.")],
    tokenizer: arguments.Tokenizer = None,
    json: arguments.Json = False,
) -> None:
    with open_source(log) as reader:
        ref = arguments.find(reader, key)
        rollout = reader.rollout(ref)
        words = [] if json else words_asked(reader.events(ref))
    decode = tokenizer_for(rollout, tokenizer)
    if json:
        print_json(sample_view(rollout, ref, decode))
    else:
        print_sample(rollout, ref, decode, words)


def words_asked(events: Iterable[tuple[int, Event]]) -> list[Said]:
    """Return what a sample's first request says in words."""
    return words_in(next((event.body for _, event in events if isinstance(event, Requested)), b""))


def _check_choice(rollout: Rollout, ref: Ref) -> None:
    if ref.choice is not None and ref.choice not in rollout.choices:
        there = ", ".join(f"{ref.key}#{index}" for index in rollout.choices)
        raise SampleNotFound(f"sample {ref.key!r} has no choice {ref.choice}; there are {there}")


def tokenizer_for(rollout: Rollout, given: str | None) -> Decode | None:
    """Load the tokenizer that was asked for, else the one the log names, where it is at hand."""
    if given is not None:
        return load_tokenizer(given, download=True)
    named = rollout.opened.metadata.get("tokenizer") if rollout.opened else None
    if not isinstance(named, str) or not named:
        return None
    try:
        return load_tokenizer(named)
    except TokenizerNotFound as error:
        print(f"rollout-log: token ids instead of text: {safe(error)}", file=sys.stderr)
        return None


def sample_view(rollout: Rollout, ref: Ref, decode: Decode | None = None) -> SampleView:
    """Return the sample as `schema` describes it. Raises SampleNotFound for a choice that never was."""
    _check_choice(rollout, ref)
    name = ref.key if ref.choice is None else f"{ref.key}#{ref.choice}"
    found = view(rollout, name=name, choice=ref.choice)
    found.incarnation, found.run = ref.incarnation, ref.run
    if decode is not None and found.token_ids:
        found.text = decode(found.token_ids)
    return found


def print_sample(rollout: Rollout, ref: Ref, decode: Decode | None, words: Sequence[Said]) -> None:
    """Print a sample as it stands; `words` are what its first request says."""
    _check_choice(rollout, ref)
    several = len(rollout.choices) > 1
    choice = rollout.choice(ref.choice) if ref.choice is not None else rollout.choice_or_first()
    _print_facts(rollout, ref)
    _print_requests(rollout)
    print()
    print_prompt(rollout.prompt_token_ids, decode, words)
    print()
    if several and ref.choice is None:
        _print_choices(rollout, ref)
    else:
        print_response(rollout, choice, decode)
    _print_problems(rollout.problems)


def _print_facts(rollout: Rollout, ref: Ref) -> None:
    opened, closed = rollout.opened, rollout.closed
    name = ref.key if ref.choice is None else f"{ref.key}#{ref.choice}"
    status = rollout.status if ref.choice is None else rollout.status_of(rollout.choice(ref.choice))
    facts: dict[str, object] = {
        "sample": name,
        "status": status,
        "trainer": closed.status if closed else None,
        "run": ref.run,
        "life": ref.incarnation or None,
        "parent": opened.parent if opened else None,
        "step": rollout.step,
        "evaluation": "yes" if rollout.evaluation else None,
        "group": opened.group_index if opened else None,
        "index": opened.index if opened else None,
        "reward": to_json(closed.reward) if closed and closed.reward is not None else None,
        "began": clock(opened.opened_unix_ns) if opened else None,
        "events": rollout.events,
        "thrown away": several(rollout.discarded, "token") if rollout.discarded else None,
    }
    if opened and opened.continues:
        facts["continues"] = f"life {opened.continues[0]}, after {several(opened.continues[1], 'token')}"
    print_facts({name: value for name, value in facts.items() if value is not None})


def _print_requests(rollout: Rollout) -> None:
    print()
    print_table(
        ["request", "cause", "base", "step", "HTTP", "ended", "tokens", "first token", "took", "detail"],
        (
            [
                request.number,
                request.cause,
                request.base,
                request.step,
                request.http_status,
                rollout.end_in_a_word(request),
                request.tokens,
                duration(_seconds(request.first_time)),
                duration(_seconds(request.last_time)),
                request.error or request.detail,
            ]
            for request in rollout.requests
        ),
        right=["request", "base", "step", "HTTP", "tokens", "first token", "took"],
        spare=["first token", "took", "step", "HTTP"],
    )


def _print_choices(rollout: Rollout, ref: Ref) -> None:
    print_table(
        ["choice", "status", "tokens", "finish"],
        (
            [f"{ref.key}#{index}", rollout.status_of(choice), len(choice.token_ids), choice.finish_reason]
            for index, choice in sorted(rollout.choices.items())
        ),
        right=["tokens"],
    )


def _print_problems(problems: Sequence[Problem]) -> None:
    if not problems:
        return
    worst_first = sorted(problems, key=lambda problem: _SEVERITY.index(problem.severity))
    print()
    print_table(
        ["problem", "severity", "where", "what"],
        ([problem.code, problem.severity, _place(problem), problem.message] for problem in worst_first),
    )
    print("\nWhat it means for training:")
    print_facts({problem.code: PROBLEMS[problem.code].meaning for problem in worst_first})


_SEVERITY = ("error", "warning", "info")


def _place(problem: Problem) -> str:
    request = None if problem.request is None else f"request {problem.request}"
    position = None if problem.position is None else f"token {problem.position:,}"
    return ", ".join(part for part in (request, position) if part)


def _seconds(microseconds: int | None) -> float | None:
    return None if microseconds is None else microseconds / 1e6
