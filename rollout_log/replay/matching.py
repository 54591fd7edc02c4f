"""Which recorded exchange answers a request: by the sample it names, else by what it means.

    matcher = Matcher(recordings)
    match = matcher.match(asked)         # or ReplayMiss, which says what comes nearest
    ...
    matcher.release(match, finished=True)

Each recording is given out once. The first request for a prompt binds a sample that nobody has asked for;
what goes on from tokens it was served stays with it.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from rollout_log.record.base import common_prefix
from rollout_log.replay.asking import Asked, body_difference, meaning_of, parameter_differences
from rollout_log.replay.errors import ReplayMiss
from rollout_log.replay.library import Recording
from rollout_log.replay.prompts import Prompts
from rollout_log.replay.recording import RecordedExchange

__all__ = ["Cut", "Match", "Matcher", "Report"]

Cut = Literal["any", "exact"]
"""Where a request may go on from: any token of the recording, or where a recorded one did."""


class Match(NamedTuple):
    """What answers a request."""

    recording: Recording
    exchange: RecordedExchange
    offset: int
    """Tokens of the exchange that the client has already."""
    again: bool
    """Its recorded end has happened already."""


class Report(NamedTuple):
    """What became of the recordings."""

    unused: list[str]
    """Samples that nobody asked for."""
    partly: list[tuple[str, list[int]]]
    """Samples of which some requests were not asked for, and which."""
    misses: list[str]


@dataclass
class _Search:
    """One request's way through the recordings: what was found, and how near the others come."""

    asked: Asked
    named: bool = False
    """The client said which sample it means."""
    busy: bool = False
    depth: tuple[int, ...] = ()
    """What the nearest has in common: tokens or fields, the whole request, fewer parameters that differ."""
    nearest: str | None = None
    difference: str = ""
    used: list[str] = field(default_factory=list)

    def note(self, depth: tuple[int, ...], name: str, difference: str) -> None:
        if depth > self.depth:
            self.depth, self.nearest, self.difference = depth, name, difference


class Matcher:
    """Gives out recordings. Threads may share one."""

    def __init__(self, recordings: Iterable[Recording], *, cut: Cut = "any") -> None:
        self.recordings = list(recordings)
        self.cut = cut
        self.misses: list[str] = []
        self._lock = threading.Lock()
        self._by_key: dict[str, list[Recording]] = {}
        self._by_prompt: dict[tuple[str, tuple[int, ...]], list[Recording]] = {}
        self._by_meaning: dict[tuple[str, str], list[Recording]] = {}
        for each in self.recordings:
            for key in {each.key, each.name, each.parent or each.key}:
                self._by_key.setdefault(key, []).append(each)
            if each.prompt is not None:
                self._by_prompt.setdefault((each.endpoint, each.prompt), []).append(each)
            else:
                self._by_meaning.setdefault((each.endpoint, each.meaning), []).append(each)
        endpoints: dict[str, list[tuple[int, ...]]] = {}
        for endpoint, prompt in self._by_prompt:
            endpoints.setdefault(endpoint, []).append(prompt)
        self._prompts = {endpoint: Prompts(prompts) for endpoint, prompts in endpoints.items()}

    def match(self, asked: Asked) -> Match:
        """Give out the exchange that answers a request. Raises `ReplayMiss`."""
        with self._lock:
            found, search = self._find(asked)
            if found is not None:
                recording = found.recording
                recording.bound = recording.busy = True
                recording.finished = False
                recording.served.add(found.exchange.number)
                recording.attempts[found.exchange.number] += 1
                return found
        message = _describe(search, len(self.recordings))
        raise ReplayMiss(message, nearest=search.nearest, busy=search.busy)

    def miss(self, miss: ReplayMiss) -> None:
        """Count a miss that nothing will mend."""
        self.misses.append(str(miss))

    def release(
        self,
        match: Match,
        numbers: Collection[int] = (),
        *,
        tokens: int = 0,
        finished: bool,
        ended: bool = True,
    ) -> None:
        """The response, made of the exchanges with these numbers, is over after so many tokens.

        `finished` when the client was given its finish, `ended` unless it was a fault that ended it. Then
        the recorded end is still to come, and the recording as good as unasked.
        """
        with self._lock:
            recording, numbers = match.recording, numbers or (match.exchange.number,)
            if ended:
                recording.ended.update(numbers)
            else:
                recording.served.difference_update(numbers)
            recording.busy = False
            recording.finished = finished
            recording.reached = len(match.exchange.info.token_ids or ()) + match.offset + tokens
            if finished and not recording.unserved:
                recording.forget()

    def report(self) -> Report:
        """Say which recordings were not asked for, and what was asked for and not recorded."""
        bound = [each for each in self.recordings if each.bound]
        partly = [(each.name, each.unserved) for each in bound]
        return Report(
            [each.name for each in self.recordings if not each.bound],
            [(name, numbers) for name, numbers in partly if numbers],
            list(self.misses),
        )

    def _find(self, asked: Asked) -> tuple[Match | None, _Search]:
        if asked.hint is not None and asked.key is None:
            found, _ = self._find_named(asked, asked.hint)
            if found is not None:
                return found, _Search(asked)
        if asked.key is not None:
            return self._find_named(asked, asked.key)
        search, ids = _Search(asked), asked.info.token_ids
        if ids is None:
            pool = self._by_meaning.get((asked.endpoint, meaning_of(asked.body)), [])
        else:
            prompts = self._prompts.get(asked.endpoint)
            pool = [
                each
                for prompt in (prompts.prefixes_of(ids) if prompts else ())
                for each in self._by_prompt[asked.endpoint, prompt]
            ]
        return self._choose(search, pool, ids), search

    def _find_named(self, asked: Asked, name: str) -> tuple[Match | None, _Search]:
        search, ids = _Search(asked, named=True), asked.info.token_ids
        pool = [each for each in self._by_key.get(name, []) if each.endpoint == asked.endpoint]
        if not pool:
            search.difference = f"it names the sample {name!r}, which has no recording here"
            return None, search
        if ids is None:
            pool = [each for each in pool if each.meaning == meaning_of(asked.body)] or pool
        return self._choose(search, pool, ids), search

    def _choose(self, search: _Search, pool: list[Recording], ids: list[int] | None) -> Match | None:
        """Choose: for a new prompt a recording nobody asked for, for one that goes on a bound one."""
        free = [each for each in pool if not each.bound]
        bound = [each for each in pool if each.bound]
        new = ids is None or any(len(ids) == len(each.prompt or ()) for each in free)
        for group in (free, bound) if new else (bound, free):
            best: Match | None = None
            for each in group:
                match = self._fit(search, each, ids)
                if match is None:
                    continue
                if each.busy:
                    search.busy = True
                    continue
                if best is None or _rank(match, ids) < _rank(best, ids):
                    best = match
                if group is free and _is_next(match):
                    break
            if best is not None:
                return best
        if not pool:
            self._note_nearest(search, ids)
        elif ids is not None:
            for each in pool:
                for exchange in each.exchanges:
                    _compare(search, exchange, ids, self.cut)
        return None

    def _fit(self, search: _Search, recording: Recording, ids: list[int] | None) -> Match | None:
        """Return how a recording answers, None where it does not; then `search` has learned why."""
        if ids is None:
            return self._fit_text(search, recording)
        for each in recording.exchanges:
            if each.info.token_ids != ids:
                continue
            differs = parameter_differences(search.asked.info, each.info)
            if differs:
                search.note((len(ids), 1, -len(differs)), each.name, differs[0])
            elif each.number not in recording.served:
                return Match(recording, each, 0, again=False)
            elif self.cut == "exact" or (recording.finished and not search.named):
                search.used.append(recording.name)
        if self.cut == "any":
            for each in reversed(recording.exchanges):
                offset = _offset(each, ids)
                if offset is None or (not offset and each.number not in recording.served):
                    continue
                # Who has some of the tokens has not read to the finish, though all was sent. Who has none
                # may be another client, with another sample in mind.
                if recording.finished and not search.named and len(ids) == len(recording.prompt or ()):
                    continue
                start = len(each.info.token_ids or ())
                differs = parameter_differences(search.asked.info, each.info, at=start + offset, base=start)
                if not differs and (offset < len(each.generated) or not offset):
                    return Match(recording, each, offset, again=each.number in recording.ended)
                said = differs[0] if differs else "the recording ends there"
                search.note((len(ids), 0, -len(differs)), each.name, said)
        return None

    def _fit_text(self, search: _Search, recording: Recording) -> Match | None:
        for each in recording.exchanges:
            equal, differs = body_difference(search.asked.body, each.body)
            if meaning_of(each.body) != meaning_of(search.asked.body):
                search.note((equal, 0), each.name, differs)
            elif each.number not in recording.served:
                return Match(recording, each, 0, again=False)
            elif self.cut == "any" and (search.named or not recording.finished):
                return Match(recording, each, 0, again=each.number in recording.ended)
            else:
                search.used.append(recording.name)
        return None

    def _note_nearest(self, search: _Search, ids: list[int] | None) -> None:
        endpoint = search.asked.endpoint
        if ids is None:
            for (where, _), recordings in self._by_meaning.items():
                if where == endpoint:
                    equal, differs = body_difference(search.asked.body, recordings[0].exchanges[0].body)
                    search.note((equal, 0), recordings[0].name, differs)
            return
        near = self._prompts[endpoint].nearest(ids) if endpoint in self._prompts else None
        if near is not None:
            prompt, shared = near
            recording = self._by_prompt[endpoint, prompt][0]
            search.note((shared, 0), recording.name, _differ_at(shared, ids, prompt))


def _is_next(match: Match) -> bool:
    """Whether a request falls on a recorded one that nobody made yet."""
    return not match.offset and match.exchange.number not in match.recording.served


def _rank(match: Match, ids: list[int] | None) -> tuple[bool, bool, int]:
    """Order matches, the best first: of equal ones, the recording whose last response ended nearest."""
    recording = match.recording
    distance = 0 if ids is None else abs(recording.reached - len(ids))
    return not _is_next(match), recording.finished, distance


def _offset(exchange: RecordedExchange, ids: list[int]) -> int | None:
    """Return how many of an exchange's tokens a request has; None when it does not come from it."""
    start = exchange.info.token_ids
    if start is None or exchange.info.n != 1 or len(ids) < len(start) or ids[: len(start)] != start:
        return None
    more = ids[len(start) :]
    return len(more) if exchange.generated[: len(more)] == more else None


def _compare(search: _Search, exchange: RecordedExchange, ids: list[int], cut: Cut) -> None:
    line = [*(exchange.info.token_ids or ()), *exchange.generated]
    shared = common_prefix(line, ids)
    if shared < len(ids):
        search.note((shared, 0), exchange.name, _differ_at(shared, ids, line))
    elif cut == "exact" and exchange.info.token_ids != ids:
        search.note((shared, 0), exchange.name, f"no recorded request has just its first {shared} token ids")


def _differ_at(place: int, ids: Sequence[int], recorded: Sequence[int]) -> str:
    if place == len(ids):
        return f"the request ends at token {place}, recorded is {recorded[place]} there"
    if place == len(recorded):
        return f"token {place} is {ids[place]}, where the recording ends"
    return f"token {place} is {ids[place]}, recorded {recorded[place]}"


def _describe(search: _Search, count: int) -> str:
    asked = search.asked
    ids = asked.info.token_ids
    what = f"{asked.endpoint} with {len(ids)} token ids" if ids is not None else asked.endpoint
    if asked.key is not None:
        what += f" for sample {asked.key!r}"
    if search.used:
        names = ", ".join(map(repr, search.used[:3])) + (", …" if len(search.used) > 3 else "")
        return (
            f"no recording is left for {what}: {len(search.used)} were served ({names}). "
            "Record more samples of this prompt, or ask for fewer"
        )
    if search.busy:
        return f"the recording for {what} is being served to another request"
    if search.nearest is not None:
        return f"no recording of {what}; the nearest is {search.nearest}: {search.difference}"
    why = search.difference or f"none of the {count:,} recorded is like it"
    return f"no recording of {what}; {why}"
