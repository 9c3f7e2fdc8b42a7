"""The code blocks of the documentation, and what a comment above one says about running it.

    <!-- example: NAME -->          a file of that name, for the commands of its page
    <!-- checked by: tests/... -->  a test of its own runs it
    <!-- run with: OLD -> NEW -->   run with one thing changed, so that it takes seconds
    <!-- not run: REASON -->        needs what CI has not; its imports and options are checked all the same

A block without one is run as it stands: Python as a program, a console's command against the output below it. The
commands of a shell are parsed by the programs' own parsers; the pages of `run_page.py` are run as typed.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_BLOCK = re.compile(
    r"(?:<!-- (?P<mark>example|checked by|run with|not run): (?P<value>.*?) -->\n+)?"
    r"^```(?P<language>\w+)\n(?P<text>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True)
class Block:
    """One code block."""

    page: str
    """Path in the repository."""
    line: int
    language: str
    text: str
    mark: str
    """What the comment above it is: "" without one."""
    value: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def commands(self) -> list[list[str]]:
        """The words of each command of a shell block, without for, do and done; a variable reads 0."""
        found: list[list[str]] = []
        pending = ""
        for line in self.text.splitlines():
            pending += line
            if pending.endswith("\\"):
                pending = pending[:-1]
                continue
            try:
                words = shlex.split(pending, comments=True)
            except ValueError:  # a quotation that goes on
                pending += "\n"
                continue
            pending = ""
            found += _commands([re.sub(r"^\$\w+$", "0", word) for word in words])
        return found


def _commands(words: list[str]) -> Iterator[list[str]]:
    command: list[str] = []
    for word in [*words, ";"]:
        ends = word in ("&&", "&", "|", "do", "done") or word.endswith(";")
        if not ends:
            command.append(word)
        else:
            command += [word[:-1]] if len(word) > 1 and word.endswith(";") else []
            if command and command[0] != "for":
                yield command
            command = []


def blocks(repository: Path, *languages: str) -> list[Block]:
    """Those of all pages in these languages."""
    return [
        block
        for path in pages(repository)
        for block in blocks_of(repository, path)
        if block.language in languages
    ]


def pages(repository: Path) -> list[Path]:
    """README, docs, and the READMEs of recipes and environments."""
    return [
        repository / "README.md",
        repository / "recipes" / "README.md",
        *sorted((repository / "docs").glob("*.md")),
        *sorted((repository / "envs" / "agentenv_envs").glob("*/README.md")),
    ]


def blocks_of(repository: Path, page: Path) -> Iterator[Block]:
    """Those of one page, in order."""
    text = page.read_text(encoding="utf-8")
    for match in _BLOCK.finditer(text):
        yield Block(
            str(page.relative_to(repository)),
            text.count("\n", 0, match.start("language")) + 1,
            match["language"],
            match["text"],
            match["mark"] or "",
            match["value"] or "",
        )
