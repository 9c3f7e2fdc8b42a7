"""Where the services are, and the token that they want: from a setting and from the environment."""

import os
from pathlib import Path

from agentenv.cluster.services import resolve_urls
from agentenv.errors import UsageError

__all__ = ["service_urls", "token_from_environment"]


def service_urls(text: str) -> tuple[str, ...]:
    """URLs from a list with commas, or of the services on a Ray cluster ("ray").

    Raises:
        UsageError: it holds none.
    """
    parts = resolve_urls(text, "sandbox").split(",")
    urls = tuple(dict.fromkeys(part.strip().rstrip("/") for part in parts if part.strip()))
    if not urls:
        raise UsageError(f"sandbox_url={text!r}: at least one URL is needed")
    return urls


def token_from_environment() -> str:
    """The token in AGENTENV_SANDBOX_TOKEN, or in the file that AGENTENV_SANDBOX_TOKEN_FILE names.

    Raises:
        UsageError: neither is set, or the file can't be read.
    """
    token = os.environ.get("AGENTENV_SANDBOX_TOKEN", "").strip()
    path = os.environ.get("AGENTENV_SANDBOX_TOKEN_FILE", "")
    if not token and path:
        try:
            lines = [
                line
                for line in Path(path).read_text(encoding="utf-8").splitlines()
                if line.strip() and not line.lstrip().startswith("#")
            ]
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"AGENTENV_SANDBOX_TOKEN_FILE={path}: {error}") from None
        if len(lines) != 1:
            raise UsageError(f"AGENTENV_SANDBOX_TOKEN_FILE={path}: one token is needed, not {len(lines)}")
        token = lines[0].split()[-1]
    if not token:
        raise UsageError(
            "a sandbox service needs a token: set AGENTENV_SANDBOX_TOKEN, "
            "or AGENTENV_SANDBOX_TOKEN_FILE to a file with it"
        )
    return token
