"""`stats`: numbers that follow from events whose times are known."""

from __future__ import annotations

import pytest

from recorded import PATH, frame
from rollout_log.cli._output import size
from rollout_log.events import Delta, Ended, Opened, Requested, Responded
from rollout_log.log import Log, Summary, writer
from rollout_log.statistics import _pick

SECOND = 10**9
START = 1_700_000_000 * SECOND
MS = 1000


@pytest.fixture
def timed_log(tmp_path, monkeypatch):
    """Ten samples of 4 tokens, a second apart: first token after 100 ms, then every 50 ms."""
    monkeypatch.setattr(writer, "writer_name", lambda: f"host-1-{START // 1000}")
    with Log.open(tmp_path / "log", run="timed") as log:
        for i in range(10):
            sent = START + i * SECOND
            opened = Opened(key=f"k{i}", prompt_token_ids=[1], opened_unix_ns=sent)
            requested = Requested(0, 0, "first", "vllm", "POST", PATH, b"{}", sent_unix_ns=sent)
            deltas = [
                Delta(0, frame(7).removeprefix(b"data: ").strip(), (100 + 50 * n) * MS) for n in range(4)
            ]
            ended = Ended(0, "reset", time=300 * MS)
            events = [opened, requested, Responded(0, 200), *deltas, ended]
            summary = Summary(
                key=opened.key,
                run="timed",
                status="aborted",
                tokens=4,
                requests=1,
                events=len(events),
                bytes=1000,
                opened_unix_ns=sent,
                updated_unix_ns=sent + SECOND,
                discarded=1,
            )
            sample = log.create(opened)
            log.append(sample, 0, events, summary)
            log.flush_sync()
    return tmp_path / "log"


def test_counts_and_latencies(timed_log, call):
    found = call("stats", timed_log, "--json").json
    assert (found["samples"], found["statuses"], found["requests"]) == (10, {"aborted": 10}, 10)
    assert (found["tokens"], found["discarded"], found["response_bytes"]) == (40, 10, 10_000)
    assert found["tokens_per_second"] == 5.0
    assert found["first_token"] == {"count": 10, "median": 0.1, "p99": 0.1, "largest": 0.1}
    assert found["between_tokens"] == {"count": 30, "median": 0.05, "p99": 0.05, "largest": 0.05}
    assert found["loss_window"] == {"count": 10, "median": 0.15, "p99": 0.15, "largest": 0.15}
    assert (found["writers"], found["segments"], found["looked_at"]) == (1, 1, 10)
    assert (found["blocks"], found["events_per_block"]) == (10, 8.0)
    assert 0 < found["sealed_bytes"] < found["event_bytes"]
    segment = next(timed_log.glob("*/*.rlog")).stat()
    assert 0 < found["disk_bytes"] <= segment.st_size


def test_what_was_imported_tells_no_loss_window(timed_log, call, tmp_path, monkeypatch):
    monkeypatch.undo()
    assert call("import", timed_log, tmp_path / "copy").code == 0
    live, copy = (call("stats", log, "--json").json for log in (timed_log, tmp_path / "copy"))
    assert (live["loss_window"]["count"], copy["loss_window"]["count"]) == (10, 0)
    assert copy["blocks"] == live["blocks"]
    assert "loss window" not in call("stats", tmp_path / "copy").out


def test_tokens_over_time(timed_log, call):
    timeline = call("stats", timed_log, "--json").json["timeline"]
    assert [moment["tokens"] for moment in timeline] == [4] * 10
    assert [moment["began_unix_ns"] for moment in timeline] == [START + i * SECOND for i in range(10)]
    assert {moment["seconds"] for moment in timeline} == {1.0}


def test_a_part_of_the_samples_stands_for_all(timed_log, call):
    found = call("stats", timed_log, "--samples", 5, "--json").json
    assert found["looked_at"] == 5
    assert found["first_token"]["count"] == 5
    assert sum(moment["tokens"] for moment in found["timeline"]) == 40, "scaled to the whole log"
    assert found["samples"] == 10
    lines = call("stats", timed_log, "--samples", 5).lines
    assert lines[-1].split(maxsplit=2)[2].startswith("5 samples")


def test_people_get_a_line_a_fact(timed_log, call):
    facts = dict(line.split("  ", 1) for line in call("stats", timed_log).lines)
    facts = {name.strip(): value.strip() for name, value in facts.items()}
    assert facts["samples"] == "10: 10 aborted"
    assert facts["tokens"] == "40, and 10 thrown away"
    assert facts["first token"] == "median 100 ms, 99th percentile 100 ms, largest 100 ms"
    assert facts["over time"] == "██████████ (1.0 s each, at most 4 a second)"
    on_disk = facts["on disk"].partition(" in ")[0]
    assert facts["sealing"].startswith("would leave about ")
    assert facts["sealing"].endswith(f" of {on_disk}")


@pytest.mark.parametrize("fixture", ["demo", "partial-rollout", "finishes"])
def test_what_sealing_would_leave_is_what_it_leaves(fixture, root, tmp_path, call):
    log = tmp_path / "log"
    assert call("import", root / "fixtures" / f"{fixture}.jsonl.zst", log).code == 0
    expected = call("stats", log, "--json").json["sealed_disk_bytes"]
    assert call("seal", log).code == 0
    assert next(log.glob("*/*.sealed")).stat().st_size == pytest.approx(expected, rel=0.1)
    assert call("stats", log).lines[-1].split() == ["sealing", "done"]


def test_imported_samples_without_a_date_are_left_out_of_the_time(timed_log, root, call, monkeypatch):
    monkeypatch.undo()
    alone = call("stats", timed_log, "--json").json
    assert call("import", root / "fixtures" / "partial-rollout.jsonl.zst", timed_log).code == 0
    mixed = call("stats", timed_log, "--json").json
    assert (alone["undated"], mixed["undated"], mixed["samples"]) == (0, 9, 19)
    for name in ("began_unix_ns", "updated_unix_ns", "tokens_per_second", "timeline"):
        assert mixed[name] == alone[name], name
    assert "for 10.0 s; without 9 samples of fixtures, which have no date" in call("stats", timed_log).out


def test_the_time_of_a_fixture_alone_is_its_own(root, call):
    lines = call("stats", root / "fixtures" / "partial-rollout.jsonl.zst").lines
    assert lines[3].split(maxsplit=1) == ["time", "0 s into the fixture, for 14.9 s"]


def test_a_fixture_has_a_size_and_no_blocks(timed_log, tmp_path, call):
    fixture = tmp_path / "all.jsonl"
    assert call("export", timed_log, "--to", "fixture", "-o", fixture).code == 0
    found = call("stats", fixture, "--json").json
    assert (found["writers"], found["segments"]) == (0, 1)
    assert 0 < found["disk_bytes"] <= fixture.stat().st_size
    assert (found["blocks"], found["loss_window"]["count"], found["sealed_bytes"]) == (0, 0, 0)
    assert found["between_tokens"]["count"] == 30
    facts = [line.split("  ")[0] for line in call("stats", fixture).lines]
    assert not {"loss window", "blocks", "sealing"} & set(facts)
    assert call("stats", fixture).lines[-2].endswith(" in 1 file")


@pytest.mark.parametrize(
    ("count", "shown"),
    [
        (0, "0 bytes"),
        (999, "999 bytes"),
        (1234, "1.23 kB"),
        (999_600, "1 MB"),
        (5.5e9, "5.5 GB"),
        (1e15, "1000 TB"),
    ],
)
def test_sizes(count, shown):
    assert size(count) == shown


@pytest.mark.parametrize(("samples", "most"), [(40, 17), (40, 39), (40, 40), (41, None), (9, 1), (1000, 100)])
def test_those_that_are_looked_into_are_spread_and_none_twice(samples, most):
    entries = list(range(samples))
    picked = _pick(entries, most)
    assert picked == sorted(set(picked))
    assert len(picked) == samples if most is None or most >= samples else 0 < len(picked) <= most
    if len(picked) > 20:
        assert picked[0] < samples * 0.1
        assert picked[-1] > samples * 0.8
