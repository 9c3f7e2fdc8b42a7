"""The pictures of the documentation, taken of a real run by headless Chromium.

    python benchmarks/screenshots.py report RUN            docs/images/report.png
    python benchmarks/screenshots.py viewer RUN            docs/images/viewer.png
    python benchmarks/screenshots.py viewer-episode RUN    docs/images/viewer-episode.png

One function per page. Chromium is found on the PATH, or named by CHROMIUM.
"""

from __future__ import annotations

import argparse
import io
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from agentenv.errors import UsageError
from agentenv.report import write_report
from agentenv.testing.browser import chromium, served
from agentenv.viewer.app import create_app

IMAGES = Path(__file__).parents[1] / "docs" / "images"
COLOURS = 256
"""Of a picture: a page has few, and the file is a third as large."""


def report(run: Path, image: Path) -> None:
    """The top of the report: what looks bad, success before and after, the first curves."""
    with window(1240, 1100) as page:
        page.goto(write_report(run).resolve().as_uri())
        save(page, image)


def viewer(run: Path, image: Path) -> None:
    """The list of episodes under the curves."""
    with served(create_app(run)) as url, window(1240, 900) as page:
        page.goto(url)
        page.wait_for_selector("table.list tbody tr")
        page.wait_for_load_state("networkidle")
        save(page, image)


def viewer_episode(run: Path, image: Path) -> None:
    """An episode of training that was solved and has a diff and tokens, from its diff on."""
    with served(create_app(run)) as url, window(1240, 1000) as page:
        page.goto(f"{url}/#/?phase=train&outcome=solved")
        page.click("table.list tbody tr td:last-child a")
        page.click("text=Show tokens")
        page.locator("h3:text-is('Diff')").evaluate("heading => heading.scrollIntoView()")
        page.hover(".stream .assistant .token >> nth=2")
        save(page, image)


PAGES: dict[str, Callable[[Path, Path], None]] = {
    "report": report,
    "viewer": viewer,
    "viewer-episode": viewer_episode,
}


@contextmanager
def window(width: int, height: int) -> Iterator[Any]:
    """A page of a browser, of so many pixels.

    Raises:
        UsageError: there is no browser, or the page lacks what the picture is to show.
    """
    with chromium() as browser:
        from playwright.sync_api import Error

        try:
            yield browser.new_page(viewport={"width": width, "height": height})
        except Error as error:
            raise UsageError(f"the page lacks what the picture is to show: {error}") from None


def save(page: Any, image: Path) -> None:
    """Write what the window shows as a PNG file."""
    from PIL import Image

    shot = Image.open(io.BytesIO(page.screenshot()))
    image.parent.mkdir(parents=True, exist_ok=True)
    few = shot.convert("RGB").quantize(COLOURS, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
    few.save(image, optimize=True)


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
