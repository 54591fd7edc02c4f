"""The text of the token ids that a page uses, each once."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from rollout_log.export.samples import Decode

__all__ = ["Vocabulary"]

_REPLACEMENT = "\ufffd"


class Vocabulary:
    """Token id -> text, filled as it is asked."""

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self.texts: dict[int, str] = {}

    def add(self, token_ids: Sequence[int]) -> dict[int, str]:
        """Learn the ids; return, by position, the text of those that have none of their own.

        These are parts of a character. Several in a row are read together, and the last one gets the
        text.
        """
        for token_id in {*token_ids} - self.texts.keys():
            self.texts[token_id] = self._text(token_id)
        partial = [_REPLACEMENT in self.texts[token_id] for token_id in token_ids]
        joined: dict[int, str] = {}
        for together, group in groupby(range(len(token_ids)), key=partial.__getitem__):
            positions = list(group)
            if together and len(positions) > 1:
                joined.update(dict.fromkeys(positions, ""))
                joined[positions[-1]] = self._decode(token_ids[positions[0] : positions[-1] + 1])
        return joined

    def _text(self, token_id: int) -> str:
        """Decode one token as it reads within a text: some tokenizers drop a leading space at the start."""
        once, twice = self._decode([token_id]), self._decode([token_id, token_id])
        return twice[len(once) :] if twice.startswith(once) else once
