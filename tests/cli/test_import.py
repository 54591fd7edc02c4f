"""`export --to fixture` and `import`: from a log to a file and back."""

from __future__ import annotations

import subprocess
import sys

import pytest

from rollout_log.cli.export import REDACTIONS
from rollout_log.events import Marked, Opened
from rollout_log.log import Log, LogReader, Summary
from rollout_log.log.directory import writers_of
from rollout_log.sources import open_source
from stored import views


@pytest.fixture
def fixture(run_log, call, tmp_path):
    """Exports the log to a fixture."""

    def export(*args, name="all.jsonl"):
        result = call("export", run_log, "--to", "fixture", "-o", tmp_path / name, *args)
        assert (result.code, result.out) == (0, ""), result.err
        return tmp_path / name

    return export


def test_a_fixture_goes_into_a_log_and_out_again(run_log, fixture, call, tmp_path):
    path = fixture()
    result = call("import", path, tmp_path / "copy")
    assert (result.code, result.out) == (0, f"6 samples copied to {tmp_path / 'copy'}\n")
    with LogReader.open(run_log) as log, LogReader.open(tmp_path / "copy") as copy:
        assert views(copy) == views(log)
    assert call("export", tmp_path / "copy", "--to", "fixture", "-o", tmp_path / "again.jsonl").code == 0
    assert (tmp_path / "again.jsonl").read_bytes() == path.read_bytes()


@pytest.mark.parametrize(
    ("args", "names"),
    [
        (["--status", "failed"], ["chat-1"]),
        (["--step", "2", "--status", "completed"], ["held-out", "math-2"]),
        (["math-1", "chat-2"], ["chat-2", "math-1"]),
    ],
)
def test_some_samples_may_be_chosen(fixture, args, names):
    with open_source(fixture(*args)) as reader:
        assert sorted(entry.name for entry in reader.samples()) == names


def test_import_takes_some_samples_and_refuses_what_is_there(fixture, call, tmp_path):
    path = fixture(name="all.jsonl.zst")
    assert call("import", path, tmp_path / "copy", "--step", "2").out.startswith("3 samples")
    assert call("import", path, tmp_path / "copy", "math-1").out.startswith("1 sample copied")
    before = writers_of(tmp_path / "copy")
    result = call("import", path, tmp_path / "copy")
    assert result.code == 2
    assert "already; import into another log" in result.err
    assert call("import", path, tmp_path / "copy", "math-9").code == 2
    assert writers_of(tmp_path / "copy") == before, "what is refused leaves nothing"


def test_an_import_of_nothing_makes_no_log(fixture, call, tmp_path):
    path = fixture()
    assert call("import", path, tmp_path / "copy", "math-9").code == 2
    assert call("import", path, tmp_path / "copy", "--step", "99").code == 2
    assert not (tmp_path / "copy").exists()


def test_an_import_of_what_is_damaged_makes_no_log(fixture, call, tmp_path):
    bad = tmp_path / "bad.jsonl"
    bad.write_text(fixture().read_text() + '{"event":"delta"}\n')
    assert call("import", bad, tmp_path / "copy").code == 2
    with Log.open(tmp_path / "log") as log:  # begins well, and goes on with a sample that has no beginning
        log.append(log.create(Opened("whole")), 0, [Opened("whole")])
        log.append(log.create(Opened("headless")), 0, [Marked("lost")], Summary(key="headless"))
    result = call("import", tmp_path / "log", tmp_path / "copy")
    assert result.code == 2
    assert "sample 'headless' has lost its first event, so it cannot be copied; leave it out" in result.err
    assert not (tmp_path / "copy").exists()


@pytest.mark.parametrize("what", REDACTIONS)
def test_redaction_is_asked_for_by_name(fixture, what):
    assert len(fixture(name="plain.jsonl").read_bytes()) >= len(fixture("--redact", what).read_bytes())


def test_text_of_an_error_is_redacted(fixture, call):
    assert "overloaded" in fixture().read_text()
    redacted = fixture("--redact", "text", "--redact", "headers")
    assert "overloaded" not in redacted.read_text()
    assert call("ls", redacted, "--json").json_lines[0]["key"] == "math-1"


def test_a_redaction_that_does_not_exist_is_refused(run_log, call, tmp_path):
    result = call("export", run_log, "--to", "fixture", "-o", tmp_path / "x", "--redact", "names")
    assert result.code == 2
    assert "'names' cannot be redacted" in result.err
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("output", ["-", "/dev/stdout"])
def test_a_fixture_may_go_to_standard_output(run_log, output, tmp_path):
    command = [sys.executable, "-m", "rollout_log.cli", "export", run_log, "math-1"]
    command += ["--to", "fixture", "-o", output]
    done = subprocess.run(command, capture_output=True, check=True, cwd=tmp_path)
    assert not list(tmp_path.iterdir())
    assert done.stderr == b"rollout-log: standard output, with 1 sample\n"
    assert done.stdout.startswith(b'{"rollout_log_fixture":[1,0]}\n{"event":"opened","key":"math-1"')


def test_verbs_read_a_fixture_as_they_do_a_log(run_log, fixture, call):
    path = fixture()
    assert call("show", path, "math-2", "--json").json == call("show", run_log, "math-2", "--json").json
    names = [line["name"] for line in call("ls", path, "--json").json_lines]
    assert names == [line["name"] for line in call("ls", run_log, "--json").json_lines]
    assert call("diff", path, "math-1", "--in", run_log).code == 0
