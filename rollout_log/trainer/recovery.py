"""What a process that is gone left unfinished: found in the log, and gone on from.

After a crash the trainer starts again from a checkpoint. A prompt that it issues again goes on from the
tokens that are in the log (`claim`); groups that waited in its buffer, which no checkpoint has, are given
back whole (`groups`). Steps that the checkpoint rolled back are generated anew.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from rollout_log.errors import RolloutLogError
from rollout_log.fold import Rollout
from rollout_log.log import Entry, LogReader
from rollout_log.log.summary import Summary

__all__ = ["Life", "Recovery"]

_UNFINISHED = ("pending", "aborted")
_NOT_CONSUMED = (None, "not_consumed")


class Life(msgspec.Struct):
    """A sample as an older process left it."""

    entry: Entry
    rollout: Rollout

    @property
    def length(self) -> int:
        """Response tokens it has."""
        return self.rollout.length

    @property
    def is_unfinished(self) -> bool:
        """Whether there is something to go on from."""
        return self.rollout.status in _UNFINISHED and self.length > 0


class Recovery:
    """The samples of older writers of a log, each to be taken once.

    `mine`: the folder of this process; `step`: the first one after the checkpoint.
    """

    def __init__(self, log: Path, mine: str, step: int) -> None:
        self.step = step
        self._reader = LogReader.open(log)
        self._members: dict[int | None, dict[int, Entry]] = defaultdict(dict)
        """By group and index; the newest of each."""
        for entry in self._reader.samples():
            summary = entry.summary
            if entry.ref.folder.name == mine or entry.name != summary.key or summary.index is None:
                continue
            if not summary.evaluation and summary.parent is None:
                self._members[summary.group_index][summary.index] = entry

    def claim(self, index: int, group_index: int | None, prompt: list[int], params: Any) -> Life | None:
        """Take what is there of a prompt that the trainer issues again.

        None where nothing is, where it is finished or of a step that was rolled back, or where prompt or
        sampling parameters differ.
        """
        entry = self._members.get(group_index, {}).get(index)
        if entry is None or not _is_older(entry.summary, self.step):
            return None
        life = self._life(entry)
        if life is None or not life.is_unfinished or life.rollout.prompt_token_ids != prompt:
            return None
        opened = life.rollout.opened
        if opened is None or opened.metadata.get("sampling_params") != params:
            return None
        del self._members[group_index][index]
        return life

    def groups(self, size: int) -> Iterator[list[Life]]:
        """Take the groups that the trainer had fetched before its checkpoint.

        Only those of which all `size` members are known, none was consumed or is of a step that was rolled
        back, and at least one has tokens to go on from.
        """
        for group in sorted(group for group in self._members if group is not None):
            entries = list(self._members[group].values())
            if len(entries) != size or not all(_waited(entry.summary, self.step) for entry in entries):
                continue
            if not any(entry.summary.status in _UNFINISHED for entry in entries):
                continue
            lives = [life for entry in entries if (life := self._life(entry)) is not None]
            if len(lives) == size and any(life.is_unfinished for life in lives):
                del self._members[group]
                yield sorted(lives, key=lambda life: life.entry.summary.index or 0)

    def close(self) -> None:
        """Let go of the log's files."""
        self._reader.close()

    def _life(self, entry: Entry) -> Life | None:
        try:
            return Life(entry, self._reader.rollout(entry.ref))
        except RolloutLogError:
            return None


def _is_older(summary: Summary, step: int) -> bool:
    return summary.step is not None and summary.step <= step and summary.trainer_status in _NOT_CONSUMED


def _waited(summary: Summary, step: int) -> bool:
    """Whether a sample was begun before the checkpoint, and not since."""
    first = summary.step if summary.resumed_from is None else summary.resumed_from
    return _is_older(summary, step) and first is not None and first < step
