"""Damage is found, named, and never kills who looks for it."""

from __future__ import annotations

import random
import shutil
import struct
from pathlib import Path

import lmdb
import pytest

from rollout_log.errors import LogDamaged, LogNotFound, NotALog, RolloutLogError
from rollout_log.events import Delta, Opened, encode_events
from rollout_log.log import Log, LogReader
from rollout_log.log.batch import HEADER_SIZE, MAGIC, Packer, size_of, unpack_batch
from rollout_log.log.directory import MARKER, claim_folder, create_log, release_folder, segments_of
from rollout_log.log.verify import verify

PAGE = 4096


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A log of two segments, with small batches and large ones."""
    path = tmp_path_factory.mktemp("verify") / "log"
    log = Log.open(path, window_ms=3_600_000)
    samples = []
    for number in range(60):
        opened = Opened(f"key-{number}", step=number % 4, opened_unix_ns=number)
        samples.append(log.create(opened))
        log.append(samples[-1], 0, [opened])
    log.flush_sync()
    for sample in samples:
        log.append(sample, 1, [Delta(0, random.Random(sample).randbytes(40 + 150 * sample))])
    log.rotate()
    log.flush_sync()
    for sample in samples[::2]:
        log.append(sample, 2, [Delta(0, b"more")])
    log.close()
    return path


@pytest.fixture
def log_copy(whole, path):
    shutil.copytree(whole, path)
    return path


def segment_of(path, number=0):
    (folder,) = [entry for entry in path.iterdir() if entry.is_dir()]
    return segments_of(folder)[number]


def edit(segment, table, change):
    """Let `change(transaction, handle)` edit a table, as no writer would."""
    with lmdb.open(str(segment), subdir=False, max_dbs=8) as environment:
        handle = environment.open_db(table, create=False)
        with environment.begin(write=True) as transaction:
            change(transaction, handle)


def content_of(path):
    """Everything a reader gets out of a log."""
    with LogReader.open(path) as reader:
        return [(entry.name, entry.summary, list(reader.events(entry.ref))) for entry in reader.samples()]


def whats(report):
    return {finding.what for finding in report.damage}


def test_a_whole_log_has_no_damage(log_copy):
    report = verify(log_copy)
    assert report.damage == []
    assert (report.samples, report.blocks, report.events) == (60, 150, 150)


def test_a_live_log_has_no_damage(log, path, begin, deltas):
    sample = begin(log, "key")
    log.append(sample, 1, deltas(1, 5))
    log.flush_sync()
    assert (verify(path).damage, verify(path).events) == ([], 5)
    log.append(sample, 5, deltas(5, 6))
    assert log.flush_sync()


def test_nothing_to_verify_is_said(path):
    with pytest.raises(LogNotFound):
        verify(path)
    path.mkdir()
    with pytest.raises(NotALog):
        verify(path)


def test_a_file_that_was_cut_is_found_and_not_read_in_place(log_copy):
    segment = segment_of(log_copy)
    size = segment.stat().st_size
    for keep in (size - PAGE, size // 2, 100):
        with segment.open("r+b") as file:
            file.truncate(keep)
        report = verify(log_copy)
        assert {finding.path for finding in report.damage if finding.what != "sequence"} == {segment}
        assert not any("SIG" in finding.detail for finding in report.damage)
        with LogReader.open(log_copy) as reader, pytest.raises(RolloutLogError):
            list(reader.samples())


def test_a_zeroed_page_is_found_wherever_it_is(whole, path):
    pages = segment_of(whole).stat().st_size // PAGE
    damaged = 0
    for page in random.Random(1).sample(range(2, pages), 8):
        shutil.copytree(whole, path)
        with segment_of(path).open("r+b") as file:
            file.seek(page * PAGE)
            file.write(bytes(PAGE))
        report = verify(path)
        damaged += bool(report.damage)
        assert report.damage or content_of(path) == content_of(whole), "only a free page may go unnoticed"
        assert not any("SIG" in finding.detail for finding in report.damage)
        shutil.rmtree(path)
    assert damaged >= 4


def test_flipped_bits_are_found_in_the_content_of_a_batch(log_copy):
    segment = segment_of(log_copy)
    data = bytearray(segment.read_bytes())
    places = [at for at in range(len(data)) if data.startswith(MAGIC, at)]
    broken = 0
    for at in places[::3]:
        data[at + (HEADER_SIZE + size_of(data[at : at + HEADER_SIZE])) // 2] ^= 0x10
        broken += 1
    segment.write_bytes(data)
    report = verify(log_copy)
    found = [finding for finding in report.damage if "checksum" in finding.detail]
    assert 0 < len(found) <= broken
    assert 0 < report.blocks < 150
    assert "sequence" in whats(report), "what a broken batch held is missing from its samples"
    rest = [finding for finding in report.damage if finding not in found]
    assert {finding.what for finding in rest} == {"sequence"}, "nobody is blamed for pointing to it"


def test_random_flips_anywhere_never_end_in_a_signal_or_a_traceback(whole, path):
    for seed in range(6):
        shutil.copytree(whole, path)
        segment = segment_of(path)
        data = bytearray(segment.read_bytes())
        dice = random.Random(seed)
        for _ in range(60):
            data[dice.randrange(len(data))] ^= 1 << dice.randrange(8)
        segment.write_bytes(data)
        report = verify(path)
        assert report.damage
        assert not any("SIG" in finding.detail or "Traceback" in finding.detail for finding in report.damage)
        shutil.rmtree(path)


@pytest.mark.parametrize("content", [b"", b"hello", b"\0" * 20_000, b"\xff" * 9000])
def test_something_else_in_a_segments_place(log_copy, content):
    segment = segment_of(log_copy)
    segment.write_bytes(content)
    report = verify(log_copy)
    assert report.damage
    assert not any("SIG" in finding.detail for finding in report.damage)


def test_a_missing_row_and_a_row_too_many_are_found(log_copy):
    segment = segment_of(log_copy, 1)
    ordinal = struct.pack(">Q", 4)

    def drop(prefix):
        def change(transaction, handle):
            with transaction.cursor(handle) as cursor:
                for key in [key for key, _ in cursor if key.endswith(ordinal) or key.startswith(prefix)]:
                    transaction.delete(key, db=handle)

        return change

    edit(segment, b"keys", drop(b"none"))
    edit(segment, b"steps", drop(b"none"))
    assert whats(verify(log_copy)) == {"key", "step"}
    edit(segment, b"samples", drop(b"none"))
    report = verify(log_copy)
    assert whats(report) == {"sample"}
    assert "sample 4 has blocks and is not in samples" in report.damage[0].detail


def repack(segment, number, change, before=()):
    """Let `change(blocks)` return other blocks for a batch, which is packed again as a writer would.

    `before`: by sample, another batch that is said to come before this one.
    """

    def put(transaction, handle):
        key = struct.pack(">Q", number)
        found = unpack_batch(transaction.get(key, db=handle))
        blocks = [(block.ordinal, block.first, block.count, block.payload) for block in found.blocks()]
        last = {place.ordinal: place.previous for place in found.claim.places()} | dict(before)
        ((_, data),) = Packer(found.claim.writer, number, last).pack(change(blocks))
        transaction.put(key, data, db=handle)

    edit(segment, b"batches", put)


def details(path):
    return [f"{finding.what}: {finding.detail}" for finding in verify(path).damage]


def test_rows_of_no_sample_are_found(log_copy):
    segment = segment_of(log_copy, 1)
    edit(segment, b"steps", lambda transaction, handle: transaction.put(b"\0" * 15 + b"\1", b"", db=handle))
    other = b"\1" * 16 + struct.pack(">Q", 4)
    edit(segment, b"keys", lambda transaction, handle: transaction.put(other, b"x", db=handle))
    assert whats(verify(log_copy)) == {"step", "key"}


def test_missing_and_doubled_events_are_found(log_copy):
    second = segment_of(log_copy, 1)
    repack(second, 1, lambda blocks: [block for block in blocks if block[0] != 8])
    assert "last: batch 1 is not the last one of sample 8" in details(log_copy)
    third = [Delta(0, b"more")]
    again = encode_events([*third, *third])
    repack(second, 1, lambda blocks: [*blocks, (10, 2, 2, again)])
    assert "sequence: sample 10 has events 2 to 2 twice" in details(log_copy)


def test_a_batch_that_is_gone_is_found_and_by_whom_it_is_missed(log_copy):
    first = segment_of(log_copy)
    edit(first, b"batches", lambda transaction, handle: transaction.delete(struct.pack(">Q", 1), db=handle))
    found = details(log_copy)
    assert "sequence: sample 8 lacks events 0 to 0" in found
    assert any("sample 8 has events in batch 1 before it, and it has some in 0" in each for each in found)
    with LogReader.open(log_copy) as reader, pytest.raises(LogDamaged, match="batch 1 is missing"):
        list(reader.events(reader.find("key-8")))


def test_a_batch_that_points_to_itself_is_found(log_copy):
    repack(segment_of(log_copy, 1), 1, list, {8: 1})
    assert details(log_copy) == [
        "batch: batch 1 says that sample 8 has events in batch 1 before it, and it has some in 0"
    ]
    with LogReader.open(log_copy) as reader, pytest.raises(LogDamaged, match="batch 1"):
        list(reader.events(reader.find("key-8")))


def test_a_batch_in_anothers_place_is_found(log_copy):
    def swap(transaction, handle):
        data = transaction.get(struct.pack(">Q", 1), db=handle)
        transaction.put(struct.pack(">Q", 2), data, db=handle)

    edit(segment_of(log_copy), b"batches", swap)
    found = details(log_copy)
    assert any(each.startswith("batch: batch 1 lies where another belongs") for each in found)
    with (
        LogReader.open(log_copy) as reader,
        pytest.raises(LogDamaged, match="batch 2"),
    ):
        list(reader.events(reader.find("key-0")))


def test_rows_that_lead_to_another_batch_or_to_none_are_found(log_copy):
    segment = segment_of(log_copy, 1)
    key = struct.pack(">Q", 4)
    edit(segment, b"last", lambda transaction, handle: transaction.put(key, struct.pack(">Q", 9), db=handle))
    assert details(log_copy) == ["last: batch 9 is not the last one of sample 4"]
    edit(segment, b"last", lambda transaction, handle: transaction.delete(key, db=handle))
    assert details(log_copy) == ["last: sample 4 has batches and is not in last"]


def test_a_damaged_marker_hides_nothing_else(log_copy):
    (log_copy / MARKER).write_text("{")
    report = verify(log_copy)
    assert whats(report) == {"marker"}
    assert report.events == 150


def meta_pages_of(path):
    """The two pages that a writer makes first, with nothing committed."""
    with lmdb.open(str(path / "fresh"), subdir=False, max_dbs=8, lib_version=0):
        return (path / "fresh").read_bytes()


@pytest.mark.parametrize("pages", [0, 1, 2])
def test_a_segment_into_which_nothing_was_committed_is_none_where_it_is_the_newest(log_copy, tmp_path, pages):
    unmade = meta_pages_of(tmp_path)[: pages * PAGE]
    segment_of(log_copy, 1).with_name("segment-000003.rlog").write_bytes(unmade)
    assert verify(log_copy).damage == []
    with LogReader.open(log_copy) as reader:
        assert len(list(reader.samples())) == 60
    segment_of(log_copy, 1).write_bytes(unmade)
    assert "header" in whats(verify(log_copy)), "nobody goes on behind one"
    with LogReader.open(log_copy) as reader, pytest.raises(LogDamaged, match=r"segment-000002\.rlog"):
        list(reader.samples())


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("zeroed", [(0, 1), (1, 2), (0, 2)])
def test_a_segment_whose_beginning_was_overwritten_is_named_and_never_taken_for_empty(
    log_copy, number, zeroed
):
    segment = segment_of(log_copy, number)
    with segment.open("r+b") as file:
        file.seek(zeroed[0] * PAGE)
        file.write(bytes((zeroed[1] - zeroed[0]) * PAGE))
    assert segment in {finding.path for finding in verify(log_copy).damage}
    with LogReader.open(log_copy) as reader, pytest.raises(LogDamaged, match=segment.name):
        list(reader.samples())


def test_a_file_of_another_kind_is_no_segment(log_copy, tmp_path):
    other = tmp_path / "other"
    with lmdb.open(str(other), subdir=False, max_dbs=8, lib_version=0) as environment:
        environment.open_db(b"theirs")
    for content in (b"hello", b"\xff" * 9000, other.read_bytes()):
        segment_of(log_copy, 1).write_bytes(content)
        assert verify(log_copy).damage
        with LogReader.open(log_copy) as reader, pytest.raises(LogDamaged, match=r"segment-000002\.rlog"):
            list(reader.samples())


def test_a_writer_whose_segments_are_gone_is_found(log_copy):
    for number in (1, 0):
        segment_of(log_copy, number).unlink()
    (found,) = verify(log_copy).damage
    assert (found.what, found.detail) == (
        "segment",
        "it has no segment, and nothing says that any was pruned",
    )


def test_a_writer_has_its_first_segment_from_the_beginning(path, monkeypatch):
    create_log(path)
    seen = []
    rename = Path.rename

    def watched(folder, target):
        before = verify(path).damage
        done = rename(folder, target)
        seen.append((before, verify(path).damage))
        return done

    monkeypatch.setattr(Path, "rename", watched)
    release_folder("host-1-1", claim_folder(path, "host-1-1"))
    assert seen == [([], [])]
