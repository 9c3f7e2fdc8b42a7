"""A Chromium without a window, driven by playwright, for tests and for pictures in the documentation."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from agentenv.errors import MissingExtraError, UsageError

__all__ = ["chromium", "chromium_path"]

_ARGUMENTS = (
    "--no-sandbox",  # which root is refused
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


def chromium_path() -> str | None:
    """The browser that is installed; None: there is none."""
    names = ("chromium", "chromium-browser", "google-chrome")
    return next((path for name in names if (path := shutil.which(name))), None)


@contextmanager
def chromium() -> Iterator[Any]:
    """A browser, as playwright's `Browser`.

    Raises:
        MissingExtraError: playwright is not installed.
        UsageError: there is no Chromium.
    """
    try:
        from playwright.sync_api import sync_playwright
    except ImportError as error:
        raise MissingExtraError(str(error.name), "dev") from error
    path = chromium_path()
    if path is None:
        raise UsageError("no Chromium is installed; on Debian: apt-get install chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=list(_ARGUMENTS))
        try:
            yield browser
        finally:
            browser.close()
