"""The pictures of the documentation, taken of a real run by headless Chromium.

    python benchmarks/screenshots.py report RUN            docs/images/report.png
    python benchmarks/screenshots.py viewer RUN            docs/images/viewer.png
    python benchmarks/screenshots.py viewer-episode RUN    docs/images/viewer-episode.png
    python benchmarks/screenshots.py timeline RUN          docs/images/demo-timeline.png, of a run with --trace true
    python benchmarks/screenshots.py console RUN           docs/images/console.png
    python benchmarks/screenshots.py all RUN               all of them

RUN is that of docs/pictures.md: make demo ARGS="--trace true --output_dir RUN". One function per page. Chromium is
found on the PATH, or named by CHROMIUM.
"""

from __future__ import annotations

import argparse
import io
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from agentenv.errors import UsageError
from agentenv.report import write_report
from agentenv.report.transcripts import visible
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


def timeline(run: Path, image: Path) -> None:
    """Who did what in six steps from the middle of the run."""
    steps = sum(1 for _ in (run / "metrics.jsonl").open(encoding="utf-8"))
    first = max(1, steps // 2)
    _agentenv("timeline", str(run), "--steps", f"{first}:{min(steps, first + 5)}", "--png", str(image))


def console(run: Path, image: Path) -> None:
    """What three commands print."""
    commands = (
        ("list",),
        ("play", "KeyDoor-v0", "--seed", "3", "--policy", "oracle"),
        ("timeline", str(run)),
    )
    shown = "\n".join(f"$ agentenv {' '.join(words)}\n{_agentenv(*words)}" for words in commands)
    style = "margin:0;padding:18px;background:#16191f;color:#dde3ea;font:13px/1.35 monospace"
    with window(1080, 1000) as page:
        page.set_content(f'<pre style="{style}">{visible(shown)}</pre>')
        page.set_viewport_size({"width": 1080, "height": int(page.locator("pre").bounding_box()["height"])})
        page.locator("pre").evaluate("block => block.parentElement.style.margin = 0")
        save(page, image)


def everything(run: Path, image: Path) -> None:
    """Each of the others."""
    for name, take in PAGES.items():
        if take is not everything:
            take(run, image.parent / FILES.get(name, f"{name}.png"))


def _agentenv(*words: str) -> str:
    command = [sys.executable, "-m", "agentenv", *words]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env={**os.environ, "COLUMNS": "110"}
    )
    if done.returncode != 0:
        raise UsageError(f"agentenv {' '.join(words)}: {done.stderr.strip()}")
    return done.stdout


PAGES: dict[str, Callable[[Path, Path], None]] = {
    "report": report,
    "viewer": viewer,
    "viewer-episode": viewer_episode,
    "timeline": timeline,
    "console": console,
    "all": everything,
}
FILES = {"timeline": "demo-timeline.png"}
"""Names of files that are not their page's."""


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
    parser.add_argument("--image", type=Path, help="where to; of all, a file in the folder of all")
    args = parser.parse_args(argv)
    image = args.image or IMAGES / FILES.get(args.page, f"{args.page}.png")
    try:
        PAGES[args.page](args.run, image)
    except UsageError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    sys.stdout.write(f"{image}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
