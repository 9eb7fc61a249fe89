"""Headless Chromium for tests and screenshots: a browser that never asks the network, and why there is none."""

from __future__ import annotations

import importlib.util
import json
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

SWITCHES = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-extensions",
    "--disable-dev-shm-usage",
    "--disable-default-apps",
    "--hide-scrollbars",
    "--force-device-scale-factor=1",
    "--window-size=1440,1000",
)


def found() -> tuple[str | None, str | None]:
    """The paths of Chromium and of its driver."""
    names = ("chromium", "chromium-browser", "google-chrome")
    return next((path for name in names if (path := shutil.which(name))), None), shutil.which("chromedriver")


def missing() -> str:
    """Why this machine cannot look at pages; empty if it can."""
    browser, driver = found()
    if importlib.util.find_spec("selenium") is None:
        return "needs selenium: pip install 'mil-ane-passes[test]'"
    if browser is None:
        return "needs Chromium: apt-get install chromium"
    return "" if driver else "needs chromedriver: apt-get install chromium-driver"


@contextmanager
def browser() -> Iterator[Any]:
    """A driver with a profile of its own, which is gone afterwards; console and network are logged."""
    from selenium.webdriver import Chrome, ChromeOptions
    from selenium.webdriver.chrome.service import Service

    binary, driver_path = found()
    with tempfile.TemporaryDirectory() as profile:
        options = ChromeOptions()
        options.binary_location = binary
        for switch in (*SWITCHES, f"--user-data-dir={profile}"):
            options.add_argument(switch)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
        driver = Chrome(options=options, service=Service(driver_path))
        driver.set_page_load_timeout(60)  # what hangs fails
        driver.set_script_timeout(30)
        try:
            yield driver
        finally:
            driver.quit()


def open_page(driver: Any, text: str, folder: Path, name: str = "page") -> None:
    """Writes the page into `folder`, opens it as a file, and waits for its scripts."""
    from selenium.webdriver.support.ui import WebDriverWait

    path = folder / f"{name}.html"
    path.write_text(text, encoding="utf-8")
    driver.get_log("browser"), driver.get_log("performance")
    driver.get(path.as_uri())
    WebDriverWait(driver, 20).until(
        lambda one: one.execute_script("return document.documentElement.dataset.ready") == "yes"
    )


def complaints(driver: Any) -> list[str]:
    """What the console says that is worse than information."""
    return [entry["message"] for entry in driver.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")]


def requests(driver: Any) -> list[str]:
    """The addresses that were asked for since the page was opened, but for files, data and the browser itself."""
    events = (json.loads(entry["message"])["message"] for entry in driver.get_log("performance"))
    asked = (event["params"]["request"]["url"] for event in events if event["method"] == "Network.requestWillBeSent")
    return [url for url in asked if not url.startswith(("file:", "data:", "about:", "chrome:"))]
