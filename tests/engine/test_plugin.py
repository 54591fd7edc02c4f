"""vime's rollout loop with the plug-in and a real engine: cut in every step, and as if never cut."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from engine import rollout_loop
from engine.rollout_loop import KILLED, KILLED_TOKENS, QUESTIONS, RolloutLoop, generate_to_length, length_of
from engine.wire import ask_all, body
from rollout_log.log import LogReader
from rollout_log.trainer.session import close_session
from rollout_log.view import view
from trainer.sample_double import Status
from trainer.trainer_double import NEW_VIME, OLD_VIME

pytestmark = pytest.mark.engine


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where the plug-in records."""
    monkeypatch.setenv("ROLLOUT_LOG_DIR", str(tmp_path / "log"))
    yield tmp_path / "log"
    close_session()


@pytest.fixture
def load(http: httpx.Client, engine: Any) -> Iterator[Any]:
    """Give the engine new weights, by their name; the old one afterwards."""

    def load(version: str) -> None:
        changed = http.post(f"{engine.url}/update_weight_version", json={"new_version": version})
        changed.raise_for_status()

    yield load
    load("default")


@pytest.mark.parametrize("layout", [NEW_VIME, OLD_VIME], ids=["cancelled", "aborted by the engine"])
def test_samples_cut_in_every_step_equal_those_that_were_not(layout, engine, router, load, log):
    with RolloutLoop(
        router.url,
        layout,
        generate=generate_to_length,
        questions=QUESTIONS,
        groups=2,
        samples=2,
        over_sampling=4,
    ) as trainer:
        for step in range(4):
            load(str(step))
            trainer.args.over_sampling_batch_size = 2 if step == 3 else 4
            trainer.step(step)
    assert trainer.problems == []
    samples = sorted(trainer.delivered, key=lambda sample: sample.index or 0)
    assert len(samples) == 16
    assert {sample.status for sample in samples} == {Status.TRUNCATED}
    prompts = [trainer.tokenizer.encode(sample.prompt) for sample in samples]
    lengths = [length_of(sample) for sample in samples]
    requests = [
        body(prompt=prompt, temperature=0.0, max_tokens=length, min_tokens=length)
        for prompt, length in zip(prompts, lengths, strict=True)
    ]
    whole = [answer[0] for answer in ask_all(engine.url, requests)]
    assert [sample.tokens[len(prompt) :] for sample, prompt in zip(samples, prompts, strict=True)] == [
        answer.token_ids for answer in whole
    ]
    assert [sample.rollout_log_probs for sample in samples] == [answer.logprobs for answer in whole]
    assert trainer.tokenizer.decode(whole[5].token_ids) == samples[5].response

    close_session()
    with LogReader.open(log) as reader:
        for sample, answer in zip(samples, whole, strict=True):
            rollout = reader.rollout(sample.metadata["rollout_log"]["key"])
            shown = view(rollout)
            assert (shown.token_ids, shown.logprobs) == (answer.token_ids, answer.logprobs)
            assert [problem for problem in shown.problems if problem.severity == "error"] == []
            # Each step had weights of its own, and each request what it added under them.
            ends = [*(request.base for request in shown.requests[1:]), len(answer.token_ids)]
            spans = [
                (str(request.step), request.base, end)
                for request, end in zip(rollout.requests, ends, strict=True)
                if end > request.base
            ]
            assert [(span.version, span.start, span.end) for span in shown.weight_versions] == spans
            assert sample.weight_versions == [version for version, _, _ in spans]
        steps = [len(reader.rollout(sample.metadata["rollout_log"]["key"]).requests) for sample in samples]
    # Which samples a step cuts, and how often, depends on how fast the engine is.
    assert max(steps) > 1


def test_kill_9_of_the_recording_process_loses_and_doubles_no_token(engine, router, tmp_path):
    log, result = tmp_path / "log", tmp_path / "result.json"
    command = [sys.executable, rollout_loop.__file__, router.url, str(log), str(result)]
    environ = {"PYTHONPATH": ":".join(path for path in sys.path if path)}
    killed = subprocess.run([*command, "50"], env=environ, check=False, timeout=300)
    assert killed.returncode == -signal.SIGKILL
    with LogReader.open(log) as reader:
        before = [reader.rollout(entry.ref).length for entry in reader.samples()]
    assert len(before) == KILLED
    assert [length for length in before if not 0 < length < KILLED_TOKENS] == []

    subprocess.run(command, env=environ, check=True, timeout=300)
    problems, samples = json.loads(result.read_text())
    assert problems == []
    requests = [
        body(prompt=prompt, temperature=0.0, max_tokens=KILLED_TOKENS, min_tokens=KILLED_TOKENS)
        for prompt, _, _ in samples.values()
    ]
    answered = [[answer[0].token_ids, answer[0].logprobs] for answer in ask_all(engine.url, requests)]
    assert [sample[1:] for sample in samples.values()] == answered
    with LogReader.open(log) as reader:
        rollouts = [reader.rollout(key) for key in samples]
    assert [[each.choice().token_ids, each.choice().logprobs] for each in rollouts] == answered
    # Each went on from all that was on disk.
    assert sorted(each.requests[-1].base for each in rollouts) == sorted(before)
