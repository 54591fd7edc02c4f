"""`diff`: exit 0 the same, 1 not, 2 for what cannot be compared."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recorded import Writer, frame
from rollout_log.comparison import Difference, first_difference


@pytest.fixture
def logs(tmp_path):
    """One key in two logs: three tokens are the same, with other log-probs; then they part."""
    for run, tail, logprob in (("a", (4, 5), -0.5), ("b", (6,), -0.75)):
        with Writer(tmp_path / run) as writer:
            writer.request("k", [frame(1, 2), frame(3, logprob=logprob), frame(*tail, finish="stop")])
            writer.request("twin", [frame(1, 2), frame(3, logprob=logprob), frame(*tail, finish="stop")])
            writer.log.flush_sync()
    return tmp_path / "a", tmp_path / "b"


def test_the_same_in_one_log(logs, call):
    result = call("diff", logs[0], "k", "twin")
    assert result.code == 0
    assert "response: the same 5 tokens" in result.lines
    assert "log-probs: the same for 5 tokens" in result.lines
    assert call("diff", logs[0], "k", "twin", "--json").json["same"] is True


def test_one_key_in_two_logs(logs, call):
    result = call("diff", logs[0], "k", "--in", logs[1])
    assert result.code == 1
    at = result.lines.index("response: the same for 3 tokens, then")
    assert result.lines[at + 1 : at + 3] == ["  a  1 2 3 [4] 5", "  b  1 2 3 [6]"]
    assert "log-probs: 1 of 3 differ, by 0.0833 on average and 0.25 at token 2" in result.lines
    found = call("diff", logs[0], "k", "--in", logs[1], "--json").json
    assert found["response"] == {"position": 3, "a": 4, "b": 6}
    assert found["prompt"] is None
    assert found["logprobs"]["largest_at"] == 2
    assert (found["a"]["run"], found["b"]["run"]) == ("a", "b")
    assert [side["requests"][0]["tokens"] for side in (found["a"], found["b"])] == [5, 4]


@pytest.mark.parametrize("order", [(1, 0), (0, 1)])
def test_another_log_in_the_place_of_a_sample(order, logs, call):
    names = [["k", logs[1]][each] for each in order]
    result = call("diff", logs[0], *names)
    assert result.code == 2
    assert result.err.endswith(f"; another log is named with --in {logs[1]}\n")


def test_requests_side_by_side(run_log, call):
    result = call("diff", run_log, "math-1", "math-2")
    assert result.code == 1
    rows = [line.split() for line in result.lines]
    assert ["0", "first", "0", "finished", "3", "first", "0", "aborted", "2"] in rows
    assert ["1", "resume", "2", "finished", "2"] in rows
    assert ["response", "tokens", "3", "4", "≠"] in rows


def test_a_shorter_one_ends(tmp_path, call):
    with Writer(tmp_path / "log") as writer:
        writer.request("long", [frame(1, 2, logprob=None, finish="stop")])
        writer.request("short", [frame(1, finish="stop")])
        writer.log.flush_sync()
    result = call("diff", tmp_path / "log", "long", "short")
    assert "  b  1 [end]" in result.lines
    assert "log-probs: missing on one side for 1 token" in result.lines


def test_what_cannot_be_compared(run_log, call):
    alone = call("diff", run_log, "math-1")
    assert alone.code == 2
    assert "name another sample" in alone.err
    missing = call("diff", run_log, "math-1", "math-9")
    assert (missing.code, len(missing.err.splitlines())) == (2, 1)
    assert call("diff", run_log, "math-1", "--in", run_log / "no").code == 2
    assert call("diff", run_log, "math-1#4", "math-1").code == 2


@given(st.lists(st.integers(0, 2)), st.lists(st.integers(0, 2)))
def test_the_first_difference_is_where_the_common_prefix_ends(a, b):
    found = first_difference(a, b)
    if a == b:
        assert found is None
        return
    assert isinstance(found, Difference)
    assert a[: found.position] == b[: found.position]
    assert a[found.position : found.position + 1] == ([] if found.a is None else [found.a])
    assert b[found.position : found.position + 1] == ([] if found.b is None else [found.b])
    assert found.a != found.b


def test_log_probs_without_measure(tmp_path, call):
    infinite, huge = float("-inf"), -1.7e308
    with Writer(tmp_path / "log") as writer:
        for key, logprobs in (("a", (infinite, huge, huge)), ("b", (infinite, 0.0, 0.0))):
            frames = [frame(n, logprob=logprob) for n, logprob in enumerate(logprobs)]
            writer.request(key, [*frames, frame(9, finish="stop")])
        writer.log.flush_sync()
    found = call("diff", tmp_path / "log", "a", "b", "--json").json["logprobs"]
    assert (found["compared"], found["differing"], found["largest_at"]) == (4, 2, 1)
    assert "log-probs: the same for 4 tokens" in call("diff", tmp_path / "log", "a", "a").lines
