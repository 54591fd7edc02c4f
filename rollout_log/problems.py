"""What can be wrong or noteworthy about a sample, how bad it is, and what it means for training.

One table: `verify` fails on errors only, `show` prints the meaning beside each problem.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, NamedTuple

import msgspec

__all__ = ["PROBLEMS", "Meaning", "Problem", "Severity", "count_codes", "problem"]

Severity = Literal["info", "warning", "error"]


class Meaning(NamedTuple):
    """What a problem code stands for."""

    severity: Severity
    meaning: str


PROBLEMS: dict[str, Meaning] = {
    "no_terminal": Meaning(
        "info", "the stream ended cleanly without a finish reason; the sample counts as aborted"
    ),
    "late_delta": Meaning(
        "info", "frames of an older request came after a newer one began; kept, never appended"
    ),
    "sentinel_logprob": Meaning(
        "info", "-9999.0 is the engine's clamp for minus infinity; mask these tokens"
    ),
    "response_trimmed": Meaning(
        "info", "the caller cut the end of a finished turn; the response was cut with it"
    ),
    "finish_inferred": Meaning("info", "the finish was concluded from evidence, the engine did not say it"),
    "version_assumed": Meaning(
        "info", "the engine told no weight version; the one known at dispatch is used"
    ),
    "error_after_finish": Meaning("info", "an error came after the finish; the sample itself is whole"),
    "null_logprob": Meaning(
        "warning", "the engine sent null for these log-probs; importance ratios are undefined"
    ),
    "budget_not_reduced": Meaning("warning", "a resumed request may generate past the sample's token limit"),
    "version_went_backwards": Meaning(
        "warning", "later tokens come from older weights; staleness is misjudged"
    ),
    "undecodable_frame": Meaning(
        "warning", "a frame could not be read; its tokens, if any, are not in the sample"
    ),
    "concurrent_request": Meaning(
        "warning", "a second request of the key came while one was open; it is a child"
    ),
    "missing_logprobs": Meaning(
        "error", "log-probs were asked for and did not come; do not train on these tokens"
    ),
    "length_mismatch": Meaning(
        "error", "a frame contradicts itself on its number of tokens; none were taken"
    ),
    "usage_mismatch": Meaning(
        "error", "the engine counts other tokens than it streamed; some were lost or doubled"
    ),
    "prompt_mismatch": Meaning(
        "error", "a request's tokens differ from what the engine had generated so far"
    ),
    "log_gap": Meaning("error", "tokens are missing in the log, or known without their log-probs"),
}


class Problem(msgspec.Struct, frozen=True):
    """One problem of one sample."""

    code: str
    severity: Severity
    request: int | None
    position: int | None
    """Of the first token concerned, in the response."""
    message: str


def problem(code: str, request: int | None, position: int | None, message: str) -> Problem:
    """Make a problem with the severity its code has."""
    return Problem(code, PROBLEMS[code].severity, request, position, message)


def count_codes(counts: dict[str, int], problems: Iterable[Problem]) -> None:
    """Add problems to counts by code."""
    for each in problems:
        counts[each.code] = counts.get(each.code, 0) + 1
