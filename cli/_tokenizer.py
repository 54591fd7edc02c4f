"""Token ids to text, a piece a token: for reading, from whatever tokenizer is at hand.

The libraries are imported when a tokenizer is asked for; neither is needed otherwise. A name out of a
log is looked up on this machine alone, and no code that comes with a tokenizer is run. A name that was
asked for is looked up here first; only then is the hub asked, once and not for long.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from queue import Empty, Queue
from typing import Any

from rollout_log.errors import RolloutLogError
from rollout_log.extras import missing

__all__ = ["Decode", "TokenizerNotFound", "load_tokenizer", "pieces"]

Decode = Callable[[Sequence[int]], str]
"""Token ids -> text, special tokens included. Ids it does not know give no text."""

_LONGEST_CHARACTER = 8
"""Tokens that are waited for to make a whole character; UTF-8 needs four."""
_REPLACEMENT = "\ufffd"
_PATIENCE_S = 3.0
"""How long the hub may take to say that it is there."""
_QUIET = {
    "TRANSFORMERS_VERBOSITY": "error",  # else it says that it misses PyTorch
    "HF_HUB_VERBOSITY": "error",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",  # else it calls the hub even for what is read on this machine
}
"""What keeps the libraries from writing to stderr and calling home, where the environment says nothing."""


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
        elif name.startswith((os.sep, ".")):  # a path, and no name on the hub
            raise FileNotFoundError(f"there is no tokenizer.json at {path}")
        else:
            tokenizer = _named(name, download=download)
    except TokenizerNotFound:
        raise
    except ImportError as error:
        raise TokenizerNotFound(missing("text", "tokenizer", error)) from error
    except Exception as error:  # the libraries raise whatever comes, bare Exception included
        raise TokenizerNotFound(f"no tokenizer can be made of {name!r}: {_first_line(error)}") from error

    def decode(token_ids: Sequence[int]) -> str:
        return str(tokenizer.decode([i for i in token_ids if 0 <= i < 1 << 32], skip_special_tokens=False))

    return decode


def _named(name: str, *, download: bool) -> Any:
    """Return the tokenizer of a name on the hub, as the tokenizers library has it."""
    for setting, value in _QUIET.items():
        os.environ.setdefault(setting, value)
    from transformers import AutoTokenizer

    try:
        found = AutoTokenizer.from_pretrained(name, local_files_only=True)
    except Exception as error:
        if not download:
            if isinstance(error, OSError):  # which speaks of a connection that nobody tried
                raise TokenizerNotFound(
                    f"the tokenizer {name!r} is not on this machine; --tokenizer takes a tokenizer.json, "
                    "a model's directory, or a name to ask the hub for"
                ) from error
            raise
        _ask_hub(name)
        found = AutoTokenizer.from_pretrained(name)
    return found.backend_tokenizer


def _ask_hub(name: str) -> None:
    """Find out whether the hub has a model, in one attempt. Raises TokenizerNotFound.

    The libraries would try for most of a minute. In a thread, since no time-out of a connection holds for
    the name server.
    """
    from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url
    from huggingface_hub.errors import EntryNotFoundError

    answers: Queue[Exception | None] = Queue()

    def ask() -> None:
        try:
            get_hf_file_metadata(hf_hub_url(name, "tokenizer.json"))
        except EntryNotFoundError:  # the model is there, and its tokenizer has another form
            answers.put(None)
        except Exception as error:
            answers.put(error)
        else:
            answers.put(None)

    threading.Thread(target=ask, name="rollout-log-hub", daemon=True).start()
    try:
        failed = answers.get(timeout=_PATIENCE_S)
    except Empty:
        failed = TimeoutError(f"no answer for {_PATIENCE_S:g} s")
    if failed is not None:
        raise TokenizerNotFound(
            f"{name!r} is no file or directory here and no downloaded model, and {constants.ENDPOINT} "
            f"did not give it: {_reason(failed)}; give a tokenizer.json or a model's directory"
        ) from failed


def _reason(error: Exception) -> str:
    status = getattr(getattr(error, "response", None), "status_code", None)
    if status in {401, 403, 404}:
        return f"HTTP {status}, it has no such model, or not for this HF_TOKEN"
    return f"HTTP {status}" if status is not None else _first_line(error)


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0].rstrip(".")


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
