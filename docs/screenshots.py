"""Make the pictures of the report in docs/images: `python docs/screenshots.py [LOG]`.

Takes a browser (`tests/browser.py`). LOG is one that `make demo` left; without it the demo is recorded anew.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import sys
import tempfile
from pathlib import Path

from selenium.webdriver import Chrome, Keys
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import WebDriverWait

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "examples")]

import demo  # noqa: E402 - found by the line above

from browser import browser  # noqa: E402 - the same
from rollout_log.cli import main as command  # noqa: E402 - the same

KEY = "t14"
"""An error, a retry, a cut and a resumption."""


def open_report(driver: Chrome, page: Path, key: str | None = None) -> None:
    """Open a report, and in it a sample."""
    driver.get(page.as_uri())
    wait = WebDriverWait(driver, 20)
    wait.until(lambda found: found.find_element(By.ID, "count").text)
    if key is not None:
        search = driver.find_element(By.ID, "search")
        search.send_keys(key, Keys.ENTER)
        driver.find_element(By.ID, "lanes").send_keys(Keys.ENTER)
        wait.until(lambda found: found.find_element(By.ID, "sample-name").text == key)
        driver.execute_script(
            "arguments[0].value = ''; arguments[0].dispatchEvent(new Event('input'));", search
        )
    driver.execute_async_script("requestAnimationFrame(() => requestAnimationFrame(arguments[0]))")


def main(page: Path, key: str, into: Path) -> None:
    """Take the four pictures."""
    into.mkdir(parents=True, exist_ok=True)
    for name, width, height, dark, sample in (
        ("overview", 1280, 1130, False, None),
        ("sample", 1440, 1100, False, key),
        ("dark", 1440, 1100, True, key),
        ("phone", 375, 812, False, None),
    ):
        with browser(width, height, dark=dark) as driver:
            open_report(driver, page, sample)
            driver.save_screenshot(str(into / f"report-{name}.png"))


def run() -> None:
    """Write the report of the demo's first step, and take its pictures."""
    with tempfile.TemporaryDirectory() as directory, contextlib.redirect_stdout(io.StringIO()):
        log, page = Path(directory, "log"), Path(directory, "report.html")
        if sys.argv[1:]:
            log = Path(sys.argv[1])
        else:
            asyncio.run(demo.main(log))
        with contextlib.suppress(SystemExit):
            command(["report", str(log), "--step", "0", "-o", str(page)])
        main(page, KEY, ROOT / "docs" / "images")


if __name__ == "__main__":
    run()
