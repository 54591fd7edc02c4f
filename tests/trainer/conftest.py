from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from trainer.engine_double import EngineDouble
from trainer.trainer_double import NEW_VIME, Layout, TrainerDouble

Rig = Callable[..., tuple[EngineDouble, TrainerDouble]]


@pytest.fixture
def rig() -> Iterator[Rig]:
    """`engine, trainer = rig(layout, engine={…}, generate=…, questions=[…], …)`, ended with the test."""
    with contextlib.ExitStack() as stack:

        def build(
            layout: Layout = NEW_VIME,
            *,
            engine: dict[str, Any] | None = None,
            max_tokens: int = 64,
            **settings: Any,
        ) -> tuple[EngineDouble, TrainerDouble]:
            double = stack.enter_context(EngineDouble(budget=max_tokens, **(engine or {})))
            trainer = TrainerDouble(double.url, layout, engine=double, max_tokens=max_tokens, **settings)
            return double, stack.enter_context(trainer)

        yield build
