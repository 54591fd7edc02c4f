"""Sealed segments: nothing is lost, whoever is killed, and everything reads as before."""

from __future__ import annotations

import contextlib
import logging
import os
import random
import shutil
import signal
import struct
import sys
import time
from pathlib import Path

import lmdb
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import arbitrary
import captures
from rollout_log.columns import pack_ints
from rollout_log.errors import LogDamaged, LogInUse, LogTooNew, RolloutLogError
from rollout_log.events import (
    Delta,
    Ended,
    Opened,
    Reads,
    Requested,
    Responded,
    decode_events,
    encode_events,
)
from rollout_log.log import Log, LogReader, Summary, group, sealing
from rollout_log.log import segment as segment_module
from rollout_log.log.chunk import MAGIC
from rollout_log.log.directory import hold_folder, sealed_path, segments_of, writers_of
from rollout_log.log.group import Run, encode_items, pack_group, split_events
from rollout_log.log.group_reader import GroupReader
from rollout_log.log.keeper import Plan
from rollout_log.log.keeping import keep
from rollout_log.log.sealed import HEAD, SealedSegment
from rollout_log.log.sealing import seal
from rollout_log.log.verify import verify

streams = st.lists(arbitrary.anything | st.builds(Delta, st.just(1), arbitrary.json_bytes), max_size=30)


def content_of(path):
    """Everything a reader gets out of a log."""
    with LogReader.open(path) as reader:
        entries = list(reader.samples())
        return [
            (entry.name, entry.summary, reader.find(entry.name).ordinal, list(reader.events(entry.ref)))
            for entry in entries
        ], [[entry.name for entry in reader.samples(step=step)] for step in range(4)]


def seal_all(path):
    for folder in writers_of(path):
        assert {done.what for done in keep(Plan(folder))} <= {"sealed"}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A closed log of two segments, not sealed, with samples that go on from one into the other."""
    path = tmp_path_factory.mktemp("sealing") / "log"
    log = Log.open(path, window_ms=3_600_000, seal=False)
    dice = random.Random(3)
    samples = []
    for number in range(40):
        opened = Opened(f"key-{number % 30}", step=number % 4, opened_unix_ns=number, metadata={"n": number})
        samples.append(log.create(opened))
        frames = [
            Delta(
                0,
                b'{"choices":[{"token_ids":[%d],"logprob":%.9f}]}' % (dice.randrange(9**5), -dice.random()),
                t,
            )
            for t in range(dice.randrange(30))
        ]
        log.append(samples[-1], 0, [opened, *frames, Delta(0, dice.randbytes(30), 7, b": hi\ndata: x\n\n")])
        log.append(samples[-1], len(frames) + 2, [Reads(0, [5, 6], [7, 8])])
    log.rotate()
    log.flush_sync()
    for sample in samples[::3]:
        log.append(
            sample,
            log.durable(sample),
            [Delta(0, b"later"), Ended(0, "eof")],
            Summary(f"key-{sample % 30}", tokens=5),
        )
    log.close()
    assert len(segments_of(path / log.writer)) == 2
    return path


@pytest.fixture
def log_copy(whole, path):
    shutil.copytree(whole, path)
    return path


def first_segment(path):
    (folder,) = [entry for entry in path.iterdir() if entry.is_dir()]
    return segments_of(folder)[0]


# What is packed comes back


@settings(max_examples=50)
@given(st.lists(streams, min_size=1, max_size=4))
def test_events_come_back_byte_for_byte(samples):
    runs = [
        Run(ordinal, 5 * ordinal, split_events(encode_events(events)))
        for ordinal, events in enumerate(samples)
    ]
    found = GroupReader(pack_group(runs)).runs
    assert [(run.ordinal, run.first, encode_items(run.events)) for run in found] == [
        (ordinal, 5 * ordinal, encode_events(events)) for ordinal, events in enumerate(samples)
    ]


def test_fields_of_a_later_version_come_back():
    later = [[4, 0, b"{}", 1, None, "a field of the future"], [7, 0, [1], [2], 3], [4, 0, b"{}"], [99, {}]]
    payload = msgspec.msgpack.encode(later)
    (run,) = GroupReader(pack_group([Run(1, 0, split_events(payload))])).runs
    assert encode_items(run.events) == payload


@pytest.mark.parametrize(
    "deltas",
    [
        [Delta(0, b'{"a":%d}' % n, n, b'data:{"a":%d}\r\n\r\n' % n) for n in range(50)],
        [Delta(0, b"a\nb", n, b"data: a\ndata: b\n\n") for n in range(50)],
        [Delta(0, b"{}", n, b": %d\ndata: {}\n\n" % n) for n in range(200)],
        [Delta(2**70 % 2**63, b"", -(2**63)), Delta(0, b"", 2**63 - 1, b"")],
    ],
    ids=["framed", "lines", "comments", "extremes"],
)
def test_frames_that_are_framed_otherwise_come_back(deltas):
    (run,) = GroupReader(pack_group([Run(1, 0, split_events(encode_events(deltas)))])).runs
    assert decode_events(encode_items(run.events)) == deltas


def test_wide_frames_are_kept_by_a_long_window(monkeypatch):
    monkeypatch.setattr(group, "pack", None)
    text = "".join(random.Random(1).choices("abcdefgh ", k=60_000))
    deltas = [Delta(0, b'{"text":"%s"}' % text[:length].encode(), 0) for length in range(20_000, 60_000, 500)]
    packed = pack_group([Run(1, 0, split_events(encode_events(deltas)))])
    assert len(packed) < 60_000
    assert decode_events(encode_items(GroupReader(packed).runs[0].events)) == deltas


def read_all(content):
    """Read a group in every way there is."""
    reader = GroupReader(content)
    for place in range(len(reader.places)):
        for part in reader.parts(place):
            if not isinstance(part, list):
                assert all(found.deltas() for found in part.parts())
    return reader.runs


def test_bytes_that_are_no_group_are_damage():
    events = [Delta(0, b"{}"), Delta(0, b"{}", 1, b"data:{}\n\n"), Reads(0, [1], [2]), Ended(0, "eof")]
    whole = pack_group([Run(1, 0, split_events(encode_events(events)))])
    parts = msgspec.msgpack.decode(whole)
    dice = random.Random(1)
    for _ in range(300):
        at = dice.randrange(len(whole))
        broken = whole[:at] + dice.randbytes(1) + whole[at + 1 :]
        with contextlib.suppress(RolloutLogError):
            read_all(broken)
        odd = [b"", -1, [], [[1, 0, 2**40]], [[1, 2, -3]], pack_ints([2**62, -5, 3]), dice.choice(parts)]
        mixed = parts.copy()
        mixed[dice.randrange(len(mixed))] = dice.choice(odd)
        with contextlib.suppress(RolloutLogError):
            read_all(msgspec.msgpack.encode(mixed))
    with pytest.raises(LogDamaged):
        GroupReader(b"")


def test_frames_that_weigh_otherwise_than_said_are_damage():
    events = [
        Delta(0, b"{}"),
        Reads(0, [1], [2]),
        Delta(0, b"[1]"),
        Delta(1, b"[22]"),
        Ended(0, "eof"),
        Delta(0, b""),
    ]
    parts = msgspec.msgpack.decode(pack_group([Run(1, 0, split_events(encode_events(events)))]))
    assert parts[-1] == pack_ints([5, 4, 0])
    for wrong in ([5, 5, 0], [5, 4], [5, 4, 0, 0]):
        with pytest.raises(LogDamaged, match="weigh"):
            _ = GroupReader(msgspec.msgpack.encode([*parts[:-1], pack_ints(wrong)])).runs
    older = GroupReader(msgspec.msgpack.encode(parts[:-1]))
    assert list(older.parts(0)) == [events]


# A sealed log is the same log


def test_a_sealed_log_reads_as_before(log_copy):
    before, damage = content_of(log_copy), verify(log_copy)
    assert damage.damage == []
    seal_all(log_copy)
    assert {path.suffix for path in log_copy.glob("*/segment-*")} == {".sealed"}
    assert content_of(log_copy) == before
    after = verify(log_copy)
    assert (after.damage, after.samples, after.events) == ([], damage.samples, damage.events)


@settings(max_examples=10)
@given(st.lists(st.tuples(arbitrary.opened, st.lists(arbitrary.later, max_size=12)), min_size=1, max_size=4))
def test_any_log_reads_as_before(tmp_path_factory, samples):
    path = tmp_path_factory.mktemp("any") / "log"
    with Log.open(path, seal=False) as log:
        for opened, events in samples:
            log.append(log.create(opened), 0, [opened, *events[:6]])
        log.rotate()
        log.flush_sync()
        for sample, (_, events) in enumerate(samples):
            log.append(sample, 1 + len(events[:6]), events[6:])
    before = content_of(path)
    seal_all(path)
    assert repr(content_of(path)) == repr(before), "NaN is not equal to itself"
    shutil.rmtree(path)


def test_groups_end_at_their_size_and_reading_begins_anywhere(log_copy, monkeypatch):
    monkeypatch.setattr(sealing, "GROUP", 500)
    before = content_of(log_copy)
    seal_all(log_copy)
    assert content_of(log_copy) == before
    sealed = SealedSegment.open(first_segment(log_copy))
    assert len(list(sealed.groups())) > 20
    blocks = list(sealed.blocks(7))
    for start in range(blocks[-1].first + blocks[-1].count):
        assert [b.first for b in sealed.blocks(7, start)] == [
            b.first for b in blocks if b.first + b.count > start
        ]
    sealed.close()


def test_a_long_real_stream_is_a_fortieth_of_its_bytes(path):
    body = captures.load("n1-long-4096").body
    frames = [part.removeprefix(b"data: ") for part in body.split(b"\n\n") if part]
    with Log.open(path, seal=False) as log:
        sample = log.create(Opened("n1"))
        reads = Reads(
            0, [len(frame) + 8 for frame in frames], [33_000 + n * 7919 % 997 for n in range(len(frames))]
        )
        events = [
            Opened("n1", prompt_token_ids=list(range(100, 140))),
            Requested(0, 0, "first", "vllm", "POST", "/inference/v1/generate", b'{"token_ids":[]}', 14),
            Responded(0, 200, [("content-type", "text/event-stream")], 900),
            *(Delta(0, frame, 33_000 * n + n * 7919 % 997) for n, frame in enumerate(frames)),
            reads,
            Ended(0, "eof", None, 10**9),
        ]
        log.append(sample, 0, events)
    before = content_of(path)
    seal_all(path)
    assert content_of(path) == before
    (file,) = path.glob("*/segment-*")
    assert file.stat().st_size * 40 < len(body)


# In the background


def rotated(log):
    """Rotate, and wait until what that sets off is done."""
    segments = log.counters.segments
    log.rotate()
    while log.counters.segments == segments:
        time.sleep(0.01)
    log._keeper.wait()


@pytest.fixture
def sealing_log(path):
    log = Log.open(path, window_ms=3_600_000)
    yield log
    log.close()


def test_a_rotated_segment_is_sealed_beside_a_reader(sealing_log, path, begin, deltas, monkeypatch):
    monkeypatch.setattr(segment_module, "_ROWS_AT_ONCE", 1)
    sample = begin(sealing_log, "key", step=1)
    for at in range(1, 500, 100):
        sealing_log.append(sample, at, deltas(at, at + 100))
        sealing_log.flush_sync()
    with LogReader.open(path) as reader:
        ref = reader.find("key")
        reading = reader.events(ref)
        assert next(reading)[0] == 0
        rotated(sealing_log)
        sealing_log.append(sample, 501, deltas(501, 505))
        sealing_log.flush_sync()
        assert [each.suffix for each in segments_of(path / sealing_log.writer)] == [".sealed", ".rlog"]
        assert reader.find("key") == ref
        assert [number for number, _ in reading] == list(range(1, 505)), "the iteration that was under way"
        assert [event for _, event in reader.events(ref, 1)] == deltas(1, 505)
        assert [entry.name for entry in reader.samples(step=1)] == ["key"]
    assert sealing_log.append(sample, 3, deltas(3, 505)), "a repeat is compared with the sealed events"
    assert verify(path).damage == []


def test_a_writer_goes_on_when_sealing_fails(sealing_log, path, begin, monkeypatch, caplog):
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    sample = begin(sealing_log, "key")
    for at in range(1, 4):
        sealing_log.append(sample, at, [Delta(0, b"{}")])
        rotated(sealing_log)
        assert sealing_log.flush_sync()
    warnings = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 1
    assert "recording goes on" in warnings[0].message
    assert {each.suffix for each in segments_of(path / sealing_log.writer)} == {".rlog"}


def test_a_damaged_segment_is_kept_as_it_is(log_copy):
    segment = first_segment(log_copy)
    data = bytearray(segment.read_bytes())
    for at in [at for at in range(len(data)) if data.startswith(b"RLB1", at)]:
        data[at + 60] ^= 1
    segment.write_bytes(data)
    with pytest.raises(LogDamaged):
        seal(segment)
    segment.write_bytes(data[: len(data) // 2])
    with pytest.raises(LogDamaged, match="recover"):
        seal(segment)
    assert segment.exists()
    assert [each.name for each in segment.parent.iterdir() if "sealed" in each.name] == []


def test_a_segment_with_events_that_no_sample_leads_to_is_not_sealed(log_copy):
    segment = first_segment(log_copy)
    with lmdb.open(str(segment), subdir=False, max_dbs=8) as environment:
        last = environment.open_db(b"last", create=False)
        with environment.begin(write=True) as transaction, transaction.cursor(last) as cursor:
            assert cursor.first()
            cursor.delete()
    with pytest.raises(LogDamaged, match=r"has \d+ events, and \d+ can be reached by sample"):
        seal(segment)
    assert segment.exists()
    assert not sealed_path(segment).exists()


def test_what_does_not_come_back_is_not_sealed(log_copy, monkeypatch):
    segment = first_segment(log_copy)
    monkeypatch.setattr(
        sealing, "pack_group", lambda runs: pack_group([Run(0, 0, run.events) for run in runs])
    )
    with pytest.raises(LogDamaged, match="does not give back"):
        seal(segment)
    assert segment.exists()
    assert not sealed_path(segment).exists()


# Killed at any moment


def _seal_until(segment: Path, steps: int) -> bool:
    """Seal in a child that dies by SIGKILL before its n-th step to the disk. Returns whether it finished."""
    child = os.fork()
    if child == 0:
        left = steps

        def dying(function):
            def step(*args, **keywords):
                nonlocal left
                left -= 1
                if left < 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                return function(*args, **keywords)

            return step

        try:
            os.fsync, os.utime = dying(os.fsync), dying(os.utime)
            sealing.pack_chunk = dying(sealing.pack_chunk)
            Path.unlink, Path.replace = dying(Path.unlink), dying(Path.replace)
            seal(segment)
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    return status == 0


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_kill_at_any_step_loses_nothing(log_copy):
    before = content_of(log_copy)
    steps = 0
    while True:
        path = log_copy.with_name(f"killed-{steps}")
        shutil.copytree(log_copy, path)
        finished = _seal_until(first_segment(path), steps)
        assert content_of(path) == before
        if steps % 4 == 0:
            assert verify(path).damage == []
        seal_all(path)
        assert content_of(path) == before
        left = sorted(each.name for each in path.glob("*/*") if each.is_file())
        assert left == ["lock", "sealing", "segment-000001.sealed", "segment-000002.sealed"], (
            "no draft stays behind"
        )
        shutil.rmtree(path)
        if finished:
            break
        steps += 1
    assert steps > 10


def test_two_do_not_seal_one_folder(log_copy):
    folder = first_segment(log_copy).parent
    with hold_folder(folder), pytest.raises(LogInUse, match="by another process"), hold_folder(folder):
        pass


# Damage


@pytest.fixture
def sealed_copy(log_copy):
    seal_all(log_copy)
    return log_copy


def test_every_flipped_byte_is_found(sealed_copy):
    segment = first_segment(sealed_copy)
    data = segment.read_bytes()
    dice = random.Random(5)
    for at in [0, 9, len(data) - 1, len(data) - 40, *dice.sample(range(len(data)), 3)]:
        segment.write_bytes(data[:at] + bytes([data[at] ^ 0x20]) + data[at + 1 :])
        report = verify(sealed_copy)
        assert report.damage, f"byte {at}"
        assert not any("Traceback" in found.detail or found.what == "reader" for found in report.damage)
    segment.write_bytes(data)
    assert verify(sealed_copy).damage == []


@pytest.mark.parametrize("keep", [0, 5, 100, -1, -60])
def test_a_sealed_file_that_was_cut_is_found(sealed_copy, keep):
    segment = first_segment(sealed_copy)
    segment.write_bytes(segment.read_bytes()[:keep])
    assert {found.path for found in verify(sealed_copy).damage if found.what == "header"} == {segment}
    with LogReader.open(sealed_copy) as reader, pytest.raises(LogDamaged, match=segment.name):
        list(reader.samples())


def test_damage_to_one_chunk_costs_its_samples_alone(whole, path, monkeypatch):
    monkeypatch.setattr(sealing, "GROUP", 2000)
    shutil.copytree(whole, path)
    before = content_of(path)[0]
    seal_all(path)
    segment = first_segment(path)
    data = bytearray(segment.read_bytes())
    chunks = [at for at in range(len(data)) if data.startswith(MAGIC, at)]
    data[chunks[3] + 100] ^= 1
    segment.write_bytes(data)
    sound = broken = 0
    with LogReader.open(path) as reader:
        refs = {entry.ref.ordinal: entry.ref for entry in reader.samples()}
        for _, _, ordinal, events in before:
            try:
                found = list(reader.events(refs[ordinal]))
            except LogDamaged:
                broken += 1
            else:
                assert found == events
                sound += 1
    assert 0 < broken < 10
    assert sound + broken == 40


def test_a_later_format_is_refused(sealed_copy):
    segment = first_segment(sealed_copy)
    data = segment.read_bytes()
    segment.write_bytes(HEAD[:8] + struct.pack(">H", 9) + data[10:])
    with pytest.raises(LogTooNew, match="upgrade"):
        SealedSegment.open(segment)
    segment.write_bytes(b"something else" * 100)
    with pytest.raises(LogDamaged, match="does not begin as a sealed segment does"):
        SealedSegment.open(segment)
