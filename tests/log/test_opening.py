"""What may be a log, and what is refused with a reason."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from unittest.mock import Mock

import lmdb
import pytest

from rollout_log.errors import LogDamaged, LogNotFound, LogTooNew, NotALog, RecordingFailed, UnsafeFileSystem
from rollout_log.events import Opened
from rollout_log.log import Log, LogReader, filesystem
from rollout_log.log.directory import MARKER, claim_folder, create_log, segments_of, writers_of
from rollout_log.log.filesystem import file_system, is_network, refuse_network
from rollout_log.log.segment import Segment


def test_a_path_is_one_log_within_a_process(path, begin):
    first = Log.open(path, run="a")
    second = Log.open(path / ".." / path.name, run="b")
    assert first is second
    assert first.run == "a"
    second.close()
    assert begin(first, "key") == 0
    assert first.flush_sync()
    first.close()
    third = Log.open(path)
    assert third is not first
    assert len(writers_of(path)) == 2
    third.close()


def test_a_writer_that_records_nothing_leaves_no_folder(path, begin):
    with Log.open(path) as log, LogReader.open(path) as reader:
        assert [folder.name for folder in writers_of(path)] == [log.writer]
        assert list(reader.samples()) == [], "it is read while it is there …"
        log.create(Opened("created alone"))
        log.close()
        assert writers_of(path) == []
        assert list(reader.samples()) == [], "… and when it is gone"
    with Log.open(path) as log:
        begin(log, "key")
    assert [folder.name for folder in writers_of(path)] == [log.writer]


def test_a_writer_that_cannot_begin_leaves_no_folder(path, monkeypatch):
    Log.open(path).close()
    monkeypatch.setattr(Segment, "create", Mock(side_effect=OSError("the disk is full")))
    with pytest.raises(RecordingFailed, match="the disk is full"):
        Log.open(path)
    assert writers_of(path) == []


def test_what_somebody_else_put_into_a_folder_stays(path):
    with Log.open(path) as log:
        (path / log.writer / "notes.txt").write_text("mine")
    assert (path / log.writer / "notes.txt").read_text() == "mine"


def test_everything_is_for_the_owner_only(log, path, begin):
    begin(log, "key")
    log.flush_sync()
    for place, _, files in os.walk(path):
        assert stat.S_IMODE(Path(place).stat().st_mode) == 0o700
        for file in files:
            assert stat.S_IMODE((Path(place) / file).stat().st_mode) == 0o600


def test_the_marker_and_the_segments_say_the_format(log, path):
    assert json.loads((path / MARKER).read_text())["format"] == [1, 0]
    (segment,) = segments_of(path / log.writer)
    assert segment.name == "segment-000001.rlog"
    assert log.writer.split("-")[-2] == str(os.getpid())


def test_a_missing_log_is_not_made_by_reading(path):
    with pytest.raises(LogNotFound, match="no log at"):
        LogReader.open(path)
    assert not path.exists()


def test_what_is_no_log_is_refused(path):
    path.write_text("hello")
    with pytest.raises(NotALog, match="is a file"):
        LogReader.open(path)
    with pytest.raises(NotALog, match="is a file"):
        Log.open(path)
    path.unlink()
    path.mkdir()
    with pytest.raises(NotALog, match=MARKER):
        LogReader.open(path)
    (path / "thesis.txt").write_text("mine")
    with pytest.raises(NotALog, match=r"not empty .*thesis\.txt"):
        Log.open(path)


def test_an_empty_directory_becomes_a_log(path):
    path.mkdir()
    Log.open(path).close()
    with LogReader.open(path) as reader:
        assert list(reader.samples()) == []


def test_two_writers_that_make_a_log_at_once(path, monkeypatch):
    """The other one is quicker, between a look for the marker and the next for anything foreign."""
    iterdir, quicker = Path.iterdir, []

    def look(self):
        if self == path and not quicker:
            quicker.append(True)
            create_log(path)
            claim_folder(path, "other-1-1")
        return iterdir(self)

    monkeypatch.setattr(Path, "iterdir", look)
    create_log(path)
    assert quicker


def test_a_symbolic_link_is_not_written_through(path, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(NotALog, match="symbolic link"):
        Log.open(path)
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_a_later_format_is_refused_in_the_marker_and_in_a_segment(path, begin):
    log = Log.open(path)
    begin(log, "key")
    log.close()
    (segment,) = segments_of(path / log.writer)
    with lmdb.open(str(segment), subdir=False, max_dbs=8) as environment:
        meta = environment.open_db(b"meta")
        with environment.begin(write=True) as transaction:
            header = json.loads(transaction.get(b"header", db=meta))
            assert header["format"] == [1, 0]
            transaction.put(b"header", json.dumps({**header, "format": [2, 0]}).encode(), db=meta)
    with LogReader.open(path) as reader, pytest.raises(LogTooNew, match=r"has format 2\.0"):
        list(reader.samples())
    (path / MARKER).write_text('{"format": [2, 3]}')
    for opening in (LogReader.open, Log.open):
        with pytest.raises(LogTooNew, match=r"has format 2\.3 .* upgrade"):
            opening(path)


def test_a_later_minor_format_is_read(path):
    Log.open(path).close()
    (path / MARKER).write_text('{"format": [1, 9], "more": true}')
    LogReader.open(path).close()


@pytest.mark.parametrize("text", ["", "{", "[]", '{"format": "one"}', '{"format": []}', "\x00" * 99])
def test_a_damaged_marker_is_damage(path, text):
    Log.open(path).close()
    (path / MARKER).write_text(text)
    with pytest.raises(LogDamaged, match=MARKER):
        LogReader.open(path)


def test_another_lmdb_file_is_no_segment(path, begin):
    log = Log.open(path)
    begin(log, "key")
    log.close()
    folder = path / log.writer
    with lmdb.open(str(folder / "segment-000000.rlog"), subdir=False, max_dbs=8) as environment:
        environment.open_db(b"theirs")
    with (
        LogReader.open(path) as reader,
        pytest.raises(LogDamaged, match=r"segment-000000\.rlog is an LMDB file without the tables"),
    ):
        list(reader.samples())


def test_where_nothing_can_be_written_opening_says_so(tmp_path):
    with pytest.raises(RecordingFailed, match="cannot record into /proc/nothing"):
        Log.open("/proc/nothing")
    (tmp_path / "file").write_text("")
    with pytest.raises(RecordingFailed, match="cannot record into"):
        Log.open(tmp_path / "file" / "log")


MOUNTS = """\
22 1 254:0 / / rw,relatime shared:1 - ext4 /dev/root rw
23 22 0:20 / /proc rw - proc proc rw
41 22 0:40 / /data rw - nfs4 server:/data rw
42 41 0:41 / /data/local\\040disk rw - xfs /dev/sdb rw
43 22 0:42 / /mnt/s rw - fuse.sshfs host: rw
44 22 0:43 / /mnt/f rw - fuse.fuse-overlayfs overlay rw
45 22 0:44 / /over rw - tmpfs none rw
46 22 0:45 / /over rw - lustre mds:/x rw
broken line
"""


@pytest.mark.parametrize(
    ("place", "kind", "network"),
    [
        ("/home/x", "ext4", False),
        ("/data", "nfs4", True),
        ("/data/run/log", "nfs4", True),
        ("/database", "ext4", False),
        ("/data/local disk/log", "xfs", False),
        ("/mnt/s/log", "fuse.sshfs", True),
        ("/mnt/f/log", "fuse.fuse-overlayfs", False),
        ("/over/log", "lustre", True),
    ],
)
def test_the_mount_that_holds_a_path_decides(tmp_path, place, kind, network):
    mounts = tmp_path / "mountinfo"
    mounts.write_text(MOUNTS)
    assert file_system(place, mounts) == kind
    assert is_network(kind) is network
    if network:
        with pytest.raises(UnsafeFileSystem, match=rf"{place} is on {kind}, .* local disk"):
            refuse_network(place, mounts)
    else:
        refuse_network(place, mounts)


def test_a_machine_that_does_not_tell_its_mounts_is_trusted(tmp_path):
    assert file_system("/", tmp_path / "nothing") is None


def test_a_log_is_not_recorded_to_a_network_file_system(path, tmp_path, monkeypatch):
    mounts = tmp_path / "mountinfo"
    mounts.write_text(f"1 0 0:1 / {tmp_path} rw - cifs //server/share rw\n")
    monkeypatch.setattr(filesystem, "MOUNTINFO", mounts)
    with pytest.raises(UnsafeFileSystem, match="cifs"):
        Log.open(path)
    assert not path.exists()
