"""The table of settings: where each comes from, and what is said of names that are none."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from plugin.scripted import QUESTION, Scripted, delta, generate, new_sample
from rollout_log import settings, vime
from rollout_log.errors import RecordingFailed, RolloutLogError
from rollout_log.settings import Settings, SettingsError, read_settings
from rollout_log.trainer.session import session_for
from trainer.conftest import Rig
from trainer.sample_double import Status
from trainer.truth import Tokenizer, expected_tokens

TOKENS = expected_tokens(Tokenizer().encode(QUESTION), 0, 10)
WHOLE = [delta(TOKENS, 0, "stop", top={"weight_version": "3"}), "[DONE]"]


@pytest.fixture(autouse=True)
def _nothing_said_yet() -> Iterator[None]:
    settings._warned.clear()
    yield
    settings._warned.clear()


def read(environ: dict[str, str] | None = None, argv: list[str] | None = None, **args: Any) -> Settings:
    return read_settings(SimpleNamespace(**args), environ or {}, argv or [])


def test_arguments_go_before_the_environment_and_that_before_defaults():
    assert read() == Settings()
    found = read({"ROLLOUT_LOG_DIR": "/a", "ROLLOUT_LOG_RETRIES": "7"}, rollout_log_dir="/b")
    assert found == Settings(dir="/b", retries=7)
    assert read({"ROLLOUT_LOG_STALL_S": "2"}, rollout_log_stall_s=None).stall_s == 2.0


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("enabled", "0", False),
        ("enabled", "false", False),
        ("enabled", "Off", False),
        ("enabled", "no", False),
        ("strict", "1", True),
        ("strict", "yes", True),
        ("window_ms", "20", 20),
        ("max_bytes", "50 GB", 50 * 10**9),
        ("max_bytes", "1.5T", 15 * 10**11),
        ("max_bytes", "12", 12),
        ("keep", "routed_experts, images", ("routed_experts", "images")),
        ("resume", "continue", "continue"),
        ("durability", "strict", "strict"),
    ],
)
def test_text_of_the_environment_is_converted(name: str, text: str, value: Any):
    assert getattr(read({f"ROLLOUT_LOG_{name.upper()}": text}), name) == value


def test_a_switch_of_yaml_may_be_a_word():
    assert read(rollout_log_resume=False).resume == "off"  # YAML 1.1 reads `off` as false
    assert read(rollout_log_enabled=0).enabled is False


@pytest.mark.parametrize(
    ("args", "environ", "said"),
    [
        (
            {"rollout_log_on_retry": "never"},
            {},
            r"args\.rollout_log_on_retry='never': .* auto, restart, continue$",
        ),
        ({}, {"ROLLOUT_LOG_RETRIES": "many"}, r"ROLLOUT_LOG_RETRIES='many'"),
        (
            {},
            {"ROLLOUT_LOG_MAX_BYTES": "1 furlong"},
            r"ROLLOUT_LOG_MAX_BYTES='1 furlong': it is a size, such as",
        ),
        ({}, {"ROLLOUT_LOG_ENABLED": "maybe"}, r"ROLLOUT_LOG_ENABLED='maybe': it is true or false$"),
        (
            {},
            {"ROLLOUT_LOG_KEEP": "image"},
            r"ROLLOUT_LOG_KEEP=.*: it is some of routed_experts, .*, images$",
        ),
        ({"rollout_log_max_bytes": -1}, {}, r"args\.rollout_log_max_bytes=-1: it is a size"),
        ({"rollout_log_window_ms": -5}, {}, r"args\.rollout_log_window_ms=-5"),
    ],
)
def test_a_value_that_cannot_be_is_an_error_that_names_the_setting(
    args: dict[str, Any], environ: dict[str, str], said: str
):
    with pytest.raises(SettingsError, match=said):
        read(environ, **args)


def test_a_name_that_is_none_gets_one_warning_with_the_nearest(caplog: pytest.LogCaptureFixture):
    for _ in range(2):
        read(
            {"ROLLOUT_LOG_DURABLITY": "window"},
            ["train.py", "--rollout-log-enable=0", "--rollout-log-on-retry", "restart"],
            rollout_log_stal_s=3,
        )
    yaml = "has no effect: trainers ignore it; put `{}: …` into the YAML of --custom-config-path, or set {}"
    enabled = yaml.format("rollout_log_enabled", "ROLLOUT_LOG_ENABLED")
    on_retry = yaml.format("rollout_log_on_retry", "ROLLOUT_LOG_ON_RETRY")
    near = "has no effect; did you mean {}?"
    assert [record.getMessage() for record in caplog.records] == [
        f"unknown setting rollout_log_stal_s {near.format('rollout_log_stall_s')}",
        f"unknown environment variable ROLLOUT_LOG_DURABLITY {near.format('ROLLOUT_LOG_DURABILITY')}",
        f"the command line flag --rollout-log-enable {enabled}",
        f"the command line flag --rollout-log-on-retry {on_retry}",
    ]


def test_the_start_line_says_where_how_much_and_how(
    rig: Rig, log: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _, trainer = rig(generate=vime.generate, questions=[QUESTION], rollout_log_max_bytes="2 GB")
    with caplog.at_level(logging.INFO, "rollout_log"):
        for _ in range(2):
            generate(trainer, vime.generate, Scripted(WHOLE), new_sample())
    (record,) = caplog.records
    assert record.getMessage() == (
        f"recording every delta to {log}: at most 2 GB, kill -9 loses 20 ms, keys are t<index>-<session> and "
        "e<index>-<session> in evaluation; off: ROLLOUT_LOG_ENABLED=0"
    )


def test_switched_off_it_generates_the_same_and_leaves_nothing(rig: Rig, log: Path) -> None:
    _, trainer = rig(generate=vime.generate, questions=[QUESTION], rollout_log_enabled=False)
    sample = new_sample()
    generate(trainer, vime.generate, Scripted(WHOLE), sample)
    assert (sample.status, sample.tokens[-10:]) == (Status.COMPLETED, TOKENS)
    assert sample.weight_versions == ["3"]
    assert sample.metadata["rollout_log"]["requests"] == 1
    assert vime.log_metrics(0, trainer.args, [sample], {}, 1.0) is False
    assert session_for(trainer.args).log is None
    assert not log.exists()


def test_a_place_that_cannot_be_written_is_one_warning_and_the_run_goes_on(
    rig: Rig, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("in the way")
    _, trainer = rig(
        generate=vime.generate, questions=[QUESTION], rollout_log_dir=str(tmp_path / "file" / "log")
    )
    for _ in range(2):
        sample = new_sample()
        generate(trainer, vime.generate, Scripted(WHOLE), sample)
        assert sample.status is Status.COMPLETED
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 1
    assert said[0].startswith("nothing is recorded: ")
    assert "goes on without a log" in said[0]


def test_strict_refuses_a_place_that_cannot_be_written(rig: Rig, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    _, trainer = rig(
        generate=vime.generate,
        questions=[QUESTION],
        rollout_log_dir=str(tmp_path / "file" / "log"),
        rollout_log_strict=True,
    )
    with pytest.raises((RolloutLogError, OSError), match="file"):
        generate(trainer, vime.generate, Scripted(WHOLE), new_sample())


@pytest.mark.parametrize("strict", [False, True], ids=["", "strict"])
def test_a_log_that_fails_in_mid_run(
    rig: Rig, strict: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    _, trainer = rig(generate=vime.generate, questions=[QUESTION], rollout_log_strict=strict)
    generate(trainer, vime.generate, Scripted(WHOLE), new_sample())
    log = session_for(trainer.args).log
    assert log is not None
    monkeypatch.setattr(log._queue, "_limit", 1)  # as if the disk could not keep up
    sample = new_sample()
    if strict:
        with pytest.raises(RecordingFailed):
            generate(trainer, vime.generate, Scripted(WHOLE), sample)
        return
    for _ in range(2):
        sample = new_sample()
        generate(trainer, vime.generate, Scripted(WHOLE), sample)
        assert (sample.status, sample.tokens[-10:]) == (Status.COMPLETED, TOKENS)
    extra: dict[str, Any] = {}
    vime.log_metrics(0, trainer.args, [sample], extra, 1.0)
    assert extra["perf/rollout_log/unrecorded_requests"] >= 2
