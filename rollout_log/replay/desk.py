"""Where requests for recorded responses come in, whoever transports them.

desk = Desk([source], cut="any", at_cut="hold")
playback = desk.take(Asked.of("POST", path, body))     # or ReplayMiss
...                                                    # play it
desk.leave(playback)
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Iterable, Sequence
from typing import Union, get_args

from rollout_log.counting import several
from rollout_log.engines.wire import object_in
from rollout_log.replay.asking import Asked
from rollout_log.replay.errors import ReplayMiss
from rollout_log.replay.faults import Faults
from rollout_log.replay.library import list_recordings
from rollout_log.replay.matching import Cut, Match, Matcher, Report
from rollout_log.replay.playback import AtCut, Gate, Playback
from rollout_log.replay.recording import Source
from rollout_log.replay.splice import script_of

__all__ = ["HELD_S", "Desk", "Pace", "Sources", "open_all", "pace_of"]

Sources = Union[Source, str, "os.PathLike[str]", Sequence[Union[Source, str, "os.PathLike[str]"]]]
"""A log or a fixture, opened or by its path; or several."""
Pace = float | str
"""Factor on the recorded waits: 0 for none, 1 or "recorded" for all of them."""

HELD_S = 10.0
"""How long responses are held and nothing moves before that is said."""
_LATE_S = 1.0
"""A check that comes later than this says that the process stood still, clients included."""

_logger = logging.getLogger("rollout_log")


class Desk:
    """Matches requests, and keeps track of the responses under way."""

    def __init__(
        self,
        sources: Sources,
        *,
        cut: Cut = "any",
        at_cut: AtCut = "hold",
        pace: Pace = 0,
        faults: Faults | None = None,
        hold_s: float | None = None,
    ) -> None:
        """Raises ValueError for a `cut`, an `at_cut`, a `pace` or a `hold_s` that is none."""
        _check("cut", cut, get_args(Cut))
        _check("at_cut", at_cut, get_args(AtCut))
        recordings = [each for source in open_all(sources) for each in list_recordings(source)]
        self.matcher = Matcher(recordings, cut=cut)
        self.at_cut = at_cut
        self.pace = pace_of(pace)
        self.hold_s = _hold_of(hold_s)
        self.faults = faults
        self.gate = Gate()
        """That of the responses that begin now."""
        self.weight_version: str | None = None
        self.tells = True
        """Whether what is asked for in vain or held for too long is logged; else its owner tells it."""
        self.held_out: list[str] = []
        """Of each response that was held for too long: which it was, and what its client should have done."""
        self.playing: dict[Playback, Match] = {}
        self._moved = time.monotonic()
        """When a response last began or ended, or all could go on."""
        self._said: float | None = None
        """The last movement after which nothing moved, where that has been told."""
        self._cut_said = False

    @property
    def running(self) -> bool:
        """Whether a response is under way that was not stopped by a pause."""
        return any(each.gate.open for each in self._under_way())

    def take(self, asked: Asked, *, faults: Faults | None = None, final: bool = True) -> Playback:
        """Begin a response, with these faults or the desk's own.

        Raises `ReplayMiss`, which is counted when it is `final`.
        """
        try:
            match = self.matcher.match(asked)
        except ReplayMiss as miss:
            if final or not miss.busy:
                self.matcher.miss(miss)
                if self.tells:
                    _logger.error("replay: %s", miss)  # noqa: TRY400 - the message says it all
            raise
        any_cut = self.matcher.cut == "any"
        script = script_of(match, hold=any_cut and self.at_cut == "hold", go=any_cut and self.at_cut == "go")
        script.weight_version = self.weight_version
        if (faults := faults or self.faults) is not None:
            attempt = match.recording.attempts[match.exchange.number] - 1
            script = faults.strike(script, attempt=attempt)
        playback = Playback(script, pace=self.pace, at_cut=self.at_cut, gate=self.gate)
        playback.names = _names(asked, script.request_id)
        playback.on_cut, playback.on_held = self._say_cut, self._patience
        self.playing[playback] = match
        self._moved = time.monotonic()
        return playback

    def leave(self, playback: Playback) -> None:
        """The response is over, or its client is gone. A second time does nothing."""
        match = self.playing.pop(playback, None)
        if match is not None:
            self._moved = time.monotonic()
            script = playback.script
            self.matcher.release(
                match,
                script.numbers,
                tokens=script.tokens_at(playback.sent),
                finished=playback.finished,
                ended=not playback.struck,
            )

    def abort(self, request_ids: Iterable[str] | None = None) -> int:
        """Abort the responses with these ids, or all; returns how many."""
        ids = None if request_ids is None else set(request_ids)
        chosen = [each for each in self._under_way() if ids is None or ids & each.names]
        for each in chosen:
            each.abort()
        return len(chosen)

    def pause(self, mode: str) -> None:
        """Begin no response, and `keep` those under way where they are, `abort` them, or let them end."""
        if mode == "keep":
            self.gate.open = False
            for each in self._under_way():
                each.gate.open = False
            return
        if self.gate.open:
            self.gate = Gate(is_open=False)
        if mode == "abort":
            self.abort()

    def resume(self) -> None:
        """Let all responses go on."""
        self._moved = time.monotonic()
        self.gate.open = True
        for each in self._under_way():
            each.gate.open = True
            each.wake()

    def report(self) -> Report:
        """Say what was not asked for, and what was asked for in vain."""
        return self.matcher.report()

    def _under_way(self) -> list[Playback]:
        """Return what plays now; other threads begin and end meanwhile."""
        return list(self.playing)

    def _say_cut(self, playback: Playback) -> None:
        """Say of the first response that is held that it is, and for what."""
        match = self.playing.get(playback)
        if match is None or self._cut_said:
            return
        self._cut_said = True
        _logger.info(
            "replay: %s is held at token %d, where the recording was aborted, until the client aborts or "
            "leaves (--at-cut)",
            match.recording.name,
            _token_of(playback, match),
        )

    def _patience(self) -> float:
        """Return the seconds that what is held may be held; where they are over, say so or end it, once."""
        patience = HELD_S if self.hold_s is None else self.hold_s
        moved = max([self._moved, *(each.moved for each in self._under_way())])
        late = time.monotonic() - moved - patience
        if late < 0:
            return -late
        if moved == self._said:
            return patience
        if late > _LATE_S:
            self._moved = time.monotonic()
            return patience
        self._said = moved
        if self.hold_s is None:
            self._say_held()
        else:
            self._let_go(self.hold_s)
        return patience

    def _say_held(self) -> None:
        """Say what everything waits for."""
        held = [match.exchange.name for each, match in self.playing.copy().items() if each.held]
        shown = ", ".join(held[:5]) + (", …" if len(held) > 5 else "")
        _logger.warning(
            "replay: nothing moves: %s held where the recording was aborted (%s). Abort the requests or "
            "close their connections, or replay with at_cut='go' or 'end' (of `serve`: --at-cut go or end)",
            several(len(held), "response"),
            shown,
        )

    def _let_go(self, hold_s: float) -> None:
        """End what is held: its client waits for what will not come."""
        for playback, match in self.playing.copy().items():
            token = f"{_token_of(playback, match):,}"
            why = (
                f"{match.exchange.name} was held at token {token}, where the recording was aborted, and in "
                f"{hold_s:g} s the client has neither aborted it nor left: have it do so, or replay with "
                "at_cut='end' or 'go', or a longer hold_s (in a test: "
                "@pytest.mark.rollout_log(at_cut='end'))"
            )
            if playback.let_go(why):
                self.held_out.append(why)
                if self.tells:
                    _logger.error("replay: %s", why)


def _token_of(playback: Playback, match: Match) -> int:
    """Return how many tokens of the sample's response the client has."""
    return match.exchange.requested.base + match.offset + playback.script.tokens_at(playback.sent)


def _names(asked: Asked, request_id: str | None) -> set[str]:
    """Return what a client may call a request: the id the response tells, and the one it gave itself."""
    body = object_in(asked.body)
    own = [str(body[name]) for name in ("request_id", "rid") if isinstance(body.get(name), str)]
    return {*own, *(f"generate-tokens-{each}" for each in own), *([request_id] if request_id else [])}


def _hold_of(hold_s: float | None) -> float | None:
    with contextlib.suppress(TypeError):
        if hold_s is None or 0 < hold_s <= threading.TIMEOUT_MAX:
            return hold_s
    raise ValueError(f"hold_s is a number of seconds above 0, not {hold_s!r}")


def _check(name: str, value: str, known: Sequence[str]) -> None:
    if value not in known:
        raise ValueError(f"{name} is one of {', '.join(known)}, not {value!r}")


def open_all(sources: Sources) -> list[Source]:
    """Open whatever a user may call a source; a path that is given twice is one."""
    from rollout_log.sources import open_source

    if isinstance(sources, (str, os.PathLike)) or not isinstance(sources, Sequence):
        sources = [sources]
    found: list[Source] = []
    places: set[str] = set()
    for each in sources:
        if not isinstance(each, (str, os.PathLike)):
            found.append(each)
        elif (place := os.path.realpath(each)) not in places:
            places.add(place)
            found.append(open_source(each))
    return found


def pace_of(pace: Pace) -> float:
    """Return the factor on recorded waits; raises ValueError for a negative one or another word."""
    with contextlib.suppress(ValueError, TypeError):
        factor = 1.0 if pace == "recorded" else float(pace)
        if factor >= 0:
            return factor
    raise ValueError(f"a pace is 0 or more, or 'recorded', not {pace!r}")
