"""What every test may rely on."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# Machines differ in speed, laws do not: an example may take as long as it takes.
settings.register_profile("suite", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("suite")


@pytest.fixture(scope="session")
def root() -> Path:
    """The directory of pyproject.toml."""
    return Path(__file__).resolve().parent.parent
