"""A browser for the tests of the report's page, and what is said where there is none.

Chromium or Chrome on the path is used, or else the one that `playwright install chromium` has put beside playwright;
`make browser`, which `make test` runs before, installs one where it can. Without a browser the tests of the page are
skipped on a person's machine, with one red line at the end. In CI (CI=true) they fail, because there nobody would read
it, unless OPTPIPE_NO_BROWSER=1 says that the machine can have none.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

    from playwright.sync_api import Browser, Playwright

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
HOW = (
    "The report's page was NOT tested, there is no browser: run make browser, "
    "or apt-get install chromium, or PLAYWRIGHT_BROWSERS_PATH=0 playwright install chromium"
)


def path_of(playwright: Playwright) -> str | None:
    """Return the browser to start, None where there is none."""
    own = playwright.chromium.executable_path
    return next(filter(None, map(shutil.which, NAMES)), own if Path(own).exists() else None)


def missing() -> None:
    """End a test that needs a browser: skipped, in CI failed where there could be one."""
    if os.environ.get("CI") == "true" and os.environ.get("OPTPIPE_NO_BROWSER") != "1":
        pytest.fail(HOW, pytrace=False)
    pytest.skip(HOW)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """One headless browser for the tests of a module."""
    os.environ.setdefault("PLAYWRIGHT_BROWSERS_PATH", "0")  # beside playwright, where `make browser` puts it
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        missing()
    with sync_playwright() as playwright:
        path = path_of(playwright)
        if path is None:
            missing()
        # as root a browser starts only without its sandbox; the pages are our own
        made = playwright.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-gpu"])
        yield made
        made.close()
