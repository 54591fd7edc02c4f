"""What goes when a log is too large, what is said of it, and what an archive keeps."""

from __future__ import annotations

import os
import shutil
import time

import pytest

from rollout_log.errors import LogDamaged, SampleNotFound
from rollout_log.events import Delta, Opened
from rollout_log.log import Log, LogReader, keeping, retention
from rollout_log.log.archive import archive_folder
from rollout_log.log.directory import claim_folder, release_folder, segments_of, writers_of
from rollout_log.log.keeper import Plan
from rollout_log.log.keeping import keep
from rollout_log.log.opening import open_segment
from rollout_log.log.retention import PRUNED, cap_of, prune, read_pruned, size_of
from rollout_log.log.verify import verify

DAY_NS = 86_400 * 10**9


@pytest.fixture
def old_log(path):
    """Five sealed segments of a writer that is gone, a step and a day each; `long` is in all of them."""
    log = Log.open(path, window_ms=3_600_000, seal=False)
    opened = Opened("long", step=0)
    long = log.create(opened)
    log.append(long, 0, [opened])
    for step in range(5):
        opened = Opened(f"key-{step}", step=step)
        log.append(log.create(opened), 0, [opened, Delta(0, os.urandom(20_000))])
        if step:
            log.append(long, step, [Delta(0, b"{}")])
        if step < 4:
            log.rotate()
        while log.counters.segments < min(step + 2, 5):
            time.sleep(0.01)
        log.flush_sync()
    log.close()
    (folder,) = writers_of(path)
    assert [done.what for done in keep(Plan(folder))] == ["sealed"] * 5
    for number, segment in enumerate(segments_of(folder)):
        modified = time.time_ns() - (5 - number) * DAY_NS
        os.utime(segment, ns=(modified, modified))
    return path


def numbers(path):
    (folder,) = writers_of(path)
    return [int(segment.stem[-6:]) for segment in segments_of(folder)]


def test_the_oldest_go_until_the_rest_is_small_enough(old_log):
    size = size_of(old_log)
    assert prune(old_log, keep_bytes=size) == []
    (gone,) = prune(old_log, keep_bytes=size - 1)
    assert (gone.segment, gone.samples, gone.first_step, gone.last_step) == (1, 2, 0, 0)
    assert numbers(old_log) == [2, 3, 4, 5]
    assert size_of(old_log) == size - gone.bytes
    assert len(prune(old_log, keep_bytes=0)) == 4


def test_only_what_goes_is_looked_into(old_log, monkeypatch):
    opened = []
    monkeypatch.setattr(retention, "open_segment", lambda path: opened.append(path) or open_segment(path))
    gone = prune(old_log, keep_bytes=size_of(old_log) - 1, before_unix_ns=1)
    assert [each.segment for each in gone] == [1]
    assert [path.stem for path in opened] == ["segment-000001"]


def test_what_went_is_told_and_no_damage(old_log):
    prune(old_log, before_step=2)
    (folder,) = writers_of(old_log)
    assert [each.segment for each in read_pruned(folder)] == [1, 2]
    report = verify(old_log)
    assert report.damage == []
    assert [(each.segment, each.reason) for each in report.pruned] == [
        (1, "it had no step from 2 on"),
        (2, "it had no step from 2 on"),
    ]
    with LogReader.open(old_log) as reader:
        assert [each.segment for each in reader.pruned()] == [1, 2]
        assert [number for number, _ in reader.events(reader.find("long"))] == [2, 3, 4]
        with pytest.raises(SampleNotFound, match="2 segments pruned"):
            reader.find("key-0")


def test_a_segment_that_is_gone_unsaid_is_damage(old_log):
    (folder,) = writers_of(old_log)
    segments_of(folder)[1].unlink()
    assert ("segment", "segment 2 is gone, and nothing says that it was pruned") in [
        (found.what, found.detail) for found in verify(old_log).damage
    ]
    (folder / PRUNED).write_text("{")
    assert "segment" in {found.what for found in verify(old_log).damage}


def test_by_age_and_without_doing_it(old_log):
    before = time.time_ns() - 3 * DAY_NS
    gone = prune(old_log, before_unix_ns=before, dry_run=True)
    assert [each.segment for each in gone] == [1, 2, 3]
    assert numbers(old_log) == [1, 2, 3, 4, 5]
    assert prune(old_log, before_unix_ns=before) != []
    assert numbers(old_log) == [4, 5]


def test_a_sample_of_a_later_step_keeps_its_segment(old_log):
    assert [each.segment for each in prune(old_log, before_step=4, dry_run=True)] == [1, 2, 3, 4]
    assert [each.segment for each in prune(old_log, before_step=1, dry_run=True)] == [1]


def test_what_is_being_written_stays(old_log):
    (folder,) = writers_of(old_log)
    descriptor = claim_folder(old_log, folder.name)
    assert prune(old_log, keep_bytes=0) == []
    assert [each.segment for each in prune(old_log, keep_bytes=0, mine=folder.name)] == [1, 2, 3, 4]
    release_folder(folder.name, descriptor)
    assert [each.segment for each in prune(old_log, keep_bytes=0)] == [5]


def test_a_folder_may_go_while_it_is_looked_at(old_log, monkeypatch):
    (folder,) = writers_of(old_log)
    monkeypatch.setattr(retention, "is_live", lambda _: shutil.rmtree(folder) is not None)
    assert prune(old_log, keep_bytes=0) == []


def test_a_writer_keeps_to_its_cap_and_removes_what_older_ones_left(old_log):
    log = Log.open(old_log, window_ms=3_600_000, max_bytes=70_000)
    log._keeper.wait()
    assert numbers_by_writer(old_log, but=log.writer) == [4, 5]
    opened = Opened("new")
    sample = log.create(opened)
    log.append(sample, 0, [opened, *(Delta(0, os.urandom(20_000)) for _ in range(5))])
    log.rotate()
    while log.counters.segments < 2:
        time.sleep(0.01)
    log._keeper.wait()
    assert numbers_by_writer(old_log, but=log.writer) == []
    assert len(segments_of(old_log / log.writer)) == 1, "its own sealed segment went, the active one stayed"
    log.append(sample, 6, [Delta(0, b"{}")])
    assert log.flush_sync()
    log.close()
    assert verify(old_log).damage == []


def numbers_by_writer(path, but):
    return [
        int(segment.stem[-6:])
        for folder in writers_of(path)
        if folder.name != but
        for segment in segments_of(folder)
    ]


def test_a_small_cap_makes_small_segments(path):
    with Log.open(path, max_bytes=40 << 20) as log:
        assert log._committer.segment_bytes == 10 << 20


def test_the_default_cap_is_a_share_of_the_free_disk(path, monkeypatch):
    usage = shutil.disk_usage(path.parent)
    monkeypatch.setattr(shutil, "disk_usage", lambda place: usage._replace(free=10 << 30))
    assert cap_of(path / "not" / "there") == 2 << 30
    monkeypatch.setattr(shutil, "disk_usage", lambda place: usage._replace(free=10 << 40))
    assert cap_of(path) == 100 * 10**9


# Archive


def test_an_archive_is_a_log(old_log, tmp_path):
    (folder,) = writers_of(old_log)
    copies = archive_folder(folder, tmp_path / "archive")
    assert [copy.name for copy in copies] == [segment.name for segment in segments_of(folder)]
    assert archive_folder(folder, tmp_path / "archive") == [], "nothing is copied twice"
    with LogReader.open(old_log) as here, LogReader.open(tmp_path / "archive") as there:
        for entry in here.samples():
            assert list(there.events(there.find(entry.name))) == list(here.events(entry.ref))
    prune(old_log, before_step=2)
    assert archive_folder(folder, tmp_path / "archive") == []
    assert verify(tmp_path / "archive").damage == []
    assert verify(tmp_path / "archive").events == 15


def test_what_was_pruned_before_it_was_copied_is_no_damage_of_the_archive(old_log, tmp_path):
    prune(old_log, before_step=2)
    (folder,) = writers_of(old_log)
    archive_folder(folder, tmp_path / "archive")
    assert verify(tmp_path / "archive").damage == []


def test_a_damaged_segment_is_not_copied(old_log, tmp_path):
    (folder,) = writers_of(old_log)
    segment = segments_of(folder)[2]
    data = bytearray(segment.read_bytes())
    data[300] ^= 1
    segment.write_bytes(data)
    with pytest.raises(LogDamaged, match="hash"):
        archive_folder(folder, tmp_path / "archive")
    (copied,) = writers_of(tmp_path / "archive" / "log")
    assert sorted(each.name for each in copied.iterdir()) == [
        "segment-000001.sealed",
        "segment-000002.sealed",
    ]


def test_a_segment_is_archived_before_it_is_pruned(path, tmp_path, monkeypatch):
    monkeypatch.setattr(keeping, "SLACK", 1e9)
    log = Log.open(path, seal=False)
    opened = Opened("key")
    log.append(log.create(opened), 0, [opened])
    log.close()
    plan = Plan(path / log.writer, archive=tmp_path / "archive", max_bytes=1)
    assert [done.what for done in keep(plan)] == ["sealed", "archived", "pruned"]
    with LogReader.open(tmp_path / "archive") as reader:
        assert [entry.name for entry in reader.samples()] == ["key"]


def test_what_is_far_above_the_cap_goes_at_once(path, tmp_path):
    log = Log.open(path, seal=False)
    opened = Opened("key")
    log.append(log.create(opened), 0, [opened])
    log.close()
    assert [done.what for done in keep(Plan(path / log.writer, max_bytes=1))] == ["pruned"]


def test_a_writer_archives_what_it_has_sealed(path, tmp_path):
    log = Log.open(path, window_ms=3_600_000, archive=tmp_path / "archive")
    opened = Opened("key")
    log.append(log.create(opened), 0, [opened])
    log.rotate()
    while log.counters.segments < 2:
        time.sleep(0.01)
    log._keeper.wait()
    log.close()
    assert [each.suffix for each in segments_of(path / log.writer)] == [".sealed", ".rlog"]
    with LogReader.open(tmp_path / "archive") as reader:
        assert [entry.name for entry in reader.samples()] == ["key"]
