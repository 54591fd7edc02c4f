"""The log as a directory: the marker that makes it one, writers' folders, and their segments' names."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
import shutil
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from rollout_log.errors import LogDamaged, LogInUse, LogNotFound, LogTooNew, NotALog

__all__ = [
    "FORMAT",
    "MARKER",
    "check_format",
    "check_outside",
    "claim_folder",
    "create_log",
    "discard_folder",
    "hold_folder",
    "is_live",
    "logs_at",
    "read_marker",
    "release_folder",
    "sealed_path",
    "segment_number",
    "segment_path",
    "segments_of",
    "where_a_log_is",
    "writer_name",
    "writer_start_ns",
    "writers_of",
]

FORMAT = (1, 0)
"""Major and minor. A later major is refused; a later minor only adds."""
MARKER = "rollout-log.json"
LOCK = "lock"
SEALING = "sealing"
"""Another lock file: who holds it seals or prunes the folder."""

GONE, NEW = ".gone", ".new"
"""What the name of a folder ends with while it is being removed, and while it is being made."""

_WRITER = re.compile(r".+-\d+-\d+")
SEALED = ".sealed"
_SEGMENT = re.compile(r"segment-(\d{6,})\.(?:rlog|sealed)")

_claimed: set[str] = set()
"""Folders that this process has locked: it must not open their lock files again (see `claim_folder`)."""


class Marker(msgspec.Struct):
    """The content of `rollout-log.json`."""

    format: tuple[int, int]
    created_unix_ns: int = 0


def create_log(path: Path) -> None:
    """Make `path` a log, or accept that it is one.

    Raises `NotALog` for a symbolic link, a file, a place in another log, or a directory with something else
    in it; `LogTooNew` for a later format; `OSError` as it comes.
    """
    if path.is_symlink():
        raise NotALog(
            f"{path} is a symbolic link, which is not followed for writing; give the directory itself"
        )
    if path.exists() and not path.is_dir():
        raise NotALog(f"{path} is a file; a log is a directory")
    if not (path / MARKER).exists():
        check_outside(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700)
    if not (path / MARKER).exists():
        foreign = sorted(
            entry.name for entry in path.iterdir() if not entry.name.strip(".").startswith(MARKER)
        )
        if foreign and not (path / MARKER).exists():  # else another writer made it meanwhile
            raise NotALog(
                f"{path} is not a rollout log and not empty (it has {foreign[0]!r}); give a new directory"
            )
        _write_marker(path)
    read_marker(path)


def check_outside(path: Path) -> None:
    """Raise `NotALog` for a place to write to that lies in a log, which has its writers' files alone."""
    around = _log_around(path)
    if around:
        raise NotALog(
            f"{path} would be in the log {around}, which has its writers' files alone: give another place"
        )


def read_marker(path: Path) -> Marker:
    """Read what makes a directory a log. Raises `NotALog`, `LogTooNew`, or `LogDamaged`."""
    try:
        with (path / MARKER).open("rb") as file:
            data = file.read(1 << 16)
    except (FileNotFoundError, NotADirectoryError):
        raise NotALog(f"{path} is not a rollout log: it has no {MARKER}") from None
    try:
        found = msgspec.json.decode(data)
        major, minor = found["format"]
        check_format((int(major), int(minor)), path)
        return msgspec.convert(found, Marker, strict=False)
    except (msgspec.MsgspecError, ValueError, TypeError, KeyError) as error:
        raise LogDamaged(
            f"{path / MARKER} cannot be read ({error}); the segments beside it may be sound"
        ) from error


def check_format(found: tuple[int, ...], path: Path) -> None:
    """Raise `LogTooNew` for a later major version."""
    if found[0] > FORMAT[0]:
        raise LogTooNew(
            f"{path} has format {'.'.join(map(str, found))} and this version reads up to {FORMAT[0]}.x: "
            "upgrade rollout-log"
        )


def logs_at(path: Path) -> list[Path]:
    """Return the logs at a path: itself, or the logs directly in it. Raises `LogNotFound` or `NotALog`."""
    if not path.exists():
        raise LogNotFound(f"there is no log at {path}")
    if not path.is_dir():
        raise NotALog(f"{path} is a file; {where_a_log_is(path)}")
    if (path / MARKER).exists():
        return [path]
    inside = [entry for entry in sorted(path.iterdir()) if (entry / MARKER).is_file()]
    if not inside:
        around = f"; {where_a_log_is(path)}" if _log_around(path) else ""
        raise NotALog(f"{path} is not a rollout log, nor a directory of logs: it has no {MARKER}{around}")
    return inside


def where_a_log_is(path: Path) -> str:
    """Say what to give in place of a path that is no log: the log that it lies in, if there is one."""
    around = _log_around(path)
    return f"it is a part of the log {around}" if around else "a log is a directory"


def _log_around(path: Path) -> Path | None:
    """Return the log that a path lies in, as a segment, a writer's folder or whatever else."""
    folder = path.parent.resolve()
    return next((each for each in (folder, *folder.parents) if (each / MARKER).is_file()), None)


def writers_of(log: Path) -> list[Path]:
    """Return the folders of all writers of a log, by name."""
    return sorted(entry for entry in log.iterdir() if _WRITER.fullmatch(entry.name) and entry.is_dir())


def segments_of(folder: Path) -> list[Path]:
    """Return the segments of a writer, oldest first; a sealed one stands for the one it was made of."""
    try:
        there = sorted(folder.iterdir(), key=lambda path: path.suffix != SEALED)
    except FileNotFoundError:
        return []
    found: dict[int, Path] = {}
    for path in there:
        if _SEGMENT.fullmatch(path.name):
            found.setdefault(segment_number(path), path)
    return [found[number] for number in sorted(found)]


def segment_path(folder: Path, number: int) -> Path:
    """Return where a writer's segment lies."""
    return folder / f"segment-{number:06}.rlog"


def release_folder(name: str, descriptor: int) -> None:
    """Give up what `claim_folder` locked."""
    os.close(descriptor)
    _claimed.discard(name)


def sealed_path(segment: Path) -> Path:
    """Return where a segment lies once it is sealed."""
    return segment.with_suffix(SEALED)


def segment_number(path: Path) -> int:
    """Return the number of a segment, from its name."""
    found = _SEGMENT.fullmatch(path.name)
    return int(found[1]) if found else 0


def writer_name() -> str:
    """Return a new name for this process's folder: `<host>-<pid>-<start>`, the start in µs since 1970."""
    host = re.sub(r"[^A-Za-z0-9.]+", "-", socket.gethostname())[:64].strip("-.") or "host"
    return f"{host}-{os.getpid()}-{time.time_ns() // 1000}"


def writer_start_ns(folder: Path) -> int:
    """Return when a writer opened the log, in ns since 1970: nothing in its folder was recorded before."""
    return int(folder.name.rpartition("-")[2]) * 1000


def claim_folder(log: Path, name: str) -> int:
    """Make this process's folder and lock it for life. Returns the lock's file descriptor.

    It gets its name with the lock held and the file of its first segment in it, so that one without any
    segment has lost it. Nothing else in this process may open the lock file: closing it anywhere would
    give up the lock.
    """
    there = log / name
    folder = there if there.exists() else log / (name + NEW)
    folder.mkdir(mode=0o700, exist_ok=True)
    descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        raise LogInUse(f"{folder} is written by another process") from error
    try:
        if folder != there:
            segment_path(folder, 1).touch(mode=0o600)
            folder.rename(there)
    except OSError:
        os.close(descriptor)
        raise
    _claimed.add(name)
    return descriptor


def discard_folder(folder: Path) -> None:
    """Remove the folder of a writer that wrote nothing, under its lock; what is strange in it keeps it there.

    Whoever reads or seals meanwhile meets what it meets when segments are pruned: files that are gone.
    """
    gone = folder.with_name(folder.name + GONE)
    with contextlib.suppress(OSError):
        if all(path.name in {LOCK, SEALING} or path.name.startswith("segment-") for path in folder.iterdir()):
            folder.rename(gone)  # at once: else a reader makes LMDB's lock file again behind us
            shutil.rmtree(gone)


def is_live(folder: Path) -> bool:
    """Whether a process holds the folder as its writer; False also where that cannot be told."""
    if folder.name in _claimed:
        return True
    try:
        descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(descriptor)
    return False


@contextlib.contextmanager
def hold_folder(folder: Path) -> Iterator[None]:
    """Be the only process that seals or prunes a writer's folder. Raises `LogInUse`."""
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    descriptor = os.open(folder / SEALING, flags, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise LogInUse(f"{folder} is being sealed or pruned by another process") from error
        yield
    finally:
        os.close(descriptor)


def _write_marker(path: Path) -> None:
    """Write the marker whole or not at all; where two processes do it at once, either will do."""
    draft = path / f".{MARKER}.{os.getpid()}.{secrets.token_hex(4)}"
    data = msgspec.json.format(msgspec.json.encode(Marker(FORMAT, time.time_ns())), indent=2)
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data + b"\n")
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path / MARKER)
    finally:
        draft.unlink(missing_ok=True)


os.register_at_fork(after_in_child=_claimed.clear)
