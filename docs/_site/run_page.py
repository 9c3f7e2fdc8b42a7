"""Run a page's shell blocks as typed, one after the other in one shell, in the folder of the checkout.

    python docs/_site/run_page.py docs/quickstart.md

A block under `<!-- until: URL -->` is a server: it is started, asked for URL, ended by an interrupt, and must then end
with exit code 0 or 130. Ends with the exit code of the first command that fails.
"""

from __future__ import annotations

import argparse
import re
import shlex
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

_BLOCK = re.compile(r"^(?:<!-- until: (\S+) -->\n)?```bash\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_WAIT_S = 60.0
_ENDED = (0, 130)


def main() -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("page", type=Path, nargs="?")
    parser.add_argument("--until", nargs=2, metavar=("URL", "COMMAND"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.until is not None:
        return serve_until(*args.until)
    return subprocess.run(
        ["bash", "-c", script(args.page.read_text(encoding="utf-8"))], check=False
    ).returncode


def script(page: str) -> str:
    """All blocks as one program."""
    lines = ["set -euo pipefail"]
    for url, text in _BLOCK.findall(page):
        for command in text.strip().split("\n"):
            line = command
            if url:
                line = shlex.join([sys.executable, str(Path(__file__).resolve()), "--until", url, command])
            lines += [
                f"printf '\\n$ %s\\n' {shlex.quote(command)} >&2",
                line,
                "printf '(%s s)\\n' $SECONDS >&2",
            ]
    return "\n".join(lines)


def serve_until(url: str, command: str) -> int:
    """Start a server, wait until it answers, interrupt it; 0 if it answered and ended well."""
    server = subprocess.Popen(shlex.split(command), start_new_session=True)
    try:
        deadline = time.monotonic() + _WAIT_S
        while not _answers(url):
            if server.poll() is not None or time.monotonic() > deadline:
                sys.stderr.write(f"nothing answers at {url}\n")
                return 1
            time.sleep(0.2)
        server.send_signal(signal.SIGINT)
        code = server.wait(_WAIT_S)
        if code not in _ENDED:
            sys.stderr.write(f"{command}: ended with {code} after an interrupt\n")
            return 1
        return 0
    finally:
        if server.poll() is None:
            server.kill()
            server.wait()


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5):
            return True
    except (urllib.error.URLError, OSError):
        return False


if __name__ == "__main__":
    sys.exit(main())
