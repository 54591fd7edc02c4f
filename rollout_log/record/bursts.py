"""Work that is put off until a coroutine is about to wait.

Many reads of a busy stream come in one go: the event loop hands over a buffer, and the HTTP client yields
chunk after chunk of it without waiting in between. Nobody else runs meanwhile, so nobody sees whether each
chunk was dealt with by itself or all of them together just before the wait, which costs a fraction.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Generator
from types import coroutine
from typing import Any, TypeVar

__all__ = ["before_waits"]

_Result = TypeVar("_Result")


async def before_waits(work: Coroutine[Any, Any, _Result], settle: Callable[[], None]) -> _Result:
    """Run `work`, and call `settle` whenever it is about to wait; what that raises is raised in `work`."""
    return await _drive(work, settle)


@coroutine
def _drive(work: Coroutine[Any, Any, _Result], settle: Callable[[], None]) -> Generator[Any, Any, _Result]:
    resume: Callable[[Any], Any] = work.send
    value: Any = None
    while True:
        try:
            awaited = resume(value)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]  # the protocol of generators is untyped here
        try:
            settle()
            resume, value = work.send, (yield awaited)
        except BaseException as error:  # whatever it is, it is the coroutine's to deal with
            resume, value = work.throw, error
