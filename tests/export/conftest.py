"""Where there is no browser, its tests are skipped, loudly."""

from __future__ import annotations

import pytest

from browser import missing

_WHY = pytest.StashKey[str]()


@pytest.fixture(scope="session")
def needs_browser(request) -> None:
    """Skips where there is no browser."""
    if why := missing():
        request.config.stash[_WHY] = why
        pytest.skip(why)


def pytest_terminal_summary(terminalreporter, config):
    """Nobody shall take an unopened page for a tested one."""
    if why := missing():
        terminalreporter.write_line(f"!!! NO REPORT WAS OPENED IN A BROWSER !!! {why}", red=True, bold=True)
