"""A headless Chromium with a new profile, by Debian's packages `chromium` and `chromium-driver`."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from selenium.webdriver import Chrome

__all__ = ["browser", "missing", "resize"]

FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)


def missing() -> str | None:
    """Return what a browser lacks here, None where there is one."""
    for program in ("chromium", "chromedriver"):
        if shutil.which(program) is None:
            return f"there is no {program}: apt-get install chromium chromium-driver"
    try:
        import selenium  # noqa: F401
    except ImportError:
        return "there is no selenium: pip install --group test"
    return None


@contextlib.contextmanager
def browser(width: int = 1280, height: int = 900, *, dark: bool = False) -> Iterator[Chrome]:
    """Start one with a window of this size; `driver.get_log("browser")` has its console."""
    from selenium.webdriver import Chrome, ChromeOptions, ChromeService

    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        options = ChromeOptions()
        options.binary_location = str(shutil.which("chromium"))
        for flag in (*FLAGS, f"--user-data-dir={profile}"):
            options.add_argument(flag)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        driver = Chrome(options, ChromeService(shutil.which("chromedriver")))
        try:
            resize(driver, width, height)
            features = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
            driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
            yield driver
        finally:
            driver.quit()


def resize(driver: Chrome, width: int, height: int) -> None:
    """Give the window's content this size; a narrow one is a phone's."""
    size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
