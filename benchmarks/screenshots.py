"""The pictures of the documentation, taken of a real run by headless Chromium.

    python benchmarks/screenshots.py report RUN        docs/images/report.png

One function per page. Chromium is found on the PATH, or named by CHROMIUM; it gets a profile of its own and no network.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from agentenv.errors import UsageError
from agentenv.report import write_report

IMAGES = Path(__file__).parents[1] / "docs" / "images"
FLAGS = (
    "--headless",
    "--no-sandbox",  # containers run as root
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
)


def report(run: Path, image: Path) -> None:
    """The top of the report: what looks bad, success before and after, the first curves."""
    screenshot(write_report(run).resolve().as_uri(), image, width=1240, height=1100)


PAGES: dict[str, Callable[[Path, Path], None]] = {"report": report}


def screenshot(url: str, image: Path, *, width: int, height: int) -> None:
    """Write what Chromium shows of a page.

    Args:
        url: of the page.
        image: PNG file, replaced.
        width: of the window, in pixels.
        height: likewise.

    Raises:
        UsageError: there is no Chromium, or it made no picture.
    """
    names = [os.environ.get("CHROMIUM", ""), "chromium", "chromium-browser", "google-chrome"]
    program = next((found for name in names if name and (found := shutil.which(name))), None)
    if program is None:
        raise UsageError("no Chromium on the PATH; name one by the environment variable CHROMIUM")
    with tempfile.TemporaryDirectory() as folder:
        taken = Path(folder) / "page.png"
        command = [program, *FLAGS, f"--user-data-dir={folder}/profile", f"--window-size={width},{height}"]
        done = subprocess.run(
            [*command, f"--screenshot={taken}", url], capture_output=True, text=True, timeout=120, check=False
        )
        if not taken.exists():
            raise UsageError(f"{program} took no picture of {url}: {done.stderr[-500:]}")
        image.parent.mkdir(parents=True, exist_ok=True)
        shutil.move(taken, image)


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("page", choices=PAGES)
    parser.add_argument("run", type=Path, help="directory of a run")
    parser.add_argument("--image", type=Path, help="where to; by default docs/images/PAGE.png")
    args = parser.parse_args(argv)
    image = args.image or IMAGES / f"{args.page}.png"
    try:
        PAGES[args.page](args.run, image)
    except UsageError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    sys.stdout.write(f"{image}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
