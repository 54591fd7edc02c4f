"""`ls`: which samples there are, and which of them are asked for."""

from __future__ import annotations

import time
from datetime import datetime, timezone

import pytest
import typer

from recorded import Writer, frame
from rollout_log.cli._times import brief_clock, clock, duration, parse_time
from rollout_log.log import LogReader
from rollout_log.undated import EPOCH_NS

ALL = ["math-1", "math-2", "math-3", "chat-1", "chat-2", "held-out"]


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ([], ALL),
        (["--step", 1], ["math-1", "math-2", "math-3", "chat-1"]),
        (["--step", 2], ["math-2", "chat-2", "held-out"]),
        (["--step", 3], []),
        (["--step", 1, "--went-on"], ["math-2"]),
        (["--step", 2, "--went-on"], []),
        (["--went-on"], ["math-2"]),
        (["--status", "truncated"], ["math-3"]),
        (["--key", "math-*"], ["math-1", "math-2", "math-3"]),
        (["--key", "*-[12]"], ["math-1", "math-2", "chat-1", "chat-2"]),
        (["--problem", "version_assumed"], []),
        (["--status", "pending", "--key", "chat*"], ["chat-2"]),
        (["--since", "1h"], ALL),
        (["--until", "1h"], []),
        (["--since", "2999-01-01"], []),
    ],
)
def test_filters(options, names, run_log, call):
    assert [line["name"] for line in call("ls", run_log, *options, "--json").json_lines] == names


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--step", 7], "no sample took part in step 7; there are steps 1 to 2"),
        (["--status", "aborted"], "no sample matches --status aborted; without it there are some"),
        (
            ["--step", 2, "--went-on", "--key", "x*"],
            "no sample of step 2 matches --went-on --key x*; without it there are some",
        ),
    ],
)
def test_nothing_found_is_said(options, said, run_log, call):
    result = call("ls", run_log, *options)
    assert (result.code, result.out, result.err) == (0, "", f"rollout-log: {said}\n")


def test_no_filter_is_dropped(run_log, call):
    done = call("ls", run_log, "--steps", "--status", "failed", "--went-on")
    assert (done.code, done.out) == (2, "")
    assert (
        done.err
        == "rollout-log: --steps has no use for --went-on, --status; rollout-log ls --help says more\n"
    )


def test_many_steps_are_named_by_their_ends(tmp_path, call):
    with Writer(tmp_path / "log") as writer:
        for step in range(0, 100, 10):
            writer.request(f"k{step}", [frame(1, finish="stop")], step=step)
        writer.log.flush_sync()
    said = call("ls", tmp_path / "log", "--step", 5).err
    assert said.endswith("step 5; there are 10 steps from 0 to 90\n")


def test_a_log_without_samples_says_so(tmp_path, call):
    with Writer(tmp_path / "log"):
        pass
    for verb in ("ls", "steps"):
        result = call(verb, tmp_path / "log")
        assert (result.out, result.err) == ("", "rollout-log: the log has no samples yet\n")


def test_a_log_whose_samples_were_all_pruned_says_so(tmp_path, call):
    with Writer(tmp_path / "log") as writer:
        writer.request("k", [frame(1, finish="stop")], step=0)
    call("prune", tmp_path / "log", "--keep-bytes", 0)
    for verb in ("ls", "steps"):
        result = call(verb, tmp_path / "log")
        said = "rollout-log: the log has no samples any more: 1 segment pruned\n"
        assert (result.code, result.out, result.err) == (0, "", said)


def test_a_severity_takes_all_its_problems(tmp_path, call):
    with Writer(tmp_path / "log") as writer:
        writer.request("null", [frame(1, logprob=None), frame(finish="stop")])
        writer.request("silent", [frame(1, logprob=-1), frame(2, logprob=-1)])
        writer.request("sound", [frame(1, finish="stop")])
        writer.log.flush_sync()

    def names(problem):
        found = call("ls", tmp_path / "log", "--problem", problem, "--json").json_lines
        return [line["name"] for line in found]

    assert names("warning") == ["null"]
    assert names("null_logprob") == ["null"]
    assert names("info") == ["silent"]
    assert names("error") == []


def test_a_line_says_what_the_summary_has(run_log, call):
    found = {line["name"]: line for line in call("ls", run_log, "--json").json_lines}
    line = found["math-2"]
    assert (line["status"], line["step"], line["resumed_from"], line["resumes"]) == ("completed", 2, 1, 1)
    assert (line["tokens"], line["prompt_tokens"], line["requests"]) == (4, 3, 2)
    assert line["versions"] == ["7", "8"]
    assert found["math-1"]["trainer_status"] == "completed"
    assert found["math-1"]["index"] == 4
    assert found["math-3"]["discarded"] == 1
    assert found["held-out"]["evaluation"] is True


def test_people_get_a_table(run_log, call):
    header, *rows = call("ls", run_log, "--step", 2).lines
    assert header.split()[:3] == ["key", "step", "status"]
    assert rows[0].split()[:4] == ["math-2", "2", "completed", "4"]
    assert "2 eval" in rows[2]


def test_an_older_life_is_named_so_that_it_is_found(tmp_path, call):
    for ids in ((1, 2), (3,)):
        with Writer(tmp_path / "log") as writer:
            writer.request("k", [frame(*ids, finish="stop")])
            writer.log.flush_sync()
    found = call("ls", tmp_path / "log", "--json").json_lines
    assert [(line["name"], line["tokens"], line["incarnation"]) for line in found] == [
        ("k@0", 2, 0),
        ("k", 1, 1),
    ]
    with LogReader.open(tmp_path / "log") as reader:
        assert reader.rollout("k@0").choice().token_ids == [1, 2]
    assert call("show", tmp_path / "log", "k@0", "--json").json["token_ids"] == [1, 2]
    assert call("show", tmp_path / "log", "k", "--json").json["incarnation"] == 1


@pytest.mark.parametrize(
    "options", [["--status", "done"], ["--problem", "nonsense"], ["--since", "yesterday"], ["--step", "x"]]
)
def test_a_wrong_filter_is_refused(options, run_log, call):
    result = call("ls", run_log, *options)
    assert result.code == 2
    assert result.out == ""
    assert f"{options[1]!r} is no" in result.err
    assert result.err.endswith("; rollout-log ls --help says more\n")


def test_times():
    assert parse_time(None) is None
    assert parse_time("2026-05-01T00:00:00.500000+00:00") == 1777593600_500_000_000
    local = datetime(2026, 5, 1, 22, 30).astimezone()
    assert parse_time("2026-05-01T22:30") == int(local.timestamp()) * 10**9
    today = datetime.fromtimestamp((parse_time("22:30") or 0) // 10**9, timezone.utc).astimezone()
    assert (today.hour, today.minute, today.date()) == (22, 30, datetime.now().astimezone().date())
    ago = parse_time("90m") or 0
    assert 0 <= time.time_ns() - 90 * 60 * 10**9 - ago < 60 * 10**9
    with pytest.raises(typer.BadParameter):
        parse_time("soon")


def test_clock_is_local_and_survives_nonsense():
    assert clock(0) == ""
    assert clock(15 * 10**17) == datetime.fromtimestamp(15 * 10**8).astimezone().strftime("%Y-%m-%d %H:%M:%S")
    assert clock(2**63 - 1).startswith("2262-")
    assert clock(10**30) == str(10**30)


@pytest.mark.parametrize(
    ("since_ns", "shown"), [(0, "0 s"), (2_400_000_000, "2.4 s"), (86_400 * 10**9, "24h00m")]
)
def test_the_time_in_a_fixture_is_since_its_beginning(since_ns, shown):
    assert clock(EPOCH_NS + since_ns) == f"{shown} into the fixture"
    assert brief_clock(EPOCH_NS + since_ns) == f"+{shown}"


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (None, ""),
        (0, "0.0 ms"),
        (0.00123, "1.2 ms"),
        (0.5, "500 ms"),
        (0.9999, "1.0 s"),
        (59.9, "59.9 s"),
        (59.96, "1m00s"),
        (185, "3m05s"),
        (7380, "2h03m"),
    ],
)
def test_durations(seconds, shown):
    assert duration(seconds) == shown
