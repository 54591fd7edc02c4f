"""How a stand-in engine misbehaves, request by request and reproducibly."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

__all__ = ["EVERY_FAULT", "Delivery", "Fault", "FaultPlan", "InOrder", "Seeded"]

Kind = Literal[
    "none",  # only `delivery` is unusual
    "fin",  # the connection closes in mid-stream, without the last chunk
    "rst",  # the connection is reset in mid-stream
    "status",  # an HTTP error `code` instead of a stream
    "error_frame",  # an error frame of `code`, then [DONE] and a clean end
    "no_terminal",  # a clean end without a finish reason
    "stall",  # no bytes and no end, while /health answers
    "stall_once",  # no bytes until somebody asks /health, then the stream goes on
    "stall_dead",  # no bytes and no end, and /health says 503; an abort changes nothing
    "crash",  # the whole server goes, and refuses connections for `seconds`
    "finish_on_abort",  # the answer was complete when the abort came: a normal finish
    "token_on_abort",  # the abort frame carries a token
    "silent_abort",  # an abort ends the stream without its closing frame
    "linger",  # the finish is sent, the end is held back: before frame `after` of usage, [DONE], last chunk
]


@dataclass(frozen=True)
class Delivery:
    """How frames become reads."""

    coalesce: int = 1
    """Frames per chunk."""
    split: int | None = None
    """Seed of the places where a chunk is cut in two or more, anywhere."""
    drip: bool = False
    """Byte by byte."""


@dataclass(frozen=True)
class Fault:
    kind: Kind = "none"
    after: int = 2
    """Frames with tokens that are sent before it strikes; of `linger`: frames after the finish."""
    code: int = 500
    retry_after: int | None = None
    seconds: float = 0.1
    done: bool = True
    """Of `no_terminal`: whether [DONE] is sent."""
    delivery: Delivery = Delivery()

    @property
    def strikes_by_itself(self) -> bool:
        """Whether it needs no abort to show."""
        return self.kind not in {"none", "finish_on_abort", "token_on_abort", "silent_abort", "linger"}


EVERY_FAULT: dict[str, Fault] = {
    "fin": Fault("fin"),
    "fin at once": Fault("fin", after=0),
    "rst": Fault("rst"),
    "500": Fault("status", code=500),
    "429": Fault("status", code=429, retry_after=0),
    "error 400": Fault("error_frame", code=400),
    "error 500": Fault("error_frame", code=500),
    "no terminal": Fault("no_terminal"),
    "no terminal, no [DONE]": Fault("no_terminal", done=False),
    "stall": Fault("stall"),
    "stall, then on": Fault("stall_once"),
    "stall, dead engine": Fault("stall_dead"),
    "crash": Fault("crash"),
    "slow loris": Fault(delivery=Delivery(drip=True)),
    "coalesced": Fault(delivery=Delivery(coalesce=4)),
    "split": Fault(delivery=Delivery(split=7)),
    "coalesced and split": Fault(delivery=Delivery(coalesce=3, split=5)),
    "finish on abort": Fault("finish_on_abort"),
    "token on abort": Fault("token_on_abort"),
    "silent abort": Fault("silent_abort"),
}


class FaultPlan(Protocol):
    def __call__(self, prompt: Sequence[int], attempt: int) -> Fault:
        """Choose for a prompt's request number `attempt`, counted from 0 over its siblings."""
        ...


@dataclass(frozen=True)
class InOrder:
    """The first requests of every prompt meet these, later ones none."""

    faults: Sequence[Fault] = ()

    def __call__(self, prompt: Sequence[int], attempt: int) -> Fault:
        return self.faults[attempt] if attempt < len(self.faults) else Fault()


@dataclass(frozen=True)
class Seeded:
    """One request in `every` meets one of these; after `limit` requests a prompt has peace."""

    seed: int
    faults: Sequence[Fault]
    every: int = 2
    limit: int = 40

    def __call__(self, prompt: Sequence[int], attempt: int) -> Fault:
        draw = zlib.crc32(repr((self.seed, tuple(prompt), attempt)).encode())
        if attempt >= self.limit or draw % self.every:
            return Fault()
        return self.faults[draw // self.every % len(self.faults)]
