"""Where prompts come from and aborted groups go back to."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trainer.sample_double import Sample

__all__ = ["DataSource"]


class DataSource:
    """Groups of `args.n_samples_per_prompt` copies, the buffer first. The buffer is not saved."""

    def __init__(self, args: Any, questions: Sequence[str], *, read_only: bool = False) -> None:
        self.args = args
        self.buffer: list[list[Sample]] = []
        self.position = self.group_index = self.index = 0
        self._prompts = [Sample(prompt=text) for text in questions]
        self._read_only = read_only

    def get_samples(self, count: int) -> list[list[Sample]]:
        groups, self.buffer = self.buffer[:count], self.buffer[count:]
        while len(groups) < count:
            groups.append([self._copy() for _ in range(self.args.n_samples_per_prompt)])
            self.group_index += 1
            self.position += 1
        return groups

    def _copy(self) -> Sample:
        sample = copy.deepcopy(self._prompts[self.position % len(self._prompts)])
        sample.group_index, sample.index = self.group_index, self.index
        self.index += 1
        return sample

    def add_samples(self, groups: list[list[Sample]]) -> None:
        if self._read_only:
            raise RuntimeError("this data source takes no samples")
        for group in groups:
            if len(group) != self.args.n_samples_per_prompt:
                raise ValueError(f"a group of {len(group)}, not {self.args.n_samples_per_prompt}")
        self.buffer += groups

    def save(self, rollout_id: int) -> None:
        state = {"position": self.position, "group_index": self.group_index, "index": self.index}
        Path(self.args.save, f"data-{rollout_id}.json").write_text(json.dumps(state))

    def load(self, rollout_id: int | None = None) -> None:
        if self.args.load is not None and (path := Path(self.args.load, f"data-{rollout_id}.json")).exists():
            self.__dict__.update(json.loads(path.read_text()))

    def get_buffer_length(self) -> int:
        return len(self.buffer)

    def __len__(self) -> int:
        return len(self._prompts)
