"""Any rollout function, with groups given back after a crash, by its path and without a change to its code.

--rollout-function-path rollout_log.slime.resuming.my_package.my_module.my_rollout

calls `my_package.my_module.my_rollout`; before its first training step, groups that a crash left go back to
the data source, where the setting `rollout_log_resume` is `continue`.
"""

from __future__ import annotations

from rollout_log.slime.request import SLIME
from rollout_log.trainer.paths import offer
from rollout_log.trainer.resuming import resumed_by

__all__: list[str] = []
__path__: list[str] = []  # what comes below is made as it is asked for

offer(__name__, resumed_by(SLIME))
