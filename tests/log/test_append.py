"""What goes in comes out, once, and in order."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout_log.errors import RecordingFailed, SequenceConflict
from rollout_log.events import Body, Closed, Delta, Ended, Marked, Opened, Reads, Requested, Tail, Unknown
from rollout_log.log import Log, LogReader, Summary

OPENED = Opened(
    "key", run="r", prompt_token_ids=[1, 2, 3], opened_unix_ns=7, step=4, metadata={"a": [1, None]}
)


def test_every_kind_of_event_comes_back_as_it_was(log, read):
    events = [
        OPENED,
        Requested(0, 0, "first", "vllm", "POST", "/x", b"{}", headers=[("a", "b")]),
        Delta(0, b"x" * 5000, 12, raw=b"\xff\x00"),
        Body(0, b"\xff"),
        Reads(0, [1, 2], [3, 4]),
        Tail(0, b"data: {"),
        Ended(0, "reset", "peer", 99),
        Marked("note", {"why": "é\u2028"}),
        Closed("done", {"r": 1.5}, 4, {"x": 1}),
        Unknown(99, [1, b"2", "3"]),
    ]
    sample = log.create(OPENED)
    assert log.append(sample, 0, events)
    assert log.durable(sample) == 0
    assert log.flush_sync(sample)
    assert log.durable(sample) == len(events)
    assert read("key") == events
    assert (log.counters.events, log.counters.commits) == (len(events), 1)


def test_a_repeat_is_kept_once_wherever_its_events_are(log, read, begin, deltas):
    sample = begin(log, "key")
    log.append(sample, 1, deltas(1, 4))
    assert log.append(sample, 1, deltas(1, 4))  # still in the queue
    log.flush_sync(sample)
    assert log.append(sample, 2, deltas(2, 4))  # on disk
    log.append(sample, 4, deltas(4, 6))
    assert log.append(sample, 3, deltas(3, 7))  # on disk, in the queue, and new
    log.flush_sync(sample)
    assert read("key")[1:] == deltas(1, 7)
    assert log.durable(sample) == 7


def test_a_gap_and_another_body_are_refused(log, read, begin, deltas):
    sample = begin(log, "key")
    log.append(sample, 1, deltas(1, 3))
    with pytest.raises(SequenceConflict, match=r"sample 0 .* begin at 4, but 3 is next"):
        log.append(sample, 4, deltas(4, 5))
    with pytest.raises(SequenceConflict, match="events 2 to 2 of sample 0"):
        log.append(sample, 2, [Delta(0, b"other")])
    log.flush_sync(sample)
    with pytest.raises(SequenceConflict, match="not the same"):
        log.append(sample, 1, [Delta(0, b"other")])
    with pytest.raises(SequenceConflict, match="never created"):
        log.append(17, 0, [OPENED])
    assert read("key")[1:] == deltas(1, 3)


def test_an_event_that_cannot_be_encoded_costs_nothing_else(log, read):
    sample = log.create(OPENED)
    odd = Opened("key", metadata={"tensor": object()})
    log.append(
        sample,
        0,
        [odd, Closed("done", reward=object(), step=3), Marked("m", {"x": {1, object()}}), Delta(0, b"d")],
    )
    assert log.flush_sync(sample)
    opened, closed, marked, delta = read("key")
    assert opened.key == "key"
    assert "TypeError" in opened.metadata["unencodable"]
    assert (closed.status, closed.step, closed.reward) == ("done", 3, None)
    assert marked.name == "unencodable"
    assert marked.fields["kind"] == "Marked"
    assert delta == Delta(0, b"d")


def test_the_summary_is_the_one_given_last_and_else_made_of_opened(log, path):
    sample = log.create(OPENED)
    log.append(sample, 0, [OPENED])
    log.flush_sync(sample)
    with LogReader.open(path) as reader:
        assert [entry.summary for entry in reader.samples()] == [
            Summary(
                key="key", run="r", step=4, events=1, opened_unix_ns=7, updated_unix_ns=7, prompt_tokens=3
            )
        ]
        told = Summary(
            key="key", run="r", status="completed", tokens=5, problems={"log_gap": 2}, versions=["a"]
        )
        log.append(sample, 1, [Delta(0, b"d")], told)
        log.append(sample, 2, [Delta(0, b"e")])
        log.flush_sync(sample)
        assert [entry.summary for entry in reader.samples()] == [told]


def test_a_full_queue_refuses_and_recovers_when_half_is_written(path, read, begin, caplog):
    log = Log.open(path, window_ms=3_600_000, queue_bytes=10_000)
    sample = begin(log, "key")
    request = Requested(0, 0, "first", "vllm", "POST", "/x", b"{}")
    big = Delta(0, b"x" * 6000)
    assert log.append(sample, 1, [big])
    assert log.accepting
    assert not log.append(sample, 2, [big])
    assert not log.accepting
    assert not log.append(sample, 2, [request]), (
        "a request would fit, but is not begun while the queue drains"
    )
    assert log.append(sample, 2, [Delta(0, b"small")]), "a request under way goes on as long as there is room"
    assert (log.counters.dropped_requests, log.counters.dropped_events) == (1, 1)
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert ["as fast as it is recorded" in warning for warning in warnings] == [True]
    assert log.flush_sync()
    assert log.accepting
    assert log.append(sample, 3, [big])
    log.close()
    assert read("key")[1:] == [big, Delta(0, b"small"), big]


def test_strict_raises_where_events_are_not_taken(path, begin):
    log = Log.open(path, window_ms=3_600_000, queue_bytes=3_000, strict=True)
    sample = begin(log, "key")
    with pytest.raises(RecordingFailed, match="more than 3000 bytes wait"):
        log.append(sample, 1, [Delta(0, b"x" * 3000)])
    log.close()


def test_a_closed_log_takes_nothing_and_says_so_once(path, begin, deltas, read, caplog):
    log = Log.open(path)
    sample = begin(log, "key")
    log.close()
    log.close()
    assert not caplog.messages
    assert not log.append(sample, 1, deltas(1, 2))
    assert not log.append(log.create(OPENED), 0, [OPENED])
    assert caplog.messages == [f"{path} is closed; nothing more is recorded into it"]
    assert not log.accepting
    assert len(read("key")) == 1


@settings(max_examples=25)
@given(
    sizes=st.lists(st.integers(0, 40_000), min_size=1, max_size=30),
    cuts=st.lists(
        st.tuples(st.integers(1, 5), st.sampled_from(["flush", "rotate", "repeat", "go on"])), max_size=12
    ),
)
def test_events_come_back_the_same_in_whatever_batches_they_went_in(sizes, cuts):
    events = [Opened("key"), *(Delta(0, bytes([number % 256]) * size) for number, size in enumerate(sizes))]
    with tempfile.TemporaryDirectory() as directory:
        log = Log.open(Path(directory) / "log", window_ms=3_600_000)
        sample = log.create(Opened("key"))
        at = 0
        for count, then in [*cuts, (len(events), "go on")]:
            batch = events[at : at + count]
            assert log.append(sample, at, batch)
            if then == "flush":
                assert log.flush_sync(sample)
            elif then == "rotate":
                log.rotate()
            elif then == "repeat":
                assert log.append(sample, at, batch)
            at += len(batch)
        log.close()
        with LogReader.open(Path(directory) / "log") as reader:
            ref = reader.find("key")
            assert list(reader.events(ref)) == list(enumerate(events))
            assert list(reader.events(ref, len(events) // 2)) == list(enumerate(events))[len(events) // 2 :]
            assert all(len(block.payload) <= 64 << 10 or block.count == 1 for block in reader.blocks(ref))
