"""The samples of a source that can be served, and what of each was; read when it is first needed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

from rollout_log.engines import RequestInfo, dialect_for
from rollout_log.events import Opened, Requested
from rollout_log.replay.asking import endpoint_of, meaning_of
from rollout_log.replay.recording import RecordedExchange, Source, read_exchanges

__all__ = ["Recording", "list_recordings"]


class Recording:
    """One recorded sample."""

    def __init__(
        self,
        name: str,
        opened: Opened,
        first: Requested,
        load: Callable[[], list[RecordedExchange]],
    ) -> None:
        dialect = dialect_for(first.path)
        self.name = name
        self.key = opened.key
        self.parent = opened.parent
        self.endpoint = endpoint_of(first.method, first.path)
        self.path = first.path
        self.served: set[int] = set()
        """Numbers of the exchanges that were given out."""
        self.ended: set[int] = set()
        """Numbers of those whose recorded end has happened: the client that was to abort has done it."""
        self.attempts: Counter[int] = Counter()
        """How often each was given out."""
        self.bound = False
        self.busy = False
        self.finished = False
        """The last response that was served had its finish."""
        self.reached = 0
        """Token ids, prompt included, that a client has by the last response."""
        self._load = load
        self._exchanges: list[RecordedExchange] | None = None
        info = dialect.read_request(first.body) if dialect else RequestInfo()
        elided = first.ids_at >= 0
        self.prompt: tuple[int, ...] | None = (
            tuple(opened.prompt_token_ids)
            if elided and opened.prompt_token_ids
            else tuple(info.token_ids)
            if info.token_ids
            else None
        )
        self.model = info.model
        self.weight_version = first.weight_version
        """Known when it was first asked for."""
        self.meaning = meaning_of(first.body) if self.prompt is None else ""

    @property
    def exchanges(self) -> list[RecordedExchange]:
        if self._exchanges is None:
            self._exchanges = self._load()
        return self._exchanges

    @property
    def unserved(self) -> list[int]:
        """Numbers of the exchanges that nobody asked for."""
        return [each.number for each in self.exchanges if each.number not in self.served]

    def forget(self) -> None:
        """Let go of what was read; it is read again when needed."""
        self._exchanges = None


def list_recordings(source: Source) -> Iterator[Recording]:
    """Yield the samples of a source that have requests, reading no further than the first one."""
    for entry in source.samples():
        opened = None
        for _, event in source.events(entry.ref):
            if isinstance(event, Opened):
                opened = event
            elif isinstance(event, Requested):
                load = _loader(source, entry.ref, entry.name)
                yield Recording(entry.name, opened or Opened(key=entry.name), event, load)
                break


def _loader(source: Source, ref: object, name: str) -> Callable[[], list[RecordedExchange]]:
    return lambda: read_exchanges(source, ref, name)
