"""Score centering: the distribution that each token was drawn from, beside the token.

With `top_p` 1 the log-probs of the `k` likeliest tokens, as arrays of shape (response, k); below that the
log-probs of the whole sampling set, beside its ids. They are read from the stream by a decoder of their own,
so that runs without pay nothing for them.
"""

from __future__ import annotations

from collections.abc import Iterable, MutableSequence
from typing import Any

import msgspec

from rollout_log.engines.wire import named_id
from rollout_log.errors import RolloutLogError
from rollout_log.sse import FrameSplitter
from rollout_log.trainer.arrays import rows_of
from rollout_log.trainer.host import Host, Unsupported

__all__ = ["Centering", "ask_for_heads"]


class _Entry(msgspec.Struct):
    logprob: float
    token: str = ""
    token_id: int | None = None

    @property
    def id(self) -> int | None:
        """None where the engine says the token as text."""
        return named_id(self.token) if self.token_id is None else self.token_id


class _Position(msgspec.Struct):
    top_logprobs: list[_Entry] = []


class _Logprobs(msgspec.Struct):
    content: list[_Position] | None = None


class _Choice(msgspec.Struct):
    token_ids: list[int] | None = None
    logprobs: _Logprobs | None = None
    sampling_mask: list[list[int]] | None = None
    sampling_mask_logprobs: list[list[float]] | None = None


class _Frame(msgspec.Struct):
    choices: list[_Choice] = []


_decode = msgspec.json.Decoder(_Frame).decode


def ask_for_heads(host: Host, args: Any, params: dict[str, Any]) -> Centering:
    """Add to a request's parameters what score centering needs; returns what reads it from the answer.

    Raises what the trainer's own check of the parameters raises, and `Unsupported` where it has none.
    """
    check = getattr(host.module("utils.score_centering"), "score_centering_request", None)
    if check is None:
        raise Unsupported("score centering", f"this {host.name} has none; turn off --use-score-centering")
    try:
        check(args, params)  # sets temperature and top_p where they were left out
    except ValueError as error:
        raise Unsupported("score centering", f"{error} (--use-score-centering)") from None
    if params["top_p"] != 1:
        return Centering(None)
    params["logprobs"] = args.score_centering_top_k + 1
    return Centering(args.score_centering_top_k)


class Centering:
    """Reads the rows of one call's tokens. `k` None: those of the sampling sets."""

    def __init__(self, k: int | None) -> None:
        self.k = k
        self._splitter = FrameSplitter()
        self._rows: list[tuple[list[int], list[float]]] = []
        """Of the tokens that the sample does not have yet."""

    def begin(self, sample: Any, base: int, start: int) -> None:
        """A request begins: the sample keeps `base` tokens of its response, `start` of them from before."""
        self._splitter, self._rows = FrameSplitter(), []
        fields = self._fields(sample, start)
        if self.k is not None:
            for values in fields:
                del values[base:]
        else:
            offsets = sample.rollout_top_p_token_offsets
            del fields[0][0 if offsets is None else int(offsets[base]) :]

    def feed(self, chunk: bytes) -> None:
        """A read of the response, whole or not."""
        for frame in self._splitter.feed(chunk):
            try:
                choices = _decode(frame.data).choices
            except msgspec.MsgspecError:
                continue
            for choice in choices:
                self._rows += self._read(choice)

    def extend(self, sample: Any, count: int, start: int) -> None:
        """The sample got `count` more tokens; they come after those it has rows of."""
        rows, self._rows = self._rows[:count], self._rows[count:]
        rows += [([], [])] * (count - len(rows))
        fields = self._fields(sample, start)
        if self.k is not None:
            fields[0].extend(ids for ids, _ in rows)
            fields[1].extend(logprobs for _, logprobs in rows)
            return
        for place, (ids, logprobs) in enumerate(rows, sample.response_length - count):
            fields[0].extend(logprobs)
            token = sample.tokens[len(sample.tokens) - sample.response_length + place]
            if token in ids:
                sample.rollout_log_probs[place] = logprobs[ids.index(token)]

    def finish(self, sample: Any, start: int) -> None:
        """Make arrays of the rows. Raises `RolloutLogError` where some did not come."""
        fields = self._fields(sample, start)
        if self.k is None:
            ids = sample.rollout_top_p_token_ids
            known = 0 if ids is None else len(ids)
            if len(fields[0]) != known or (sample.response_length and not known):
                raise RolloutLogError("sampling sets came without their log-probs (--use-score-centering)")
            sample.rollout_top_p_log_probs = rows_of(fields[0], None, "float32")
            return
        if any(len(row) != self.k for row in fields[0]):
            raise RolloutLogError(f"tokens came without their {self.k} likeliest (--use-score-centering)")
        sample.rollout_topk_token_ids = rows_of(fields[0], self.k, "int32")
        sample.rollout_topk_log_probs = rows_of(fields[1], self.k, "float32")

    def _read(self, choice: _Choice) -> list[tuple[list[int], list[float]]]:
        count = len(choice.token_ids or ())
        if self.k is None:
            pairs = zip(choice.sampling_mask or (), choice.sampling_mask_logprobs or (), strict=False)
            rows = [(ids, logprobs) for ids, logprobs in pairs if len(ids) == len(logprobs)]
        else:
            content = choice.logprobs.content if choice.logprobs is not None else None
            heads = [
                sorted(_logprobs_by_id(position.top_logprobs).items(), key=_by_logprob)
                for position in content or ()
            ]
            rows = [([i for i, _ in head[: self.k]], [x for _, x in head[: self.k]]) for head in heads]
        return [*rows[:count], *[([], [])] * (count - len(rows))]

    def _fields(self, sample: Any, start: int) -> list[MutableSequence[Any]]:
        """The sample's fields, as lists that grow."""
        names = (
            ("rollout_top_p_log_probs",)
            if self.k is None
            else ("rollout_topk_token_ids", "rollout_topk_log_probs")
        )
        for name in names:
            value = getattr(sample, name, None)
            if not isinstance(value, list):
                missing: list[Any] = [] if self.k is None else [[] for _ in range(start)]
                setattr(sample, name, missing if value is None else value.tolist())
        return [getattr(sample, name) for name in names]


def _logprobs_by_id(entries: Iterable[_Entry]) -> dict[int, float]:
    return {entry.id: entry.logprob for entry in entries if entry.id is not None}


def _by_logprob(item: tuple[int, float]) -> float:
    return -item[1]
