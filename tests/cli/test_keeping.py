"""`seal`, `archive`, `prune` and `recover`: what they do, what they say, and how they exit."""

from __future__ import annotations

import struct

import msgspec
import pytest

from recorded import Writer, frame
from rollout_log.log import LogReader
from rollout_log.log.batch import MAGIC
from rollout_log.log.chunk import MAGIC as CHUNK
from rollout_log.log.directory import claim_folder, release_folder, writers_of
from rollout_log.log.keeper import Done
from rollout_log.log.retention import Pruned
from rollout_log.log.sealed import HEAD
from rollout_log.recovery import Recovery


@pytest.fixture
def log(tmp_path):
    """A log of two writers, a step each, nothing sealed; the older one has a sample that was resumed."""
    for step in (1, 2):
        with Writer(tmp_path / "log", run="r", seal=False) as writer:
            for number in range(3):
                frames = [frame(10 * step + number + i, version="7") for i in range(20)]
                writer.request(f"s{step}-{number}", [*frames, frame(9, finish="stop")], step=step)
            if step == 1:
                writer.request("back", [frame(1, 2), frame(finish="abort")], step=1)
                writer.request("back", [frame(3, finish="stop")], step=1)
    return tmp_path / "log"


def content_of(path):
    with LogReader.open(path) as reader:
        return {entry.name: [event for _, event in reader.events(entry.ref)] for entry in reader.samples()}


def test_seal(log, call):
    before = content_of(log)
    promised = call("stats", log, "--json").json
    assert promised["sealed_bytes"] < promised["block_bytes"]
    result = call("seal", log, "--json")
    done = [msgspec.convert(line, Done) for line in result.json_lines]
    assert (result.code, [each.what for each in done]) == (0, ["sealed", "sealed"])
    assert all(0 < each.bytes < each.before for each in done)
    assert content_of(log) == before
    assert call("verify", log).code == 0
    assert call("seal", log).out == "nothing to seal\n"
    stats = call("stats", log, "--json").json
    assert stats["sealed_bytes"] == stats["block_bytes"] <= sum(each.bytes for each in done)
    assert stats["loss_window"]["count"] == 0, "a sealed segment does not tell what was committed together"


def test_seal_leaves_live_writers_alone(log, call):
    folder = writers_of(log)[0]
    descriptor = claim_folder(log, folder.name)
    result = call("seal", log)
    release_folder(folder.name, descriptor)
    assert "its writer seals it" in result.err
    assert [path.suffix for path in sorted(folder.glob("segment-*1.*"))] == [".rlog", ".rlog-lock"]


def test_seal_says_what_it_could_not(log, call):
    segment = next(writers_of(log)[0].glob("*.rlog"))
    segment.write_bytes(segment.read_bytes()[:10_000])
    result = call("seal", log)
    assert result.code == 1
    assert f"cannot be sealed: {segment} is damaged" in result.out
    assert result.out.count("\nsealed") == 1
    assert segment.exists()


def test_archive(log, tmp_path, call):
    assert "2 segments not sealed yet" in call("archive", log, tmp_path / "archive").err
    before = content_of(log)
    call("seal", log)
    result = call("archive", log, tmp_path / "archive", "--json")
    assert [msgspec.convert(line, Done).what for line in result.json_lines] == ["archived", "archived"]
    assert content_of(tmp_path / "archive") == before
    assert call("archive", log, tmp_path / "archive").out == "nothing to copy\n"


def test_archive_says_what_it_could_not(log, tmp_path, call):
    call("seal", log)
    (tmp_path / "file").write_text("in the way")
    result = call("archive", log, tmp_path / "file")
    assert result.code == 1
    assert result.out.count("failed") == 2


def test_prune(log, call):
    call("seal", log)
    assert call("prune", log).code == 2
    assert call("prune", log, "--keep-bytes", "many").code == 2
    dry = call("prune", log, "--step", 2, "--dry-run")
    assert dry.lines[-1].startswith("1 segment would be deleted, ")
    assert len(content_of(log)) == 7
    (gone,) = [msgspec.convert(line, Pruned) for line in call("prune", log, "--step", 2, "--json").json_lines]
    assert (gone.samples, gone.first_step, gone.last_step) == (4, 1, 1)
    assert set(content_of(log)) == {"s2-0", "s2-1", "s2-2"}
    assert call("verify", log).lines[1] == f"pruned: 1 segment, {gone.bytes:,} bytes; their events are gone"
    assert call("verify", log).code == 0
    assert call("prune", log, "--older-than", "1d").out.startswith("0 segments deleted")
    assert call("prune", log, "--keep-bytes", "1kB").lines[-1].startswith("1 segment deleted")
    assert content_of(log) == {}


def test_prune_says_what_it_leaves(log, call):
    folder, other = writers_of(log)
    descriptor = claim_folder(log, folder.name)
    result = call("prune", log, "--keep-bytes", "1kB", "--dry-run")
    release_folder(folder.name, descriptor)
    assert result.lines[-1].startswith("1 segment would be deleted, ")
    assert result.err == f"{folder} is being written: only its writer deletes from it\n"
    with Writer(log, run="r", seal=False) as writer:
        for step in (3, 5):
            writer.request(f"late-{step}", [frame(1, finish="stop")], step=step)
    (third,) = {each.name for each in writers_of(log)} - {folder.name, other.name}
    said = f"segment 1 of {third} has steps 3 to 5, so it stays: segments go as a whole\n"
    assert [call("prune", log, "--step", step, "--dry-run").err for step in (3, 5, 6)] == ["", said, ""]


@pytest.mark.parametrize(
    "args",
    [
        ["recover", "LOG", "NEW"],
        ["archive", "LOG", "LOG"],
        ["import", "LOG", "NEW"],
        ["record", "NEW", "--upstream", "http://127.0.0.1:1", "--listen", "127.0.0.1:0"],
        ["export", "LOG", "--to", "jsonl", "-o", "NEW"],
        ["report", "LOG", "-o", "NEW"],
    ],
)
def test_nothing_is_written_into_a_log(args, log, call):
    call("seal", log)
    before = sorted(log.rglob("*"))
    for new in (log / "new", log / writers_of(log)[0].name / "new"):
        done = call(*({"LOG": log, "NEW": new}.get(arg, arg) for arg in args))
        assert (done.code, done.out) == (2, "")
        assert (
            f"would be in the log {log}, which has its writers' files alone: give another place" in done.err
        )
    assert sorted(log.rglob("*")) == before


def test_recover_of_a_whole_log_is_a_copy(log, tmp_path, call):
    result = call("recover", log, tmp_path / "new", "--json")
    found = msgspec.convert(result.json, Recovery)
    assert (result.code, found.samples, found.lost_events, found.damaged_samples) == (0, 7, 0, 0)
    assert content_of(tmp_path / "new") == content_of(log)
    with LogReader.open(log) as old, LogReader.open(tmp_path / "new") as new:
        for entry in old.samples():
            there = new.summary(new.find(entry.name))
            assert there.updated_unix_ns <= entry.summary.updated_unix_ns, "when it changed"
            assert msgspec.structs.replace(there, updated_unix_ns=0) == msgspec.structs.replace(
                entry.summary, updated_unix_ns=0
            )
    assert call("recover", log, tmp_path / "new").code == 2


@pytest.fixture
def two(tmp_path):
    """Two samples in turn, in batches of 3, 5, 5 and 5 events: what opens them, then frames of two tokens."""
    with Writer(tmp_path / "log", window_ms=3_600_000, seal=False) as writer:
        exchanges = []
        for key in ("first", "middle"):
            exchanges.append(writer.request(key, step=1, how=None))
            writer.log.flush_sync()
        for start in (10, 20, 30):
            for exchange in exchanges:
                exchange.feed(b"".join(frame(start + i, start + i + 1) for i in range(0, 10, 2)))
                writer.log.flush_sync()
    return tmp_path / "log"


def test_recover_counts_what_is_lost_and_marks_it(two, tmp_path, call):
    (segment,) = two.glob("*/*.rlog")
    data = bytearray(segment.read_bytes())
    for number in (1, 6):  # the beginning of one, the middle of the other
        for at in range(len(data)):
            if data.startswith(MAGIC, at) and data[at + 16 : at + 24] == struct.pack(">Q", number):
                data[at + 80] ^= 1
    segment.write_bytes(data)
    result = call("recover", two, tmp_path / "new", "--json")
    found = msgspec.convert(result.json, Recovery)
    assert result.code == 1
    assert (found.samples, found.damaged_samples, found.nameless_samples) == (2, 2, 1)
    assert (found.lost_events, found.lost_samples, found.events) == (3 + 5, 0, 15 + 13)
    assert found.broken >= 2
    assert call("verify", tmp_path / "new").code == 1, "the bytes are sound, and the samples have errors"
    with LogReader.open(tmp_path / "new") as reader:
        middle = reader.rollout("middle")
        assert middle.choice().token_ids == [*range(10, 20), *range(30, 40)]
        assert [problem.position for problem in middle.problems if problem.code == "log_gap"] == [10]
        assert [mark.fields for mark in middle.marks] == [{"first": 8, "count": 5}]
        (nameless,) = [entry.name for entry in reader.samples() if entry.name != "middle"]
        assert nameless == f"{segment.parent.name}/0"


def test_recover_of_a_sealed_log(two, tmp_path, call):
    call("seal", two)
    (segment,) = two.glob("*/*.sealed")
    data = bytearray(segment.read_bytes())
    data[120] ^= 1  # the one chunk of events
    segment.write_bytes(data)
    result = call("recover", two, tmp_path / "new", "--json")
    found = msgspec.convert(result.json, Recovery)
    assert (result.code, found.samples, found.lost_samples, found.broken) == (1, 0, 2, 1)


def test_recover_tells_what_it_cannot_know_of_a_sealed_file_that_was_cut(two, tmp_path, call):
    call("seal", two)
    (segment,) = two.glob("*/*.sealed")
    data = segment.read_bytes()
    found = msgspec.convert(call("recover", two, tmp_path / "whole", "--json").json, Recovery)
    assert (found.damaged_bytes, found.cut_files) == (0, 0)
    segment.write_bytes(data[: len(data) // 2])  # within the one chunk of events
    result = call("recover", two, tmp_path / "new")
    assert result.code == 1
    lost = len(data) // 2 - len(HEAD)
    unread = f"how much was in {lost} bytes that could not be read"
    assert [line.split("  ")[-1].strip() for line in result.lines[-2:]] == [
        "0 events and 0 samples, as far as is known",
        f"{unread}, and how much 1 sealed file had behind a cut",
    ]
    segment.write_bytes(data[:-1])
    found = msgspec.convert(call("recover", two, tmp_path / "nearly", "--json").json, Recovery)
    assert (found.samples, found.cut_files) == (2, 1)


def test_recover_counts_the_bytes_of_sealed_files_that_are_in_no_chunk(two, tmp_path, call):
    call("seal", two)
    (segment,) = two.glob("*/*.sealed")
    data = segment.read_bytes()
    segment.write_bytes(bytes(120) + data[120:])
    result = call("recover", two, tmp_path / "new", "--json")
    found = msgspec.convert(result.json, Recovery)
    events = data.index(CHUNK, data.index(CHUNK) + 1) - len(HEAD)
    assert (result.code, found.broken, found.damaged_bytes, found.lost_samples) == (1, 0, events, 2)


def test_recover_says_it_in_a_table(log, tmp_path, call):
    segment = next(writers_of(log)[0].glob("*.rlog"))
    segment.write_bytes(segment.read_bytes()[: segment.stat().st_size // 2])
    result = call("recover", log, tmp_path / "new")
    assert result.err == ""
    assert [line.split("  ")[0] for line in result.lines] == [
        "read",
        "unreadable",
        "broken",
        "recovered",
        "of them damaged",
        "lost",
    ]
