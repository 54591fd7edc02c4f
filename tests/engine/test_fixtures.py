"""The shipped fixtures are what the engine still does: recorded again, they fold to the same samples."""

from __future__ import annotations

import pytest

from engine.compared import assert_same_samples
from fixtures.record import record
from fixtures.scenes import SCENES

pytestmark = pytest.mark.engine


@pytest.mark.parametrize("name", SCENES)
async def test_recording_it_again_gives_the_shipped_samples(name, engine, tmp_path):
    assert_same_samples(await record(name, engine, tmp_path))
