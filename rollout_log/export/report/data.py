"""What a page shows, gathered sample by sample; its size is bounded."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from hashlib import blake2b
from pathlib import Path

import msgspec

from rollout_log.errors import RolloutLogError
from rollout_log.export.report.arrivals import TICK_NS, follow
from rollout_log.export.report.page import pack, parts
from rollout_log.export.report.sample import Lane, Prompt, detail_of, lane_of, unreadable
from rollout_log.export.report.vocabulary import Vocabulary
from rollout_log.export.samples import Decode, text_file
from rollout_log.fold import Rollout
from rollout_log.log import Entry, LogReader
from rollout_log.log.summary import Summary
from rollout_log.problems import PROBLEMS
from rollout_log.times import version_starts_ns
from rollout_log.versions import version_words
from rollout_log.words import Said, words_in

__all__ = ["Histogram", "Overview", "Rate", "Report", "by_interest"]

_MOST_BINS = 2000
"""Of the plot of tokens per second."""
_BIN = 0.25
_BINS = 64
"""Of the histogram of log-probs: from 0 down to -16."""


class Rate(msgspec.Struct):
    """Tokens that came, by stretches of time; kept or not."""

    start: float
    bin: float
    """Milliseconds."""
    tokens: list[int]


class Histogram(msgspec.Struct):
    """Log-probs of generated tokens: `tokens[i]` of them lie from -(i + 1) * bin to -i * bin."""

    bin: float
    tokens: list[int]
    less: int = 0
    missing: int = 0


class Overview(msgspec.Struct):
    """What the page reads when it opens."""

    step: int | None
    origin: float
    """ms since 1970 of time 0."""
    start: float
    end: float
    """Of the step's requests."""
    versions: list[tuple[str, float]]
    """Weight versions, and when the first request of each was sent."""
    rate: Rate
    logprobs: Histogram
    problems: dict[str, tuple[str, str]]
    """Code -> severity, meaning."""
    vocabulary: dict[int, str] | None
    left_out: int
    """Samples without their tokens, since the page was full."""
    limit: int
    """Bytes that details may take."""
    lanes: list[Lane]


def by_interest(entries: Iterable[Entry]) -> list[Entry]:
    """Sort samples: where something went wrong first, so that these keep their tokens in a full page."""
    return sorted(entries, key=lambda entry: _uneventful(entry.summary))


def _uneventful(summary: Summary) -> bool:
    good = summary.status in {"completed", "truncated"}
    return good and not (summary.problems or summary.retries or summary.resumes)


class Report:
    """A page in the making."""

    def __init__(
        self,
        reader: LogReader,
        step: int | None = None,
        decode: Decode | None = None,
        limit: int = 40_000_000,
    ) -> None:
        """`step` None: of no step in particular. `limit`: bytes of packed tokens that the page may have."""
        self._reader = reader
        self._step = step
        self._limit = limit
        self._vocabulary = Vocabulary(decode) if decode else None
        self._origin: int | None = None
        self._lanes: list[Lane] = []
        self._packed: list[str] = []
        self._bytes = 0
        self._prompts: dict[bytes, int] = {}
        self._ticks: Counter[int] = Counter()
        self._versions: dict[str, int] = {}
        self._logprobs = Histogram(_BIN, [0] * _BINS)
        self.left_out = 0
        """Samples whose tokens found no place."""

    def add(self, entry: Entry) -> None:
        """Take a sample in; one that cannot be read is shown as that."""
        if self._origin is None:
            self._origin = entry.summary.opened_unix_ns
        try:
            followed = follow(self._reader, entry.ref)
        except RolloutLogError as error:
            self._lanes.append(unreadable(entry, str(error), self._clock))
            return
        rollout = followed.rollout
        lane = lane_of(entry, rollout, self._clock)
        self._lanes.append(lane)
        self._ticks.update(followed.ticks)
        self._count_logprobs(rollout)
        for version, sent_ns in version_starts_ns(rollout):
            self._versions[version] = min(self._versions.get(version, sent_ns), sent_ns)
        if self._bytes < self._limit:
            lane.prompt = self._keep_prompt(rollout.prompt_token_ids, words_in(followed.asked or b""))
            lane.detail = self._keep(pack(detail_of(followed, self._vocabulary, self._clock)))
        else:
            self.left_out += 1

    def write(self, path: Path) -> None:
        """Write the page."""
        data = {
            "title": iter(["All steps" if self._step is None else f"Step {self._step}"]),
            "overview": iter([pack(self.overview())]),
            "details": (line + "\n" for line in self._packed),
        }
        with text_file(path) as file:
            file.writelines(parts(data))

    def overview(self) -> Overview:
        """Return what the page reads when it opens."""
        start, end = self._span()
        return Overview(
            step=self._step,
            origin=(self._origin or 0) / 1e6,
            start=start,
            end=end,
            versions=sorted(
                ((version_words(version), self._clock(ns)) for version, ns in self._versions.items()),
                key=lambda found: found[1],
            ),
            rate=self._rate(),
            logprobs=self._logprobs,
            problems={code: (known.severity, known.meaning) for code, known in PROBLEMS.items()},
            vocabulary=self._vocabulary.texts if self._vocabulary else None,
            left_out=self.left_out,
            limit=self._limit,
            lanes=sorted(self._lanes, key=lambda lane: (lane.began, lane.name)),
        )

    def _clock(self, ns: int) -> float:
        return round((ns - (self._origin or 0)) / 1e6, 1)

    def _span(self) -> tuple[float, float]:
        """When the step's requests were; all requests, where none is known to be of it."""
        bars = [bar for lane in self._lanes for bar in lane.bars]
        bars = [bar for bar in bars if self._step is not None and bar.step == self._step] or bars
        return min((bar.sent for bar in bars), default=0.0), max((bar.end for bar in bars), default=1.0)

    def _keep(self, packed: str) -> int:
        self._packed.append(packed)
        self._bytes += len(packed)
        return len(self._packed) - 1

    def _keep_prompt(self, token_ids: list[int], words: list[Said]) -> int:
        """Keep a prompt once, however many samples have it."""
        joined = self._vocabulary.add(token_ids) if self._vocabulary else {}
        packed = pack(Prompt(token_ids, joined, words))
        digest = blake2b(packed.encode(), digest_size=16).digest()
        if digest not in self._prompts:
            self._prompts[digest] = self._keep(packed)
        return self._prompts[digest]

    def _count_logprobs(self, rollout: Rollout) -> None:
        found = self._logprobs
        for choice in rollout.choices.values():
            for logprob, trained in zip(choice.logprobs, choice.loss_mask, strict=True):
                if not trained:
                    continue
                if math.isnan(logprob):
                    found.missing += 1
                elif logprob > -_BIN * _BINS:
                    found.tokens[int(-min(logprob, 0.0) / _BIN)] += 1
                else:
                    found.less += 1

    def _rate(self) -> Rate:
        if not self._ticks:
            return Rate(0.0, 1.0, [])
        first, last = min(self._ticks), max(self._ticks)
        width = -(-(last - first + 1) // _MOST_BINS)
        tokens = [0] * ((last - first) // width + 1)
        for tick, count in self._ticks.items():
            tokens[(tick - first) // width] += count
        return Rate(self._clock(first * TICK_NS), width * TICK_NS / 1e6, tokens)
