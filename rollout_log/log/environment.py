"""One LMDB file, opened once in this process and shared by whoever reads or writes it.

LMDB's rules that this module keeps: a file is never open twice in a process; a child of a fork
neither uses nor closes what it inherited; the map grows only while nobody reads; values are copied.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import struct
import threading
from collections.abc import Iterator, Sequence
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import lmdb
import lmdb.verify

from rollout_log.errors import LogDamaged, LogInUse

__all__ = ["Environment", "NothingCommitted", "check_length"]

MAP_SIZE = 1 << 40
"""Bytes of address space, not of disk: large enough that a writer's map hardly ever grows."""
READ_MAP_SIZE = 1 << 30
"""The least for reading. A process has room for about a hundred maps of the size above, and a log may
have more segments."""
_MAP_LEAST = 1 << 20
_READERS = 510
_CHECK_READERS = 256
"""Commits."""

_registry: dict[str, Environment] = {}
_registry_lock = threading.Lock()

Row = tuple[str, bytes, bytes]
"""Table, key, value."""


class NothingCommitted(LogDamaged):
    """Nothing was ever committed into the file: it is just being made, or its writer died over that.

    No damage where it is the last one of its writer, to which nothing came.
    """


class Environment:
    """A reference-counted LMDB environment. Get one from `acquire`, give it back with `release`."""

    def __init__(self, path: Path, tables: Sequence[str], create: bool, first: Sequence[Row] = ()) -> None:
        self.path = path
        self.writable = create
        self._tables = tables
        self._first = first
        self._broken = False
        self._commits = 0
        self._name = ""
        self._pid = os.getpid()
        self._references = 1
        self._gate = threading.Condition()
        self._readers = 0
        self._growing = False
        self._open()

    @classmethod
    def acquire(
        cls, path: Path, tables: Sequence[str], *, create: bool = False, first: Sequence[Row] = ()
    ) -> Environment:
        """Open the file, or share it where this process has it open.

        `create` opens for writing and makes the file, its tables and the `first` rows in one
        transaction. Otherwise a file that is too short, or is none of ours, raises `LogDamaged`; one
        without any commit `NothingCommitted`.
        """
        name = os.path.realpath(path)
        with _registry_lock:
            found = _registry.get(name)
            if found is not None and (found.writable or not create):
                found._references += 1
                return found
            if found is not None:
                raise LogInUse(
                    f"{path} is open for reading in this process, so it cannot be opened for writing"
                )
            made = _registry[name] = cls(path, tables, create, first)
            made._name = name
            return made

    def release(self) -> None:
        """Give up one reference; the last one closes the file."""
        if self._pid != os.getpid():
            return
        with _registry_lock:
            self._references -= 1
            if self._references:
                return
            del _registry[self._name]
            with self._shut():
                self._env.close()

    @contextlib.contextmanager
    def read(self) -> Iterator[lmdb.Transaction[bytes]]:
        """Yield a read transaction, short and not nested; what LMDB raises in it becomes `LogDamaged`."""
        try:
            transaction = self._begin()
        except lmdb.Error as error:
            raise LogDamaged(f"{self.path} cannot be read: {error}") from error
        try:
            yield transaction
        except lmdb.Error as error:
            raise LogDamaged(f"{self.path} cannot be read: {error}") from error
        finally:
            transaction.abort()
            self._leave()

    def write(self, rows: Sequence[Row]) -> None:
        """Put rows in one transaction and commit it; grows the map where they do not fit."""
        self._check_process()
        if self._broken:
            self._reopen()
        while True:
            try:
                with self._env.begin(write=True) as transaction:
                    for table, of_table in groupby(rows, itemgetter(0)):
                        with transaction.cursor(db=self.table(table)) as cursor:
                            cursor.putmulti((key, value) for _, key, value in of_table)
                self._commits += 1
                if self._commits % _CHECK_READERS == 0:
                    self._env.reader_check()  # readers that were killed keep pages from being used again
                return
            except (lmdb.MapFullError, lmdb.MapResizedError):
                self._grow()
            except (lmdb.PanicError, lmdb.CorruptedError, lmdb.BadTxnError):
                self._broken = True
                raise

    def table(self, name: str) -> Any:
        """Return the handle of a table."""
        return self._handles[name]

    def size(self) -> int:
        """Bytes the file has come to."""
        self._check_process()
        return (self._env.info()["last_pgno"] + 1) * self._page

    def in_place(self) -> bool:
        """Whether the path still leads to the open file: a commit into a removed file is lost."""
        try:
            now = self.path.stat()
        except OSError:
            return False
        return (now.st_dev, now.st_ino) == self._identity

    def _reopen(self) -> None:
        """Open the file afresh, readers of this process shut out: the way on after a failed meta write."""
        with self._shut():
            self._env.close()
            self._open()
        self._broken = False

    def _open(self) -> None:
        size = MAP_SIZE if self.writable else max(READ_MAP_SIZE, 2 * self.path.stat().st_size)
        while True:
            try:
                self._env = self._open_at(size)
                break
            except lmdb.MemoryError:
                size //= 2
                if size < _MAP_LEAST:
                    raise
        try:
            self._page = self._env.stat()["psize"]
            if self.writable:
                with self._env.begin(write=True) as transaction:
                    self._handles = {name: self._handle(name, transaction) for name in self._tables}
                    for table, key, value in self._first:
                        transaction.put(key, value, db=self.table(table))
            else:
                self._handles = {name: self._handle(name) for name in self._tables}
            there = self.path.stat()
            self._identity = (there.st_dev, there.st_ino)
        except lmdb.NotFoundError:
            self._env.close()
            raise LogDamaged(f"{self.path} is an LMDB file without the tables of a segment") from None
        except BaseException:
            self._env.close()
            raise

    def _handle(self, name: str, transaction: lmdb.Transaction[bytes] | None = None) -> Any:
        return self._env.open_db(name.encode(), txn=transaction, create=self.writable)

    def _open_at(self, size: int) -> lmdb.Environment:
        def opened(lock: bool) -> lmdb.Environment:
            return lmdb.open(
                os.fspath(self.path),
                subdir=False,
                map_size=size,
                max_dbs=16,
                max_readers=_READERS,
                mode=0o600,
                readonly=not self.writable,
                create=self.writable,
                meminit=True,
                readahead=False,
                lock=lock,
                lib_version=0,  # data format 1, which every LMDB there is reads
            )

        if self.writable:
            return opened(lock=True)
        check_length(self.path)
        try:
            return opened(lock=True)
        except lmdb.InvalidError as error:
            raise LogDamaged(f"{self.path} does not begin as a segment does: it was overwritten") from error
        except lmdb.MemoryError:
            raise
        except (lmdb.CorruptedError, lmdb.PageNotFoundError, lmdb.VersionMismatchError) as error:
            raise LogDamaged(f"{self.path} cannot be opened: {error}") from error
        except lmdb.Error as error:
            if "already open" in str(error):
                raise LogInUse(
                    f"{self.path} is open in the process this one was forked from; "
                    "read it from a process that was started afresh"
                ) from error
            # Somebody else's file: no lock can be taken, and batches check themselves.
            return opened(lock=False)

    def _begin(self) -> lmdb.Transaction[bytes]:
        self._check_process()
        for last in (False, True):
            with self._gate:
                self._gate.wait_for(lambda: not self._growing)
                self._readers += 1
            try:
                return self._env.begin()
            except lmdb.MapResizedError:
                self._leave()
                if last:
                    raise
                self._grow()
            except BaseException:
                self._leave()
                raise
        raise AssertionError("unreachable")

    def _leave(self) -> None:
        with self._gate:
            self._readers -= 1
            self._gate.notify_all()

    @contextlib.contextmanager
    def _shut(self) -> Iterator[None]:
        """Keep this process's readers out."""
        with self._gate:
            self._gate.wait_for(lambda: not self._growing)
            self._growing = True
            self._gate.wait_for(lambda: not self._readers)
        try:
            yield
        finally:
            with self._gate:
                self._growing = False
                self._gate.notify_all()

    def _grow(self) -> None:
        with self._shut():
            self._env.set_mapsize(max(self._env.info()["map_size"], self.size()) * 2)

    def _check_process(self) -> None:
        if self._pid != os.getpid():
            raise LogInUse(f"{self.path} was opened before this process was forked; open the log again here")


def check_length(path: Path) -> None:
    """Raise `LogDamaged` where the file ends before pages it uses: reading those would kill the process.

    `NothingCommitted` where it uses none. Reads the two meta pages with `pread`; only where the file is short
    does the slow walk decide, since free pages at the end may legally be missing.
    """
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        head = os.pread(file.fileno(), 1 << 16, 0)
    if not size:
        raise NothingCommitted(f"{path} is empty")
    page, pages, transaction = _extent(head)
    if page is None:
        return  # no LMDB file: LMDB says so itself, safely
    if not transaction:
        raise NothingCommitted(f"{path} has no transaction")
    if size < 2 * page:
        raise LogDamaged(f"{path} has {size} bytes, which do not hold its two meta pages")
    if size < pages * page:
        try:
            found = lmdb.verify.verify(os.fspath(path))  # type: ignore[no-untyped-call] # it has no annotations
        except lmdb.verify.VerifyError as error:
            raise LogDamaged(f"{path} is damaged: {error}") from error
        if found:
            raise LogDamaged(f"{path} has {size} bytes where its meta page says {pages * page}: {found[0]}")


_META = struct.Struct("=IIQQI")  # magic, version, address, map size, page size
_LAST = struct.Struct("=QQ")  # last page, transaction


def _extent(head: bytes) -> tuple[int | None, int, int]:
    """Return page size, number of pages and transaction by the newer meta page; None where there is none."""
    newest, page_size, pages = -1, None, 0
    offset = 0
    for _ in range(2):
        if len(head) < offset + 16 + 136:
            break
        magic, version, _, _, page = _META.unpack_from(head, offset + 16)
        last, transaction = _LAST.unpack_from(head, offset + 16 + 120)
        if magic != 0xBEEFC0DE or version != 1 or not 256 <= page <= 1 << 16:
            break
        if transaction > newest:
            newest, page_size, pages = transaction, page, last + 1
        offset = page
    return page_size, pages, newest


def _after_fork_in_child() -> None:
    """Forget what was inherited, and keep it from ever being closed here: that would disturb the parent."""
    global _registry_lock
    _registry_lock = threading.Lock()
    for environment in _registry.values():
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(environment._env))
    _registry.clear()


os.register_at_fork(after_in_child=_after_fork_in_child)
