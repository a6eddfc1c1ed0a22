"""A headless Chromium for tests: Debian's, installed where it is missing and this user may."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from selenium import webdriver
from selenium.common.exceptions import WebDriverException
from selenium.webdriver.chrome.service import Service

PACKAGES = ("chromium", "chromium-driver")
SECONDS_TO_INSTALL = 300
SECONDS_TO_LOAD = 60


def require_chromium() -> tuple[str, str]:
    """The paths of Chromium and its driver; skips the test, and says why, where they cannot be had."""
    if not _found():
        _install()
    found = _found()
    if not found:
        pytest.skip(f"{' and '.join(PACKAGES)} are not installed, and apt-get does not have them")
    return found


def _found() -> tuple[str, str] | None:
    browser, driver = shutil.which("chromium"), shutil.which("chromedriver")
    return (browser, driver) if browser and driver else None


def _install() -> None:
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        pytest.skip(f"{' and '.join(PACKAGES)} are not installed, and only root with apt-get could do that")
    for command in (
        ("apt-get", "update", "--quiet"),
        ("apt-get", "install", "--quiet", "--yes", "--no-install-recommends", *PACKAGES),
    ):
        try:
            subprocess.run(
                command,
                env={**os.environ, "DEBIAN_FRONTEND": "noninteractive"},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                timeout=SECONDS_TO_INSTALL,
                check=True,
            )
        except (subprocess.SubprocessError, OSError) as fault:
            pytest.skip(f"Chromium cannot be installed: {fault}")


@contextmanager
def chromium(width: int = 1440, height: int = 900) -> Iterator[webdriver.Chrome]:
    """A browser that finds no host, keeps what the console says, and ends whatever happens."""
    browser, driver = require_chromium()
    options = webdriver.ChromeOptions()
    options.binary_location = browser
    for argument in (
        "--headless=new",
        "--no-sandbox",  # which root cannot use
        "--disable-dev-shm-usage",
        f"--window-size={width},{height}",
        "--host-resolver-rules=MAP * ~NOTFOUND",
    ):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    try:
        window = webdriver.Chrome(options=options, service=Service(driver))
    except WebDriverException as fault:
        pytest.skip(f"Chromium does not start here: {fault.msg}")
    window.set_page_load_timeout(SECONDS_TO_LOAD)
    window.set_script_timeout(SECONDS_TO_LOAD)
    try:
        yield window
    finally:
        window.quit()


def console_errors(window: webdriver.Chrome) -> list[str]:
    """What the console has said since the last call, from errors upwards."""
    return [entry["message"] for entry in window.get_log("browser") if entry["level"] == "SEVERE"]


def requested(window: webdriver.Chrome) -> set[str]:
    """The addresses that pages asked for since the last call; of data in a page its kind alone."""
    messages = [json.loads(entry["message"])["message"] for entry in window.get_log("performance")]
    addresses = [
        message["params"]["request"]["url"]
        for message in messages
        if message["method"] == "Network.requestWillBeSent"
    ]
    return {"data:" if address.startswith("data:") else address for address in addresses}
