"""Deltas in a row that are folded without being rendered, as far as that goes: what the fold asks of them.

A sealed log has the frames of a stream as columns. `rollout_log.log.group_reader` offers them like this.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from rollout_log.engines import AlikeFrames
from rollout_log.events import Delta

__all__ = ["Part", "Stretch"]


class Part(Protocol):
    """Some Deltas of a stretch, at least one."""

    @property
    def frames(self) -> AlikeFrames | None:
        """Their frames, where these are alike."""
        ...

    @property
    def count(self) -> int:
        """How many they are."""
        ...

    @property
    def first_time(self) -> int:
        """When the first of them came."""
        ...

    @property
    def last_time(self) -> int: ...

    def deltas(self) -> list[Delta]:
        """Render them."""
        ...


class Stretch(Protocol):
    """Deltas of one request in a row, with the Reads among them."""

    @property
    def request(self) -> int:
        """The request's number."""
        ...

    @property
    def events(self) -> int:
        """How many they are, Reads included."""
        ...

    @property
    def count(self) -> int:
        """How many Deltas there are."""
        ...

    @property
    def bytes(self) -> int:
        """Of the data of all Deltas."""
        ...

    def parts(self) -> Iterable[Part]:
        """Yield the Deltas, in order."""
        ...
