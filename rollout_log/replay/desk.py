"""Where requests for recorded responses come in, whoever transports them.

desk = Desk([source], cut="any", at_cut="hold")
playback = desk.take(Asked.of("POST", path, body))     # or ReplayMiss
...                                                    # play it
desk.leave(playback)
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Sequence
from typing import Union

from rollout_log.replay.asking import Asked
from rollout_log.replay.errors import ReplayMiss
from rollout_log.replay.matching import Cut, Match, Matcher, Report, list_recordings
from rollout_log.replay.playback import AtCut, Gate, Playback
from rollout_log.replay.recording import Source
from rollout_log.replay.script import script_of

__all__ = ["Desk", "Pace", "Sources", "open_all", "pace_of"]

Sources = Union[Source, str, "os.PathLike[str]", Sequence[Union[Source, str, "os.PathLike[str]"]]]
"""A log or a fixture, opened or by its path; or several."""
Pace = float | str
"""Factor on the recorded waits: 0 for none, 1 or "recorded" for all of them."""

_logger = logging.getLogger("rollout_log")


class Desk:
    """Matches requests, and keeps track of the responses under way."""

    def __init__(self, sources: Sources, *, cut: Cut = "any", at_cut: AtCut = "hold", pace: Pace = 0) -> None:
        recordings = [each for source in open_all(sources) for each in list_recordings(source)]
        self.matcher = Matcher(recordings, cut=cut)
        self.at_cut = at_cut
        self.pace = pace_of(pace)
        self.gate = Gate()
        self.playing: dict[Playback, Match] = {}

    def take(self, asked: Asked, *, final: bool = True) -> Playback:
        """Begin a response. Raises `ReplayMiss`, which is counted when it is `final`."""
        try:
            match = self.matcher.match(asked)
        except ReplayMiss as miss:
            if final or not miss.busy:
                self.matcher.miss(miss)
                _logger.error("replay: %s", miss)  # noqa: TRY400 - the message says it all
            raise
        any_cut = self.matcher.cut == "any"
        script = script_of(match, hold=any_cut and self.at_cut == "hold", go=any_cut and self.at_cut == "go")
        playback = Playback(script, pace=self.pace, at_cut=self.at_cut, gate=self.gate)
        self.playing[playback] = match
        return playback

    def leave(self, playback: Playback) -> None:
        """The response is over, or its client is gone. A second time does nothing."""
        match = self.playing.pop(playback, None)
        if match is not None:
            self.matcher.release(match, finished=playback.finished)

    def abort(self, request_ids: Iterable[str] | None = None) -> int:
        """Abort the responses with these ids, or all; returns how many."""
        ids = None if request_ids is None else set(request_ids)
        chosen = [each for each in self.playing if ids is None or each.script.request_id in ids]
        for each in chosen:
            each.abort()
        return len(chosen)

    def open_gate(self, *, open_: bool) -> None:
        """Let responses go on, or stop them all where they are."""
        self.gate.open = open_
        for each in self.playing:
            each.wake()

    def report(self) -> Report:
        """Say what was not asked for, and what was asked for in vain."""
        return self.matcher.report()


def open_all(sources: Sources) -> list[Source]:
    """Open whatever a user may call a source."""
    if isinstance(sources, (str, os.PathLike)):
        from rollout_log.log import LogReader

        return [LogReader.open(sources)]
    if isinstance(sources, Sequence):
        return [opened for each in sources for opened in open_all(each)]
    return [sources]


def pace_of(pace: Pace) -> float:
    """Return the factor on recorded waits; raises ValueError for a negative one or another word."""
    factor = 1.0 if pace == "recorded" else float(pace)
    if not factor >= 0:
        raise ValueError(f"a pace is 0 or more, or 'recorded', not {pace!r}")
    return factor
