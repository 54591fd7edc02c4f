"""`steps`: a line a step."""

from __future__ import annotations

from recorded import Writer, frame
from rollout_log.log import Summary
from rollout_log.steps import by_step
from rollout_log.undated import EPOCH_NS


def test_a_step_is_counted_from_its_samples(run_log, call):
    first, second, evaluation = call("steps", run_log, "--json").json_lines
    assert (first["step"], first["evaluation"], first["samples"]) == (1, False, 3)
    assert [first[s] for s in ("completed", "truncated", "aborted", "failed", "pending")] == [1, 1, 0, 1, 0]
    assert first["went_on"] == 1
    assert first["requests"] == 4
    assert first["retries"] == {"reset": 1}
    assert (first["tokens"], first["discarded"], first["discarded_share"]) == (5, 1, 1 / 6)
    assert first["weight_versions"] == ["7"]
    assert (second["step"], second["samples"], second["completed"], second["pending"]) == (2, 2, 1, 1)
    assert second["resumed_from"] == {"1": 1}
    assert second["resumes"] == 1
    assert second["weight_versions"] == ["7", "8"]
    assert (evaluation["step"], evaluation["evaluation"], evaluation["samples"]) == (2, True, 1)
    for step in (first, second, evaluation):
        assert 0 < step["began_unix_ns"] <= step["updated_unix_ns"]


def test_people_get_a_table_without_empty_columns(run_log, call):
    header, first, second, evaluation = call("steps", run_log).lines
    assert "went on" in header
    assert "resumed from" in header
    assert first.split()[:2] == ["1", "3"]
    assert "1 (16.7%)" in first
    assert "reset 1" in first
    assert "1: 1" in second
    assert "7, 8" in second
    assert evaluation.split()[:3] == ["2", "eval", "1"]
    assert call("ls", run_log, "--steps").lines == [header, first, second, evaluation]


def test_no_block_is_read(run_log, call, monkeypatch):
    def refuse(*_):
        raise AssertionError("a block was read")

    monkeypatch.setattr("rollout_log.log.segment.Segment.blocks", refuse)
    assert call("steps", run_log).code == 0
    assert call("ls", run_log).code == 0


def test_logs_of_several_runs_are_kept_apart(tmp_path, call):
    for run in ("a", "b"):
        with Writer(tmp_path / run) as writer:
            writer.request("same", [frame(1, finish="stop")], step=1)
            writer.log.flush_sync()
    found = call("steps", tmp_path, "--json").json_lines
    assert [(step["run"], step["step"], step["samples"]) for step in found] == [("a", 1, 1), ("b", 1, 1)]
    assert call("steps", tmp_path).lines[0].split()[:2] == ["run", "step"]
    assert [line["run"] for line in call("ls", tmp_path, "--json").json_lines] == ["a", "b"]


def test_samples_that_all_left_a_step_still_make_a_line():
    steps = by_step([Summary(key="k", step=5, resumed_from=4, status="completed")])
    assert [(step.step, step.samples, step.went_on) for step in steps] == [(4, 0, 1), (5, 1, 0)]


def test_a_step_began_and_took_what_happened_in_it(root, call):
    steps = call("steps", root / "fixtures" / "partial-rollout.jsonl.zst", "--json").json_lines
    spans = [
        ((step["began_unix_ns"] - EPOCH_NS) / 1e9, (step["updated_unix_ns"] - EPOCH_NS) / 1e9)
        for step in steps
    ]
    assert [(round(began, 3), round(ended, 3)) for began, ended in spans] == [
        (0.001, 2.485),  # its last request that ended is one of a sample that went on
        (2.523, 10.478),
        (10.498, 14.891),
    ]


def test_where_no_sample_says_when_it_went_on_the_beginning_is_unknown():
    (_, step) = by_step([Summary(key="k", step=5, resumed_from=4, opened_unix_ns=7, updated_unix_ns=9)])
    assert (step.began_unix_ns, step.updated_unix_ns) == (0, 9)


def test_a_step_that_a_sample_only_passed_through_has_no_line():
    spans = [(0, 10, 20), (1, 30, 40), (2, 50, 50)]
    steps = by_step([Summary(key="k", step=2, resumed_from=0, spans=spans, updated_unix_ns=60)])
    assert [(step.step, step.began_unix_ns, step.updated_unix_ns) for step in steps] == [
        (0, 10, 20),
        (2, 50, 60),
    ]


def test_order_is_by_number_with_no_step_last():
    steps = by_step([Summary(key=str(step), step=step) for step in (10, None, 9)])
    assert [step.step for step in steps] == [9, 10, None]


def test_versions_are_sorted_as_numbers():
    (step,) = by_step(
        [Summary(key="a", step=1, versions=["10", "x"]), Summary(key="b", step=1, versions=["9"])]
    )
    assert step.weight_versions == ["9", "10", "x"]


def test_a_step_that_generated_nothing_has_no_share():
    (step,) = by_step([Summary(key="a", step=1)])
    assert step.discarded_share is None
