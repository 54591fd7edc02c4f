"""What a stand-in engine answers: pure functions of the prompt, the absolute position and the weight version.

A token depends on (prompt, position) and a log-prob on (prompt, position, version) as well, so a token that
was lost, doubled or generated twice shows, and so does a log-prob that belongs to another token or version.
Positions count from the first response token, over all requests, turns and resumptions.

The vocabulary is bytes: half of the text consists of characters of three bytes, that is of three tokens, so
a cut lands inside of a character two times out of three.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterable, Sequence
from functools import lru_cache

__all__ = [
    "ANSWER",
    "EOS",
    "TOOL",
    "Tokenizer",
    "ends_at",
    "expected_logprob",
    "expected_tokens",
    "holds_at",
    "prompt_text",
    "split_prompt",
    "version_of",
]

EOS, ANSWER, IMAGE = 0, 1, 2
"""Ends a response; ends a prompt (so the engine can tell the two apart); stands for a piece of an image."""
BYTES = 3
"""Id of byte 0."""
TOOL = 300
"""First of the ids that only an environment uses."""

_SPECIAL = {"<|end|>": EOS, "<|answer|>": ANSWER, "<|image|>": IMAGE}
_SPECIAL_TEXT = {number: text for text, number in _SPECIAL.items()}


def prompt_text(number: int, *, tokens: int | None = None, hold: int | None = None) -> str:
    """A prompt whose answer ends with EOS as its token number `tokens`, or runs until it is stopped.

    With `hold`, a request that starts before that position waits there for an abort (`EngineDouble`).
    """
    ending = "endless" if tokens is None else f"{tokens} tokens"
    return f"Question {number}, {ending}{'' if hold is None else f', hold at {hold}'}.<|answer|>"


class Tokenizer:
    """Bytes as tokens, with three special ones. `decoded` counts the tokens that decode was given."""

    eos_token_id = EOS
    all_special_ids = (EOS, ANSWER, IMAGE)
    name_or_path = "tiny"

    def __init__(self) -> None:
        self.decoded = 0

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        ids: list[int] = []
        for part in re.split(r"(<\|\w+\|>)", text):
            if part in _SPECIAL:
                ids.append(_SPECIAL[part])
            else:
                ids += (BYTES + byte for byte in part.encode())
        return ids

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        self.decoded += len(token_ids)
        return decode(token_ids, skip_special_tokens=skip_special_tokens)


def decode(token_ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
    parts = bytearray()
    for number in token_ids:
        if number >= TOOL:
            parts += b"[%d]" % number
        elif number >= BYTES:
            parts.append(number - BYTES)
        elif not skip_special_tokens:
            parts += _SPECIAL_TEXT[number].encode()
    return parts.decode(errors="replace")


def split_prompt(token_ids: Sequence[int]) -> tuple[list[int], list[int]]:
    """(prompt, response so far) of what a request sent."""
    cut = token_ids.index(ANSWER) + 1 if ANSWER in token_ids else len(token_ids)
    return list(token_ids[:cut]), list(token_ids[cut:])


def ends_at(prompt: Sequence[int]) -> int | None:
    """Length of the whole response, EOS included; None when only a limit ends it."""
    return _says(tuple(prompt), r"(\d+) tokens")


def holds_at(prompt: Sequence[int]) -> int | None:
    return _says(tuple(prompt), r"hold at (\d+)")


@lru_cache(maxsize=4096)
def _says(prompt: tuple[int, ...], pattern: str) -> int | None:
    found = re.search(pattern, decode(prompt))
    return int(found[1]) if found else None


@lru_cache(maxsize=4096)
def _seed(prompt: tuple[int, ...]) -> int:
    return zlib.crc32(repr(prompt).encode())


def expected_tokens(prompt: Sequence[int], start: int, count: int) -> list[int]:
    """Tokens [start, start + count), fewer where the response ends."""
    key = tuple(prompt)
    seed, end = _seed(key), ends_at(key)
    stop = start + count if end is None else min(start + count, end)
    return [EOS if end is not None and at == end - 1 else _token(seed, at) for at in range(start, stop)]


def _token(seed: int, position: int) -> int:
    slot, place = divmod(position, 3)
    draw = zlib.crc32(b"%d:%d" % (seed, slot))
    if draw & 1:
        return BYTES + ord("a") + (draw >> (8 * place)) % 26
    return BYTES + chr(0x4E00 + draw % 20_000).encode()[place]


def expected_logprob(prompt: Sequence[int], position: int, version: str) -> float:
    """In (-8, 0): never 0.0, and no two versions agree."""
    draw = zlib.crc32(f"{_seed(tuple(prompt))}:{position}:{version}".encode())
    return -8.0 * (draw + 1) / (2**32 + 1)


def version_of(prompt: Sequence[int], position: int, logprob: float, versions: Iterable[str]) -> str | None:
    """Which weight version gave this log-prob to the token at `position`; None: no one did."""
    return next((each for each in versions if expected_logprob(prompt, position, each) == logprob), None)
