"""One choice of a response as it grows: tokens, log-probs, where each token came from, weight versions.

Per token it keeps what differs per token; what holds for stretches of tokens (who made them, which
weights) is kept as stretches, so that extending costs the same whether a frame has one token or eight.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from enum import Enum

import msgspec

from rollout_log.counting import several
from rollout_log.engines import VersionSpan
from rollout_log.problems import Problem, count_codes, problem
from rollout_log.versions import number_of

__all__ = ["Choice", "Origin", "Run", "Settled"]

SENTINEL_LOGPROB = -9999.0
"""What vLLM sends for a log-prob of minus infinity."""


class Origin(str, Enum):
    """Who made a token."""

    GENERATED = "generated"
    OBSERVED = "observed"
    UNRECORDED = "unrecorded"
    """By the engine, while recording was off."""
    INHERITED = "inherited"
    """In an older life of the sample."""


class Run(msgspec.Struct):
    """A stretch [start, end) of response tokens with one origin."""

    origin: Origin
    request: int | None
    start: int
    end: int


class Settled(msgspec.Struct):
    """What is known for good of the tokens that were there when the latest request began.

    Only truncating them changes it, so that a sample of many turns is judged turn by turn, not all of it
    every time. No run, span or stretch crosses the end of what is settled.
    """

    length: int = 0
    runs: int = 0
    told: int = 0
    absent: int = 0
    problems: list[Problem] = []
    counts: dict[str, int] = {}
    """Of the problems, by code."""
    versions: list[str] = []
    """Weight versions in order, each where it differs from the one before."""

    def copy(self) -> Settled:
        """Return a copy that grows apart from this one."""
        return msgspec.structs.replace(
            self, problems=self.problems.copy(), counts=self.counts.copy(), versions=self.versions.copy()
        )


class Choice(msgspec.Struct):
    """One choice of n; positions count response tokens from 0."""

    index: int = 0
    token_ids: list[int] = []
    logprobs: list[float] = []
    """NaN where missing; as long as `token_ids`."""
    runs: list[Run] = []
    """Back to back, covering all tokens."""
    told: list[VersionSpan] = []
    """Weight versions as the engine told them; gaps where it did not."""
    absent: list[tuple[int, int]] = []
    """Stretches of generated tokens for which no log-prob came at all (a null did come elsewhere)."""
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    inferred: str | None = None
    """A finish reason that a caller concluded from evidence."""
    sampling_mask: list[list[int] | None] = []
    """Empty, or one entry per token; None where the engine gave none."""
    routed_experts: str | None = None
    """As the latest request told it, of all tokens from row `routed_experts_start` on."""
    routed_experts_start: int = 0
    wire_text: list[str] = []
    """Text as the engine sent it, of the latest request only."""
    settled: Settled = msgspec.field(default_factory=Settled)

    # Growing

    def begin(self) -> None:
        """A new request begins: what described the last one's end no longer holds."""
        self.finish_reason = self.stop_reason = self.inferred = None
        self.routed_experts, self.routed_experts_start = None, 0
        self.wire_text = []

    def extend(
        self, token_ids: Sequence[int], logprobs: Sequence[float] | None, origin: Origin, request: int | None
    ) -> None:
        """Append tokens; a short or absent list of log-probs fills the first of them."""
        count = len(token_ids)
        if not count:
            return
        start = len(self.token_ids)
        self.token_ids += token_ids
        if logprobs is not None and len(logprobs) == count:
            self.logprobs += logprobs
        else:
            known = min(len(logprobs), count) if logprobs else 0
            if known and logprobs:
                self.logprobs += logprobs[:known]
            self.logprobs += [math.nan] * (count - known)
            if origin is Origin.GENERATED:
                self._miss(start + known, start + count)
        if len(self.runs) > self.settled.runs:
            last = self.runs[-1]
            if last.request == request and last.origin is origin:
                last.end += count
                return
        self.runs.append(Run(origin, request, start, start + count))

    def extend_sampling_mask(self, mask: Sequence[list[int]], count: int) -> None:
        """Take the sampling sets of the last `count` tokens."""
        length = len(self.token_ids)
        self.sampling_mask += [None] * (length - count - len(self.sampling_mask))
        self.sampling_mask += mask[:count]

    def tell_version(self, version: str, start: int) -> None:
        """The engine says which weights made the tokens from `start` on."""
        end = len(self.token_ids)
        if len(self.told) > self.settled.told:
            last = self.told[-1]
            if last.version == version and last.end == start:
                self.told[-1] = VersionSpan(version, last.start, end)
                return
        self.told.append(VersionSpan(version, start, end))

    def tell_spans(self, spans: Sequence[VersionSpan], base: int) -> None:
        """The engine says it for a whole request, counted from `base`; that goes before single frames."""
        self.told[self.settled.told :] = _cut(self.told[self.settled.told :], base)
        for span in spans:
            start, end = base + max(span.start, 0), min(base + span.end, len(self.token_ids))
            if start < end:
                self.told.append(VersionSpan(span.version, start, end))

    def truncate(self, base: int) -> int:
        """Keep the first `base` tokens; return how many generated ones went."""
        if base >= len(self.token_ids):
            return 0
        base = max(base, 0)
        if base < self.settled.length:
            self.settled = Settled()
        gone = sum(
            run.end - max(run.start, base)
            for run in self.runs
            if run.end > base and run.origin is not Origin.OBSERVED
        )
        del self.token_ids[base:], self.logprobs[base:], self.sampling_mask[base:]
        self.runs = [run for run in self.runs if run.start < base]
        if self.runs:
            self.runs[-1].end = min(self.runs[-1].end, base)
        self.told = _cut(self.told, base)
        self.absent = [(start, min(end, base)) for start, end in self.absent if start < base]
        return gone

    def _miss(self, start: int, end: int) -> None:
        if len(self.absent) > self.settled.absent and self.absent[-1][1] == start:
            start = self.absent.pop()[0]
        self.absent.append((start, end))

    # What follows from it

    @property
    def loss_mask(self) -> list[int]:
        """1 for what the model generated, 0 for what the environment added; as long as `token_ids`."""
        mask: list[int] = []
        for run in self.runs:
            mask += [int(run.origin is not Origin.OBSERVED)] * (run.end - run.start)
        return mask

    def weight_versions(self, dispatched: dict[int, str]) -> list[VersionSpan]:
        """Return who made which tokens: as told, else as known at dispatch (request number -> version)."""
        return _merge(self.told, _assumed(self.runs, self.told, dispatched))

    def settle(self, wants_logprobs: Collection[int], dispatched: dict[int, str]) -> None:
        """A new request begins: judge what is new for good."""
        settled, problems = self.settled, list(self._new_problems(wants_logprobs, dispatched))
        settled.problems += problems
        count_codes(settled.counts, problems)
        settled.versions = self.versions(dispatched)
        settled.length, settled.runs = len(self.token_ids), len(self.runs)
        settled.told, settled.absent = len(self.told), len(self.absent)

    def versions(self, dispatched: dict[int, str]) -> list[str]:
        """Return the weight versions in order, each where it differs from the one before."""
        found = self.settled.versions.copy()
        for span in self._new_spans(dispatched):
            if not found or found[-1] != span.version:
                found.append(span.version)
        return found

    def problems(self, wants_logprobs: Collection[int], dispatched: dict[int, str]) -> list[Problem]:
        """Return what is wrong with the tokens that are there now."""
        return [*self.settled.problems, *self._new_problems(wants_logprobs, dispatched)]

    def count_problems(self, wants_logprobs: Collection[int], dispatched: dict[int, str]) -> dict[str, int]:
        """Count the same by code, looking at what is new alone."""
        counts = self.settled.counts.copy()
        count_codes(counts, self._new_problems(wants_logprobs, dispatched))
        return counts

    def _new_spans(self, dispatched: dict[int, str]) -> list[VersionSpan]:
        runs, told = self.runs[self.settled.runs :], self.told[self.settled.told :]
        return _merge(told, _assumed(runs, told, dispatched))

    def _new_problems(self, wants_logprobs: Collection[int], dispatched: dict[int, str]) -> Iterator[Problem]:
        runs, told = self.runs[self.settled.runs :], self.told[self.settled.told :]
        for run, start, end in _cut_at_runs(self.absent[self.settled.absent :], runs):
            if run.request in wants_logprobs:
                message = f"{several(end - start, 'token')} came without log-probs"
                yield problem("missing_logprobs", run.request, start, message)
        yield from self._oddities(runs)
        assumed = list(_assumed(runs, told, dispatched))
        for run, span in assumed:
            message = f"version {span.version}, as known at dispatch"
            yield problem("version_assumed", run.request, span.start, message)
        before = self.settled.versions[-1] if self.settled.versions else ""
        for span in _merge(told, assumed):
            older, newer = number_of(before), number_of(span.version)
            if older is not None and newer is not None and newer < older:
                message = f"version {span.version} after {before}"
                yield problem("version_went_backwards", self.request_at(span.start), span.start, message)
            before = span.version

    def _oddities(self, runs: Sequence[Run]) -> Iterator[Problem]:
        silent = set[int]()
        for start, end in self.absent[self.settled.absent :]:
            silent.update(range(start, end))
        for run in runs:
            if run.origin is not Origin.GENERATED:
                continue
            part = self.logprobs[run.start : run.end]
            if math.isnan(sum(part)):  # a sixth of looking at each
                nulls = [i for i, x in enumerate(part, run.start) if math.isnan(x) and i not in silent]
                if nulls:
                    yield problem(
                        "null_logprob", run.request, nulls[0], f"null for {several(len(nulls), 'token')}"
                    )
            if SENTINEL_LOGPROB in part:
                position = run.start + part.index(SENTINEL_LOGPROB)
                message = f"{SENTINEL_LOGPROB} for {several(part.count(SENTINEL_LOGPROB), 'token')}"
                yield problem("sentinel_logprob", run.request, position, message)

    def request_at(self, position: int) -> int | None:
        """Return the number of the request that made the token at a position."""
        return next((run.request for run in self.runs if run.start <= position < run.end), None)

    # Copies

    def copy(self) -> Choice:
        """Return a copy that grows apart from this one."""
        return msgspec.structs.replace(
            self,
            token_ids=self.token_ids.copy(),
            logprobs=self.logprobs.copy(),
            runs=[msgspec.structs.replace(run) for run in self.runs],
            told=self.told.copy(),
            absent=self.absent.copy(),
            sampling_mask=self.sampling_mask.copy(),
            wire_text=self.wire_text.copy(),
            settled=self.settled.copy(),
        )

    def branch(self, index: int) -> Choice:
        """Return another choice of the same request, which begins with the same tokens."""
        twin = self.copy()
        twin.index = index
        return twin

    def inherit(self, length: int, dispatched: dict[int, str]) -> Choice:
        """Return the first `length` tokens as the beginning of a new life of the sample."""
        heir = self.copy()
        heir.settled, heir.told = Settled(), heir.weight_versions(dispatched)
        heir.truncate(length)
        for run in heir.runs:
            if run.origin is not Origin.OBSERVED:
                run.origin, run.request = Origin.INHERITED, None
        heir.begin()
        return heir


def _cut(spans: list[VersionSpan], base: int) -> list[VersionSpan]:
    return [VersionSpan(span.version, span.start, min(span.end, base)) for span in spans if span.start < base]


def _assumed(
    runs: Sequence[Run], told: Sequence[VersionSpan], dispatched: dict[int, str]
) -> Iterator[tuple[Run, VersionSpan]]:
    """Yield the generated runs of which the engine told nothing, with the version known at dispatch."""
    told = sorted(told, key=lambda span: span.start)
    at = 0
    for run in runs:
        while at < len(told) and told[at].end <= run.start:
            at += 1
        if run.origin is not Origin.GENERATED or run.request not in dispatched:
            continue
        if at == len(told) or told[at].start >= run.end:
            yield run, VersionSpan(dispatched[run.request], run.start, run.end)


def _merge(told: Sequence[VersionSpan], assumed: Iterable[tuple[Run, VersionSpan]]) -> list[VersionSpan]:
    """Return spans in order, neighbours of one version as one."""
    spans: list[VersionSpan] = []
    for span in sorted([*told, *(span for _, span in assumed)], key=lambda span: span.start):
        if spans and spans[-1].version == span.version and spans[-1].end == span.start:
            spans[-1] = VersionSpan(span.version, spans[-1].start, span.end)
        else:
            spans.append(span)
    return spans


def _cut_at_runs(stretches: Iterable[tuple[int, int]], runs: Sequence[Run]) -> Iterator[tuple[Run, int, int]]:
    """Yield stretches of tokens, cut where runs end."""
    at = 0
    for start, end in stretches:
        while at < len(runs) and runs[at].end <= start:
            at += 1
        here = at
        while here < len(runs) and runs[here].start < end:
            run = runs[here]
            yield run, max(start, run.start), min(end, run.end)
            here += 1
