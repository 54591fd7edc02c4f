"""Make the pictures of the report in docs/images: `python docs/screenshots.py`.

Takes Chromium and its driver (Debian's `chromium` and `chromium-driver`) and selenium. The step is the
demo's first, recorded anew, so the pictures differ a little each time.
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

from browser import browser  # noqa: E402 - found by the line above


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
        ("overview", 1280, 900, False, None),
        ("sample", 1440, 1100, False, key),
        ("dark", 1440, 1100, True, key),
        ("phone", 375, 812, False, None),
        ("phone-sample", 375, 812, False, key),
    ):
        with browser(width, height, dark=dark) as driver:
            open_report(driver, page, sample)
            driver.save_screenshot(str(into / f"report-{name}.png"))


if __name__ == "__main__":
    import demo

    from rollout_log.cli import main as command

    with tempfile.TemporaryDirectory() as directory, contextlib.redirect_stdout(io.StringIO()):
        log, page = Path(directory, "log"), Path(directory, "report.html")
        resumed = asyncio.run(demo.main(log))
        with contextlib.suppress(SystemExit):
            command(["report", str(log), "--step", "0", "-o", str(page)])
        main(page, resumed, ROOT / "docs" / "images")
