"""The shipped fixtures are what the engine still does: recorded again, they fold to the same samples."""

from __future__ import annotations

import pytest

from engine.compared import assert_same_samples
from fixtures.record import record
from fixtures.scenes import SCENES

pytestmark = pytest.mark.engine


# Where in the stream the weights change depends on how fast the engine is.
_SCENES = [pytest.param(name, marks=[pytest.mark.campaign] * (name == "weight-change")) for name in SCENES]


@pytest.mark.parametrize("name", _SCENES)
async def test_recording_it_again_gives_the_shipped_samples(name, engine, tmp_path):
    assert_same_samples(await record(name, engine, tmp_path))
