"""The examples of docs/interop.md, which these tests run."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def documented(repository: Path) -> Callable[..., str]:
    """The Python block of docs/interop.md in which that word stands, with pieces of it replaced."""
    page = (repository / "docs" / "interop.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)

    def find(word: str, **pieces: str) -> str:
        (source,) = (block for block in blocks if word in block)
        for old, new in pieces.items():
            assert source.count(old) == 1, old
            source = source.replace(old, new)
        return source

    return find
