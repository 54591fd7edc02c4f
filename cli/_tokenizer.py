"""Token ids to text, a piece a token: for reading, from whatever tokenizer is at hand.

The libraries are imported when a tokenizer is asked for; neither is needed otherwise. A name out of a
log is looked up on this machine alone, and no code that comes with a tokenizer is run.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rollout_log.errors import RolloutLogError

__all__ = ["Decode", "TokenizerNotFound", "load_tokenizer", "pieces"]

Decode = Callable[[Sequence[int]], str]
"""Token ids -> text, special tokens included. Ids it does not know give no text."""

_LONGEST_CHARACTER = 8
"""Tokens that are waited for to make a whole character; UTF-8 needs four."""
_REPLACEMENT = "\ufffd"


class TokenizerNotFound(RolloutLogError):
    """No tokenizer could be made of what was given."""


def load_tokenizer(name: str, *, download: bool = False) -> Decode:
    """Return what decodes with the tokenizer of that name: a tokenizer.json, a directory, a name on the hub.

    `download`: the hub may be asked. Raises TokenizerNotFound.
    """
    path = Path(name)
    file = path / "tokenizer.json" if path.is_dir() else path
    try:
        if file.is_file():
            from tokenizers import Tokenizer

            tokenizer: Any = Tokenizer.from_file(os.fspath(file))
        else:
            if name.startswith((os.sep, ".")):  # a path, and no name on the hub
                raise FileNotFoundError(f"there is no tokenizer.json at {path}")
            os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # else it says that it misses PyTorch
            from transformers import AutoTokenizer

            tokenizer = AutoTokenizer.from_pretrained(name, local_files_only=not download).backend_tokenizer
    except ImportError as error:
        raise TokenizerNotFound(
            f"text needs the library {error.name!r}: install the extra `tokenizer` "
            "(in a checkout: pip install '.[tokenizer]')"
        ) from error
    except Exception as error:  # the libraries raise whatever comes, bare Exception included
        first = (str(error) or type(error).__name__).splitlines()[0]
        raise TokenizerNotFound(f"no tokenizer can be made of {name!r}: {first}") from error

    def decode(token_ids: Sequence[int]) -> str:
        return str(tokenizer.decode([i for i in token_ids if 0 <= i < 1 << 32], skip_special_tokens=False))

    return decode


def pieces(decode: Decode, token_ids: Sequence[int]) -> list[str]:
    """Return the text of each token; joined they are the whole.

    A character of several tokens belongs to its last one. Each piece is what the text grows by when the
    token joins a few tokens before it, since a token's text depends on its neighbours (leading spaces).
    """
    found: list[str] = []
    start = read = 0
    for end in range(1, len(token_ids) + 1):
        known, text = decode(token_ids[start:read]), decode(token_ids[start:end])
        late = end == len(token_ids) or end - read >= _LONGEST_CHARACTER
        if late or (len(text) > len(known) and not text.endswith(_REPLACEMENT)):
            found.append(text[len(known) :])
            start, read = read, end
        else:
            found.append("")
    return found
