"""What the pytest plugin consists of; usable from any other test runner.

    with StandIn(Recordings(Path("tests/fixtures/test_rollout.jsonl"), "test_reward")) as engine:
        ... engine.url ...

`recordings` is the file of a test module, `stand_in` the engine's place in one test, `network` keeps a test
from the network, `vime` points vime at it.
"""

from rollout_log.replay.through import PlainSample
from rollout_log.testing.recordings import Recordings
from rollout_log.testing.stand_in import Mode, StandIn

__all__ = ["Mode", "PlainSample", "Recordings", "StandIn"]
