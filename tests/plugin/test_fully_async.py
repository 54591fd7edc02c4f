"""A second event loop: a worker's thread generates across steps, after the trainer's own loop did."""

from __future__ import annotations

from pathlib import Path

import pytest

from plugin.test_loop import check_log, function, quick
from plugin.test_resume import until
from rollout_log.trainer.session import session_for
from trainer.checks import verify
from trainer.conftest import Rig
from trainer.faults import EVERY_FAULT, Seeded
from trainer.sample_double import Sample, Status
from trainer.trainer_double import NEW_VIME, SLIME, Layout
from trainer.truth import prompt_text
from trainer.worker_double import Worker

HELD = 5
QUESTIONS = [prompt_text(n, tokens=12 + 9 * n % 40) for n in range(40)]
HOLDING = [*QUESTIONS[:HELD], prompt_text(HELD, hold=20), *QUESTIONS[HELD + 1 :]]


@pytest.mark.parametrize("layout", [NEW_VIME, SLIME], ids=lambda layout: layout.name)
@pytest.mark.parametrize("faulty", [False, True], ids=["clean", "faults"])
def test_a_worker_with_its_own_loop_generates_across_steps_and_aborts(
    rig: Rig, log: Path, layout: Layout, faulty: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    quick(monkeypatch)
    faults = [fault for name, fault in EVERY_FAULT.items() if name not in ("error 400", "crash")]
    engine, trainer = rig(
        layout,
        engine={"versions": "field", **({"plan": Seeded(3, faults)} if faulty else {})},
        generate=function(layout),
        questions=QUESTIONS if faulty else HOLDING,
        groups=3,
    )
    first = trainer.step(0)  # on the trainer's own loop
    assert trainer.problems == []
    session = session_for(trainer.args)
    trainer.run(trainer.http._http_client.aclose())
    trainer.http._http_client = None
    samples: list[Sample] = []
    with Worker(trainer) as worker:
        for step in range(1, 13):
            samples += worker.step(step)
            if step == 1 and not faulty:
                until(lambda: trainer.holding == 2)
            engine.abort_all()
            engine.set_version(str(step))
            # The worker is some steps ahead by the time that what is held goes on.
            if step >= 6 and (faulty or any(sample.group_index == HELD for sample in samples)):
                break
    trainer.http.init_http_client(trainer.args)
    assert session_for(trainer.args) is session
    assert trainer.watch.problems == []
    assert engine.violations == []
    assert len(samples) == step * 3 * 2
    assert {sample.status for sample in samples} <= {Status.COMPLETED, Status.TRUNCATED}
    for sample in samples:
        assert verify(sample, budget=64, versions=engine.all_versions, engine=engine) == []
    if not faulty:
        assert worker.requeued
        held = [sample for sample in samples if sample.group_index == HELD]
        assert len(held) == 2
        assert all(len(sample.weight_versions) > 1 and sample.response_length > 20 for sample in held)
    check_log(log, [*first, *samples])
