"""A Chromium without a window and an application for it to look at: for tests, and for pictures in the documentation.

Chromium is found on the PATH, or named by the environment variable CHROMIUM.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from agentenv.errors import MissingExtraError, UsageError

__all__ = ["chromium", "chromium_path", "served"]

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
    names = (os.environ.get("CHROMIUM", ""), "chromium", "chromium-browser", "google-chrome")
    return next((path for name in names if name and (path := shutil.which(name))), None)


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
        raise UsageError(
            "no Chromium is installed (on Debian: apt-get install chromium), nor named by CHROMIUM"
        )
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=list(_ARGUMENTS))
        try:
            yield browser
        finally:
            browser.close()


@contextmanager
def served(app: Any) -> Iterator[str]:
    """An ASGI application, served by a thread; gives its address."""
    from agentenv.listening import listen
    from agentenv.rollout.loop_thread import LoopThread
    from agentenv.serving import AppServer

    server = AppServer(app, listen("127.0.0.1", 0))
    thread = LoopThread("agentenv-served")
    try:
        thread.call(server.start())
        yield server.url
        thread.call(server.stop())
    finally:
        thread.stop()
