"""What mkdocs does beyond Markdown: pages made from the source, and links that leave docs/.

* `in-detail/NAME.md` is the README of an environment's folder.
* `reference/options.md` and `reference/commands.md` are made of the dataclasses and the parser themselves.
* A link to a file of the repository that is no page becomes the file's path, in words.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path, PurePosixPath
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

sys.path.insert(0, str(Path(__file__).parent))
import reference

_ENVIRONMENTS = PurePosixPath("envs/agentenv_envs")
_LINK = re.compile(r"(?<!!)\[([^\]]*)\]\(([^)#\s]+)(#[^)\s]*)?\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are made."""
    root = _root(config)
    for readme in sorted((root / _ENVIRONMENTS).glob("*/README.md")):
        text = readme.read_text(encoding="utf-8")
        files.append(File.generated(config, f"in-detail/{readme.parent.name}.md", content=text))
    pages = {"options": reference.options_page(root), "commands": reference.commands_page()}
    for name, text in pages.items():
        files.append(File.generated(config, f"reference/{name}.md", content=text))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Mend the links that leave docs/."""
    made = re.fullmatch(r"in-detail/(\w+)\.md", page.file.src_uri)
    folder = (
        _ENVIRONMENTS / made[1] if made else PurePosixPath("docs") / PurePosixPath(page.file.src_uri).parent
    )

    def mend(match: re.Match[str]) -> str:
        words, target, anchor = match[1], match[2], match[3] or ""
        if "://" in target:
            return match[0]
        path = PurePosixPath(os.path.normpath(folder / target))
        name = _page_of(path)
        if name is not None:
            start = PurePosixPath(page.file.src_uri).parent
            return f"[{words}]({os.path.relpath(name, start)}{anchor})"
        if (_root(config) / path).exists():
            return words if words.strip("`") == str(path) else f"{words} (`{path}`)"
        return match[0]  # mkdocs tells of it

    return _LINK.sub(mend, markdown)


def _page_of(path: PurePosixPath) -> str | None:
    """The page of a file of the repository, as mkdocs names it; None where it is none."""
    if path.is_relative_to("docs"):
        return str(path.relative_to("docs"))
    if path.is_relative_to(_ENVIRONMENTS) and path.name == "README.md":
        return f"in-detail/{path.parent.name}.md"
    return None


def _root(config: Any) -> Path:
    return Path(config.config_file_path).parent
