"""Files that are there whole or not at all: written under another name, synced, checked, then renamed."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

__all__ = ["whole_file"]


@contextlib.contextmanager
def whole_file(
    path: Path, *, check: Callable[[Path], None] | None = None, modified_ns: int | None = None
) -> Iterator[BinaryIO]:
    """Yield a file to write; at the end it takes the place of `path`, unless something raised.

    `check` gets the written file before that, and raises where it is not right. `modified_ns` is the time
    of modification to give it.
    """
    _clear(path)
    draft = path.with_name(f".{path.name}.{os.uname().nodename}-{os.getpid()}.draft")
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    try:
        with os.fdopen(os.open(draft, flags, 0o600), "w+b") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        if check is not None:
            check(draft)
        if modified_ns is not None:
            os.utime(draft, ns=(modified_ns, modified_ns))
        draft.replace(path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
    descriptor = os.open(path.parent, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _clear(path: Path) -> None:
    """Remove drafts of processes of this host that are gone, and of this one."""
    start = f".{path.name}.{os.uname().nodename}-"
    for entry in path.parent.glob(".*.draft"):
        pid = entry.name.removeprefix(start).removesuffix(".draft")
        if entry.name.startswith(start) and (pid == str(os.getpid()) or not Path("/proc", pid).exists()):
            entry.unlink(missing_ok=True)
