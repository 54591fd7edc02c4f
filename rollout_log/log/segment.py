"""A segment: the tables of one LMDB file, and how their keys are made (`docs/format.md`)."""

from __future__ import annotations

import contextlib
import hashlib
import struct
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import lmdb
import msgspec

from rollout_log.errors import LogDamaged
from rollout_log.log.batch import Batches
from rollout_log.log.block import Block, Piece, pieces_of
from rollout_log.log.directory import FORMAT, check_format, segment_number
from rollout_log.log.environment import Environment, Row
from rollout_log.log.summary import Summary, decode_summary, encode_summary

__all__ = [
    "Segment",
    "Snapshot",
    "batch_row",
    "hash_key",
    "key_of_step",
    "last_rows",
    "sample_rows",
    "step_rows",
]

META, SAMPLES, KEYS, STEPS, LAST, BATCHES = TABLES = ("meta", "samples", "keys", "steps", "last", "batches")
HEADER = b"header"

_ORDINAL = struct.Struct(">Q")
_STEP = struct.Struct(">QQ")
_SIGN = 1 << 63

_ROWS_AT_ONCE = 4096
_BYTES_AT_ONCE = 4 << 20
"""What is copied in one read transaction before it is given back."""


def batch_row(number: int, data: bytes) -> Row:
    """Return the row of a batch."""
    return BATCHES, _ORDINAL.pack(number), data


def last_rows(last: Mapping[int, int]) -> list[Row]:
    """Return the rows that say which batch is the last one of each sample."""
    return [(LAST, _ORDINAL.pack(ordinal), _ORDINAL.pack(number)) for ordinal, number in last.items()]


def sample_rows(ordinal: int, summary: Summary) -> list[Row]:
    """Return the rows that make a sample known in a segment: its summary, its key, and its step."""
    key = summary.key.encode("utf-8", "surrogatepass")
    rows = [
        (SAMPLES, _ORDINAL.pack(ordinal), encode_summary(summary)),
        (KEYS, hash_key(key) + _ORDINAL.pack(ordinal), key),
    ]
    return rows if summary.step is None else rows + step_rows(ordinal, summary.step)


def step_rows(ordinal: int, step: int) -> list[Row]:
    """Return the row that says a sample took part in a step."""
    return [(STEPS, key_of_step(step) + _ORDINAL.pack(ordinal), b"")]


class Segment:
    """One segment of a writer, read or written. Close it when done."""

    def __init__(self, environment: Environment) -> None:
        self._environment = environment
        self.path = environment.path
        self.number = segment_number(environment.path)
        self._batches = Batches(self.path, self._batch)

    @classmethod
    def create(cls, path: Path, run: str) -> Segment:
        """Make a new segment, for writing."""
        header = {
            "format": list(FORMAT),
            "writer": path.parent.name,
            "run": run,
            "segment": segment_number(path),
            "created_unix_ns": time.time_ns(),
        }
        first = [(META, HEADER, msgspec.json.encode(header))]
        return cls(Environment.acquire(path, TABLES, create=True, first=first))

    @classmethod
    def open(cls, path: Path) -> Segment:
        """Open a segment for reading. Raises `LogTooNew`, `LogDamaged`, `NothingCommitted`."""
        try:
            segment = cls(Environment.acquire(path, TABLES))
        except lmdb.Error as error:
            raise LogDamaged(f"{path} cannot be opened: {error}") from error
        try:
            check_format(tuple(segment.header()["format"]), path)
        except (KeyError, TypeError, IndexError) as error:
            segment.close()
            raise LogDamaged(f"{path} has a header that says no format") from error
        except BaseException:
            segment.close()
            raise
        return segment

    def close(self) -> None:
        self._environment.release()

    def write(self, rows: list[Row]) -> None:
        """Commit rows. Raises `OSError` where the file is no longer at its path."""
        if not self._environment.in_place():
            raise FileNotFoundError(f"{self.path} is gone")
        self._environment.write(rows)

    def size(self) -> int:
        """Bytes on disk."""
        return self._environment.size()

    def header(self) -> dict[str, Any]:
        """What the segment says of itself."""
        with self._environment.read() as transaction:
            data = transaction.get(HEADER, db=self._environment.table(META))
        try:
            found = msgspec.json.decode(data or b"{}")
        except msgspec.DecodeError as error:
            raise LogDamaged(f"{self.path} has a header that cannot be read: {error}") from error
        return found if isinstance(found, dict) else {}

    @contextlib.contextmanager
    def snapshot(self) -> Iterator[Snapshot]:
        """Hold one state of all tables. For a process that does nothing else: no page is reused meanwhile."""
        with self._environment.read() as transaction:
            yield Snapshot(self._environment, transaction)

    def count(self) -> int:
        """How many samples it has."""
        with self._environment.read() as transaction:
            return int(transaction.stat(self._environment.table(SAMPLES))["entries"])

    def summary(self, ordinal: int) -> Summary | None:
        """Return a sample's summary as of this segment."""
        with self._environment.read() as transaction:
            data = transaction.get(_ORDINAL.pack(ordinal), db=self._environment.table(SAMPLES))
        return None if data is None else self._summary(data)

    def summaries(self) -> Iterator[tuple[int, Summary]]:
        """Yield all samples of this segment, by ordinal."""
        for key, data in self.rows(SAMPLES):
            yield _ORDINAL.unpack(key)[0], self._summary(data)

    def with_key(self, key: str) -> list[int]:
        """Return the ordinals of all samples of a key."""
        name = key.encode("utf-8", "surrogatepass")
        return [_ORDINAL.unpack(row[16:])[0] for row, data in self.rows(KEYS, hash_key(name)) if data == name]

    def in_step(self, step: int) -> list[int]:
        """Return the ordinals of all samples that took part in a step."""
        return [_STEP.unpack(row)[1] for row, _ in self.rows(STEPS, key_of_step(step))]

    def steps(self) -> Iterator[int]:
        """Yield every step that a sample took part in, ascending."""
        last = None
        for row, _ in self.rows(STEPS):
            if row[:8] != last:
                last = row[:8]
                yield _STEP.unpack(row)[0] - _SIGN

    def blocks(self, ordinal: int, start: int = 0) -> Iterator[Block]:
        """Yield a sample's blocks that hold events from `start` on. Raises `LogDamaged`."""
        return self._batches.blocks(ordinal, self.last([ordinal])[1].get(ordinal, 0), start)

    def last(self, ordinals: Iterable[int]) -> tuple[int, dict[int, int]]:
        """Return the number of the last batch, 0 where there is none, and of the last one of each sample."""
        with self._environment.read() as transaction:
            with transaction.cursor(db=self._environment.table(LAST)) as cursor:
                rows = cursor.getmulti(map(_ORDINAL.pack, ordinals))
            found = {_ORDINAL.unpack(key)[0]: _ORDINAL.unpack(value)[0] for key, value in rows}
            with transaction.cursor(db=self._environment.table(BATCHES)) as cursor:
                number = int.from_bytes(cursor.key(), "big") if cursor.last() else 0
        return number, found

    def pieces(self, ordinal: int, start: int = 0) -> Iterator[Piece]:
        """Yield a sample's events from `start` on. Raises `LogDamaged`."""
        return pieces_of(self.blocks(ordinal, start), start)

    def rows(self, table: str, prefix: bytes = b"", start: bytes = b"") -> Iterator[tuple[bytes, bytes]]:
        """Yield the rows of a table whose key has a prefix, copied some thousand at a time."""
        start = max(prefix, start)
        while True:
            copied: list[tuple[bytes, bytes]] = []
            held = 0
            with (
                self._environment.read() as transaction,
                transaction.cursor(db=self._environment.table(table)) as cursor,
            ):
                there = cursor.set_range(start) if start else cursor.first()
                for row in cursor.iternext() if there else ():
                    if not row[0].startswith(prefix):
                        there = False
                        break
                    copied.append(row)
                    held += len(row[1])
                    if len(copied) == _ROWS_AT_ONCE or held >= _BYTES_AT_ONCE:
                        break
                else:
                    there = False
            yield from copied
            if not there:
                return
            start = copied[-1][0] + b"\0"

    def _batch(self, number: int) -> bytes | None:
        with self._environment.read() as transaction:
            return transaction.get(_ORDINAL.pack(number), db=self._environment.table(BATCHES))

    def _summary(self, data: bytes) -> Summary:
        try:
            return decode_summary(data)
        except msgspec.DecodeError as error:
            raise LogDamaged(f"{self.path} has a row of samples that cannot be read: {error}") from error


class Snapshot:
    """All tables of a segment at one moment."""

    def __init__(self, environment: Environment, transaction: lmdb.Transaction[bytes]) -> None:
        self._environment = environment
        self._transaction = transaction
        self._batches = Batches(environment.path, self._batch)

    def blocks(self, ordinal: int) -> Iterator[Block]:
        """Yield a sample's blocks. Raises `LogDamaged`."""
        return self._batches.blocks(ordinal, _last_of(self._transaction, self._environment, ordinal))

    def rows(self, table: str) -> Iterator[tuple[bytes, bytes]]:
        """Yield the rows of a table. Raises `LogDamaged` where they are not as many as the table says."""
        handle = self._environment.table(table)
        told = self._transaction.stat(handle)["entries"]
        read = 0
        with self._transaction.cursor(db=handle) as cursor:
            for row in cursor:
                read += 1
                if read > told:
                    break
                yield row
        if read != told:
            raise LogDamaged(f"{table} says it has {told} rows, and {read} or more can be read")

    def _batch(self, number: int) -> bytes | None:
        return self._transaction.get(_ORDINAL.pack(number), db=self._environment.table(BATCHES))


def _last_of(transaction: lmdb.Transaction[bytes], environment: Environment, ordinal: int) -> int:
    """Return a sample's last batch, 0 where it has none."""
    found = transaction.get(_ORDINAL.pack(ordinal), db=environment.table(LAST))
    return 0 if found is None else int.from_bytes(found, "big")


def hash_key(key: bytes) -> bytes:
    """Return what stands for a sample's key: LMDB's keys end at 511 bytes, and a sample's may be longer."""
    return hashlib.blake2b(key, digest_size=16).digest()


def key_of_step(step: int) -> bytes:
    """Return what stands for a step: signed, in an order that bytes compare in.

    Steps beyond 64 bits share the outermost ones.
    """
    return _ORDINAL.pack(min(max(step + _SIGN, 0), 2 * _SIGN - 1))
