"""A Chromium without a window and an application for it to look at: for tests, and for pictures in the documentation.

Chromium is found on the PATH, or named by the environment variable CHROMIUM.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from agentenv.errors import UsageError

__all__ = ["chromium", "missing_browser", "served"]

_ARGUMENTS = (
    "--no-sandbox",  # which root is refused
    "--disable-dev-shm-usage",  # which is small in containers
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


def missing_browser() -> str:
    """What :func:`chromium` lacks here, in a sentence; empty: nothing."""
    if importlib.util.find_spec("playwright") is None:
        return "playwright is not installed (it is in the extra dev)"
    return "" if _chromium_path() else "no Chromium is installed (on Debian: apt-get install chromium)"


def _chromium_path() -> str | None:
    names = (os.environ.get("CHROMIUM", ""), "chromium", "chromium-browser", "google-chrome")
    return next((path for name in names if name and (path := shutil.which(name))), None)


@contextmanager
def chromium() -> Iterator[Any]:
    """A browser, as playwright's `Browser`.

    Raises:
        UsageError: playwright or Chromium is missing.
    """
    if lacking := missing_browser():
        raise UsageError(lacking)
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=_chromium_path(), args=list(_ARGUMENTS))
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
