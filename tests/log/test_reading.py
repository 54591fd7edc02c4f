"""Names, steps and lives: many writers read as one table."""

from __future__ import annotations

import pytest

from rollout_log.errors import LogDamaged, SampleNotFound
from rollout_log.events import Closed, Observed, Opened, Requested
from rollout_log.log import Log, LogReader, Summary
from rollout_log.log.directory import segments_of
from rollout_log.log.segment import Segment
from rollout_log.log.verify import verify


@pytest.fixture
def add(begin):
    """Adds a closed log's worth of samples: (key, opened, declared incarnation)."""

    def add(path, *samples, run="r"):
        log = Log.open(path, run=run)
        for key, opened, incarnation in samples:
            begin(log, key, run=run, opened_unix_ns=opened, incarnation=incarnation)
        log.close()
        return log.writer

    return add


def names(reader, **narrowed):
    return [entry.name for entry in reader.samples(**narrowed)]


def test_samples_of_all_writers_come_in_the_order_they_opened(path, add):
    add(path, ("c", 30, 0), ("a", 10, 0))
    add(path, ("b", 20, 0), ("d", 40, 0))
    with LogReader.open(path) as reader:
        assert names(reader) == ["a", "b", "c", "d"]
        assert names(reader, key_prefix="c") == ["c"]
        assert names(reader, status="completed") == []


def test_lives_of_a_key_are_numbered_over_all_writers(path, add):
    add(path, ("k", 10, 0), ("k", 30, 0))
    add(path, ("k", 20, 0), ("k", 50, 7), ("k", 60, 3))
    with LogReader.open(path) as reader:
        assert names(reader) == ["k@0", "k@1", "k@2", "k@7", "k"]
        refs = [reader.find(name) for name in ("k@0", "k@1", "k@2", "k@7", "k@8", "k")]
        assert [ref.incarnation for ref in refs] == [0, 1, 2, 7, 8, 8]
        assert [next(reader.events(ref))[1].opened_unix_ns for ref in refs] == [10, 20, 30, 50, 60, 60]
        with pytest.raises(SampleNotFound):
            reader.find("k@4")


def test_each_run_numbers_its_own_lives(path, add):
    add(path, ("k", 10, 0), run="one")
    add(path, ("k", 20, 0), run="two")
    with LogReader.open(path) as reader:
        assert [(entry.ref.run, entry.ref.incarnation) for entry in reader.samples()] == [
            ("one", 0),
            ("two", 0),
        ]
        assert reader.find("k").run == "two"


def test_a_name_is_a_key_before_it_is_a_view_or_a_life(path, add):
    add(path, ("k", 1, 0), ("k#1", 2, 0), ("k@0", 3, 0), ("k~2", 4, 0))
    with LogReader.open(path) as reader:
        found = {
            name: reader.find(name) for name in ("k", "k#0", "k#1", "k@0", "k@0#3", "k#1#2", "k~2", "k~2#1")
        }
    assert {name: (ref.key, ref.choice) for name, ref in found.items()} == {
        "k": ("k", None),
        "k#0": ("k", 0),
        "k#1": ("k#1", None),
        "k@0": ("k@0", None),
        "k@0#3": ("k@0", 3),
        "k#1#2": ("k#1", 2),
        "k~2": ("k~2", None),
        "k~2#1": ("k~2", 1),
    }


def test_a_name_that_leads_nowhere_names_the_nearest(path, add):
    add(path, ("step-3/prompt-17/0", 1, 0), ("step-3/prompt-18/0", 2, 0), ("other", 3, 0))
    with LogReader.open(path) as reader:
        with pytest.raises(SampleNotFound, match=r"nearest: 'step-3/prompt-17/0', 'step-3/prompt-18/0'$"):
            reader.find("step-3/prompt-17/1")
        with pytest.raises(SampleNotFound, match="; it has 3 keys"):
            reader.find("zzz")


def test_a_long_key_and_an_odd_key_are_found(path, add):
    keys = ["x" * 5000, "é\u2028\x1b[31m", "a\0b", ""]
    add(path, *((key, number, 0) for number, key in enumerate(keys)))
    with LogReader.open(path) as reader:
        assert [reader.find(key).key for key in keys] == keys


def test_a_step_lists_whoever_took_part_and_touches_no_block(log, path, monkeypatch):
    def sample(key, step, *events):
        opened = Opened(key, step=step, opened_unix_ns=len(key))
        number = log.create(opened)
        log.append(number, 0, [opened, *events])

    sample("a", 3)
    sample("bb", -1, Requested(0, 0, "first", "vllm", "POST", "/x", b"{}", step=3))
    sample("ccc", 2, Closed("done", step=2**40))
    sample("dddd", None)
    log.flush_sync()
    log.rotate()
    log.append(0, 1, [Closed()], Summary(key="a", step=4, status="completed", opened_unix_ns=1))
    log.flush_sync()
    monkeypatch.setattr(Segment, "blocks", None)
    with LogReader.open(path) as reader:
        steps = {step: names(reader, step=step) for step in (-1, 2, 3, 4, 5, 2**40)}
        assert steps == {-1: ["bb"], 2: ["ccc"], 3: ["a", "bb"], 4: ["a"], 5: [], 2**40: ["ccc"]}
        assert [entry.summary.status for entry in reader.samples(step=3)] == ["completed", "pending"]


def test_a_directory_of_logs_reads_as_one(tmp_path, add):
    add(tmp_path / "monday", ("a", 1, 0), ("k", 2, 0), run="monday")
    add(tmp_path / "tuesday", ("b", 3, 0), run="tuesday")
    (tmp_path / "notes").mkdir()
    with LogReader.open(tmp_path) as reader:
        assert [(entry.name, entry.summary.run) for entry in reader.samples()] == [
            ("a", "monday"),
            ("k", "monday"),
            ("b", "tuesday"),
        ]
        assert reader.find("b").folder.parent.name == "tuesday"


def test_a_rollout_that_continues_starts_from_the_older_life(path):
    older = Opened("k", opened_unix_ns=1, prompt_token_ids=[7, 8])
    newer = Opened("k", opened_unix_ns=2, prompt_token_ids=[7, 8], incarnation=1, continues=(0, 2))
    for events in ([older, Observed(0, [1, 2, 3])], [newer, Observed(2, [9])]):
        log = Log.open(path)
        assert log.append(log.create(events[0]), 0, events)
        log.close()
    with LogReader.open(path) as reader:
        assert [choice.token_ids for choice in reader.rollout("k@0").choices.values()] == [[1, 2, 3]]
        rollout = reader.rollout(reader.find("k"))
    assert rollout.prompt_token_ids == [7, 8]
    assert [choice.token_ids for choice in rollout.choices.values()] == [[1, 2, 9]]


def test_a_reader_sees_what_is_committed_beside_it(log, path, begin, deltas):
    sample = begin(log, "key")
    with LogReader.open(path) as reader:
        assert names(reader) == []
        log.flush_sync()
        assert names(reader) == ["key"]
        ref = reader.find("key")
        for at in range(1, 40):
            log.append(sample, at, deltas(at, at + 1))
            if at % 10 == 0:
                log.rotate()
            log.flush_sync()
            assert sum(1 for _ in reader.events(ref)) == at + 1
        assert len(segments_of(path / log.writer)) >= 4


def test_a_listing_may_be_left_standing_while_the_log_goes_on(log, path, begin, deltas):
    sample = begin(log, "key")
    log.append(sample, 1, deltas(1, 3))
    log.flush_sync()
    with LogReader.open(path) as reader:
        events = reader.events(reader.find("key"))
        assert next(events)[0] == 0
        log.append(sample, 3, deltas(3, 5))
        log.flush_sync()
        assert [number for number, _ in events][:2] == [1, 2]


@pytest.mark.parametrize("suffix", [".rlog", ".sealed"])
def test_a_link_to_nothing_is_damage(path, add, suffix):
    folder = path / add(path, ("a", 10, 0))
    link = folder / f"segment-000002{suffix}"
    link.symlink_to(path / "elsewhere")
    with LogReader.open(path) as reader, pytest.raises(LogDamaged, match=f"{link} is a link to nothing"):
        reader.find("a")
    assert [(found.path, found.detail) for found in verify(path).damage] == [
        (link, "it is a link to nothing")
    ]
