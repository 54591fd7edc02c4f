"""The trainer's loop with the plug-in in it, against the server: the samples of the recorded run, again."""

from __future__ import annotations

import asyncio
import functools
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import httpx
import pytest

from rollout_log.replay import serve_replay
from rollout_log.replay.faults import Faults
from rollout_log.trainer.session import close_session
from trainer.engine_double import EngineDouble
from trainer.faults import Fault, FaultPlan
from trainer.rollout_double import flat
from trainer.sample_double import Sample
from trainer.trainer_double import LAYOUTS, NEW_VIME, OLD_VIME, SLIME, Layout, TrainerDouble
from trainer.truth import ends_at, prompt_text

VERSIONS = ["0", "1", "2", "3", "4"]
Run = Callable[[TrainerDouble, Callable[[str], None]], list[Sample]]
NewLog = Callable[[], Path]

HELD = [
    prompt_text(0, tokens=30),
    prompt_text(1, tokens=25),
    prompt_text(2, hold=20),
    prompt_text(3, tokens=50, hold=31),
    prompt_text(4, tokens=1),
    prompt_text(5),
    prompt_text(6, tokens=60, hold=2),
    prompt_text(7, hold=47),
]
ENDS = [prompt_text(number, tokens=9 + 4 * number) for number in range(6)]
GOES_ON = [prompt_text(number) for number in range(4)]
FREE = [*ENDS[:2], *GOES_ON, *ENDS[2:]]


def three_cuts(seed: int) -> FaultPlan:
    """Stop the samples that end at their limit somewhere in each of their first three requests."""
    chance = random.Random(seed)
    stalls = [Fault("stall", after=chance.randrange(1, 8)) for _ in range(6)]

    def plan(prompt: Sequence[int], attempt: int) -> Fault:
        return stalls[attempt] if ends_at(prompt) is None and attempt < len(stalls) else Fault()

    return plan


DELAYS: dict[str, dict[str, Any]] = {
    "at once": {},
    "late": {"late": True},
    "as recorded": {"pace": "recorded"},
    "split": {"faults": Faults(split=True, seed=1), "late": True},
    "coalesced": {"faults": Faults(coalesce=4), "pace": 0.5},
    "byte by byte": {"faults": Faults(slow=1e-6, rate=0.1), "late": True},
}


def held_steps(trainer: TrainerDouble, set_version: Callable[[str], None]) -> list[Sample]:
    """Every other step is aborted where four samples wait for that, and the next goes on; an evaluation."""
    samples: list[Sample] = []
    holding = 0
    trainer.abort_when = lambda: trainer.holding == holding
    for step in range(4):
        holding, trainer.args.over_sampling_batch_size = (4, 4) if step % 2 == 0 else (0, 2)
        samples += trainer.step(step)
        assert len(trainer.data_source.buffer) == holding / 2
        set_version(VERSIONS[step + 1])
    answers = trainer.evaluate(4, {"easy": [prompt_text(8, tokens=12)], "hard": [prompt_text(9)]}, repeats=2)
    return samples + [sample for each in answers.values() for sample in each["samples"]]


def free_steps(trainer: TrainerDouble, set_version: Callable[[str], None]) -> list[Sample]:
    """Two groups of six end, then the step is aborted, wherever the others are. The last one is not."""
    samples: list[Sample] = []
    before: dict[int, int] = {}

    def all_go_on() -> bool:
        return all(each.response_length > before.get(id(each), 0) for each in trainer.watch.samples)

    trainer.abort_when = all_go_on
    trainer.args.over_sampling_batch_size = 6
    for step in range(3):
        before.update((id(each), each.response_length) for each in flat(trainer.data_source.buffer))
        samples += trainer.step(step)
        assert len(trainer.data_source.buffer) == 4
        set_version(VERSIONS[step + 1])
    trainer.args.rollout_batch_size = trainer.args.over_sampling_batch_size = 4
    return samples + trainer.step(3)


def trainer_for(
    url: str, layout: Layout, questions: list[str], late: random.Random | None = None, **more: Any
) -> TrainerDouble:
    """A trainer with the plug-in; with `late`, each call begins and ends at another moment."""
    generate = import_module(f"rollout_log.{layout.root}").generate

    @functools.wraps(generate)  # `abort_mode` comes along
    async def delayed(args: Any, sample: Any, sampling_params: Any, evaluation: bool = False) -> Any:
        assert late is not None
        await asyncio.sleep(late.random() / 50)
        sample = await generate(args, sample, sampling_params, evaluation=evaluation)
        await asyncio.sleep(late.random() / 50)
        return sample

    return TrainerDouble(
        url, layout, generate=generate if late is None else delayed, questions=questions, **more
    )


def record(run: Run, layout: Layout, questions: list[str], **engine: Any) -> list[Sample]:
    with (
        EngineDouble(budget=64, **engine) as double,
        trainer_for(double.url, layout, questions, engine=double) as trainer,
    ):
        samples = run(trainer, double.set_version)
        assert trainer.problems == []
    close_session()
    return samples


async def replay(
    log: Path, run: Run, layout: Layout, questions: list[str], *, late: bool = False, **server: Any
) -> list[Sample]:
    """Run the loop again, with the recording in the engine's place."""
    async with serve_replay(log, **server) as served:
        chance = random.Random(repr(server)) if late else None
        trainer = trainer_for(served.url, layout, questions, chance, versions=VERSIONS)
        with trainer, httpx.Client(base_url=served.url) as client:

            def set_version(version: str) -> None:
                client.post("/update_weight_version", json={"new_version": version}).raise_for_status()

            samples = await asyncio.to_thread(run, trainer, set_version)
            assert trainer.problems == []
    close_session()
    assert served.report() == ([], [], []), "all that is recorded was asked for, and nothing else"
    return samples


@pytest.fixture
def new_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[NewLog]:
    """Have the plug-in record somewhere else from now on."""
    monkeypatch.setenv("ROLLOUT_LOG_WINDOW_MS", "20")
    logs = (tmp_path / f"log-{number}" for number in range(100))

    def new() -> Path:
        close_session()
        log = next(logs)
        monkeypatch.setenv("ROLLOUT_LOG_DIR", str(log))
        return log

    yield new
    close_session()


def everything(samples: list[Sample]) -> Counter[Any]:
    return Counter(
        (each.prompt, tuple(each.tokens), tuple(each.rollout_log_probs or ()), each.status)
        for each in samples
    )


def tokens(samples: list[Sample]) -> Counter[Any]:
    return Counter((each.prompt, tuple(each.tokens), each.status) for each in samples)


@pytest.mark.parametrize(
    ("layout", "versions"),
    [(NEW_VIME, "spans"), (OLD_VIME, "spans"), (SLIME, "field")],
    ids=lambda value: getattr(value, "name", value),
)
async def test_aborts_fall_where_they_fell(layout: Layout, versions: str, new_log: NewLog) -> None:
    log = new_log()
    samples = await asyncio.to_thread(record, held_steps, layout, HELD, versions=versions)
    assert sum(len(set(sample.weight_versions)) > 1 for sample in samples) == 8, "resumed on new weights"
    for delays in ("at once", "split"):
        again = new_log()
        played = await replay(log, held_steps, layout, HELD, **DELAYS[delays])
        assert everything(played) == everything(samples), delays
        log = again  # what the plug-in recorded of the replay is as good


@pytest.mark.parametrize(
    ("layout", "first", "second"),
    [
        (NEW_VIME, "late", "as recorded"),
        (OLD_VIME, "at once", "byte by byte"),
        (SLIME, "split", "coalesced"),
    ],
    ids=lambda value: getattr(value, "name", value),
)
async def test_the_samples_are_the_same_wherever_aborts_fall(
    layout: Layout, first: str, second: str, new_log: NewLog
) -> None:
    await replay_free_steps(layout, 0, [first, second], new_log)


@pytest.mark.campaign
@pytest.mark.parametrize("seed", range(1, 10))
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
async def test_the_same_with_every_delay(layout: Layout, seed: int, new_log: NewLog) -> None:
    await replay_free_steps(layout, seed, list(DELAYS), new_log)


async def replay_free_steps(layout: Layout, seed: int, delays: list[str], new_log: NewLog) -> None:
    log = new_log()
    engine = {"versions": "field", "plan": three_cuts(seed)}
    recorded = tokens(await asyncio.to_thread(record, free_steps, layout, FREE, **engine))
    assert recorded.total() == 20
    for each in delays:
        new_log()
        assert tokens(await replay(log, free_steps, layout, FREE, **DELAYS[each])) == recorded, each
