"""What every test may rely on."""

from __future__ import annotations

import contextlib
import logging
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# Machines differ in speed, laws do not: an example may take as long as it takes.
settings.register_profile("suite", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("suite")

# A shell that runs the tests in the background has them ignore SIGINT, and the processes that tests start and
# interrupt would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    with contextlib.suppress(ValueError):  # not in the main thread
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def root() -> Path:
    """The directory of pyproject.toml."""
    return Path(__file__).resolve().parent.parent


@pytest.fixture(autouse=True)
def _logger_as_it_was() -> Iterator[None]:
    """A command that ran in this process may have set the package's logger up for its own output."""
    logger = logging.getLogger("rollout_log")
    level, handlers, propagate = logger.level, logger.handlers[:], logger.propagate
    yield
    logger.setLevel(level)
    logger.handlers[:], logger.propagate = handlers, propagate
