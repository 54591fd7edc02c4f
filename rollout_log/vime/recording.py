"""Any generate function, recorded, by its path and without a change to its code.

--custom-generate-function-path rollout_log.vime.recording.my_package.my_module.my_generate

is `my_package.my_module.my_generate` under the decorator `rollout_log.vime.recorded`.
"""

from __future__ import annotations

from rollout_log.trainer.paths import offer
from rollout_log.trainer.recorded import recorded_by
from rollout_log.vime.request import VIME

__all__: list[str] = []
__path__: list[str] = []  # what comes below is made as it is asked for

offer(__name__, recorded_by(VIME))
