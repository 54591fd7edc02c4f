"""What is intact comes out of damaged files, whole or in part, and nothing else does."""

from __future__ import annotations

import os
import random
import shutil
import struct
from pathlib import Path

import pytest

from rollout_log.errors import LogNotFound, NotALog
from rollout_log.events import Delta, Opened
from rollout_log.log import Log, LogReader, Summary, salvage, sealing
from rollout_log.log.batch import HEADER_SIZE, MAGIC
from rollout_log.log.directory import MARKER, segments_of, writers_of
from rollout_log.log.keeper import Plan
from rollout_log.log.keeping import keep
from rollout_log.log.salvage import Salvage

PAGE = 4096


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A log of two segments, with batches in pages and batches over many pages."""
    path = tmp_path_factory.mktemp("salvage") / "log"
    log = Log.open(path, window_ms=3_600_000, seal=False)
    samples = []
    for number in range(30):
        opened = Opened(f"key-{number}", opened_unix_ns=number)
        samples.append(log.create(opened))
        log.append(samples[-1], 0, [opened])
    log.flush_sync()
    for at in range(1, 6):
        for sample in samples:
            log.append(
                sample, at, [Delta(at, random.Random(31 * sample + at).randbytes(40 + 500 * (sample % 4)))]
            )
        if at == 3:
            log.rotate()
        log.flush_sync()
    log.append(samples[3], 6, [Delta(0, b"x")], Summary("key-3", tokens=9))
    log.close()
    return path


@pytest.fixture(params=["as written", "sealed"])
def log_copy(request, whole, path, monkeypatch):
    shutil.copytree(whole, path)
    if request.param == "sealed":
        monkeypatch.setattr(sealing, "GROUP", 3000)
        for folder in writers_of(path):
            list(keep(Plan(folder)))
    return path


def content_of(path):
    with LogReader.open(path) as reader:
        return {entry.ref.ordinal: list(reader.events(entry.ref)) for entry in reader.samples()}


def salvaged(path):
    found = Salvage(path)
    for _ in found.scan():
        pass
    return {sample.ordinal: list(sample.events) for sample in found.samples()}, found


def segments(path):
    return [segment for folder in writers_of(path) for segment in segments_of(folder)]


def test_everything_comes_out_of_a_whole_log(log_copy, whole, monkeypatch):
    before = content_of(whole)
    events, found = salvaged(log_copy)
    assert events == before
    assert (found.broken, found.unreadable) == (0, 0)
    monkeypatch.setattr(salvage, "WINDOW", 1000)
    assert salvaged(log_copy)[0] == before, "a batch may lie over the end of a window"


@pytest.mark.parametrize("kept", [HEADER_SIZE, HEADER_SIZE + 8, HEADER_SIZE + 32, HEADER_SIZE + 3 * 32 + 20])
@pytest.mark.parametrize("over", [b"\0", b"\1", b"\xff"])
def test_a_batch_whose_directory_lmdb_wrote_over_is_not_broken(whole, path, kept, over):
    shutil.copytree(whole, path)
    segment = segments(path)[0]
    data = segment.read_bytes()
    at = data.index(MAGIC)
    with segment.open("ab") as file:
        file.write(data[at : at + kept] + over * (PAGE - kept))
    events, found = salvaged(path)
    assert found.broken == 0
    assert events == content_of(whole)


def test_a_batch_that_is_nowhere_else_is_broken(whole, path):
    shutil.copytree(whole, path)
    segment = segments(path)[0]
    data = bytearray(segment.read_bytes())
    at = data.index(MAGIC)
    data[at + HEADER_SIZE] ^= 1  # in its directory: what the other lines say stands
    segment.write_bytes(data)
    _, found = salvaged(path)
    assert found.broken == 1


def test_of_a_batch_that_says_it_is_large_no_more_is_read_than_its_directory(whole, path, monkeypatch):
    shutil.copytree(whole, path)
    segment = segments(path)[0]
    data = segment.read_bytes()
    head = bytearray(data[(at := data.index(MAGIC)) : at + HEADER_SIZE])
    head[32:36] = b"\xff" * 4
    with segment.open("ab") as file:
        file.write(head + bytes(PAGE - HEADER_SIZE))
    read: list[int] = []
    pread = os.pread
    monkeypatch.setattr(os, "pread", lambda *args: read.append(args[1]) or pread(*args))
    assert salvaged(path)[0] == content_of(whole)
    assert max(read) < 2 * salvage.WINDOW


def test_random_damage_costs_what_it_hits_and_makes_nothing_up(log_copy, whole):
    before = content_of(whole)
    dice = random.Random(9)
    for _ in range(8):
        segment = dice.choice(segments(log_copy))
        data = bytearray(segment.read_bytes())
        for _ in range(3):
            at = dice.randrange(len(data))
            length = dice.choice([1, 100, PAGE])
            data[at : at + length] = dice.randbytes(len(data[at : at + length]))
        segment.write_bytes(data)
        after, _ = salvaged(log_copy)
        for ordinal, events in after.items():
            numbers = [number for number, _ in events]
            assert numbers == sorted(set(numbers))
            assert set(numbers) <= set(range(len(before[ordinal])))
            assert all(before[ordinal][number] == (number, event) for number, event in events)
    assert sum(map(len, after.values())) > sum(map(len, before.values())) // 3


def test_lmdbs_own_pages_are_not_needed(whole, path):
    shutil.copytree(whole, path)
    for segment in segments(path):
        data = bytearray(segment.read_bytes())
        data[: 2 * PAGE] = bytes(2 * PAGE)  # the meta pages
        at = 2 * PAGE
        while at < len(data):  # every page's header; of those that one value fills, the first has one
            flags, several = struct.unpack_from("=HI", data, at + 10)
            data[at : at + 16] = bytes(16)
            at += PAGE * (several if flags & 4 else 1)
        segment.write_bytes(data)
    assert salvaged(path)[0] == content_of(whole)


def test_a_file_that_was_cut_gives_what_is_before_the_cut(log_copy, whole):
    before = sum(map(len, content_of(whole).values()))
    for segment in segments(log_copy):
        segment.write_bytes(segment.read_bytes()[: segment.stat().st_size // 2])
    after, _ = salvaged(log_copy)
    assert 0 < sum(map(len, after.values())) < before


def test_pages_that_the_disk_does_not_give(whole, path, monkeypatch):
    shutil.copytree(whole, path)
    segment = segments(path)[0]
    bad = segment.read_bytes().index(MAGIC) // PAGE
    pread = os.pread

    def failing(descriptor, length, offset):
        first, last = offset // PAGE, (offset + length - 1) // PAGE
        if Path(f"/proc/self/fd/{descriptor}").readlink() == segment and first <= bad <= last:
            raise OSError(5, "Input/output error")
        return pread(descriptor, length, offset)

    monkeypatch.setattr(os, "pread", failing)
    after, found = salvaged(path)
    assert found.unreadable >= PAGE
    assert sum(map(len, after.values())) > 100


def test_summaries_of_sealed_segments_are_known(log_copy):
    found = Salvage(log_copy)
    list(found.scan())
    summaries = {sample.ordinal: sample.summary for sample in found.samples()}
    if segments(log_copy)[0].suffix == ".sealed":
        assert summaries[3] == Summary("key-3", tokens=9)
    else:
        assert set(summaries.values()) == {None}, "rows of LMDB have no checksum"


def test_a_log_without_its_marker(log_copy):
    (log_copy / MARKER).unlink()
    assert len(salvaged(log_copy)[0]) == 30


def test_nothing_to_salvage_is_said(path):
    with pytest.raises(LogNotFound):
        Salvage(path)
    path.mkdir()
    with pytest.raises(NotALog):
        Salvage(path)
