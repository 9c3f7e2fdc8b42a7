"""A chat model behind an OpenAI-compatible URL, as a plain function of messages.

Invariants:
- The key comes from the environment variable `AGENTENV_SHOPPER_KEY`, is sent to that URL, and is written nowhere.
- A connection that is refused is tried again twice; everything else that fails is an `InfrastructureError`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from agentenv.errors import InfrastructureError

from .http_json import NotSentError, check_url, post_json

__all__ = ["KEY_VARIABLE", "OpenAIChat"]

KEY_VARIABLE: Final = "AGENTENV_SHOPPER_KEY"
_PAUSES_S: Final = (0.2, 1.0)
_MOST_TOKENS: Final = 128


@dataclass(frozen=True, slots=True)
class OpenAIChat:
    """Asks POST {url}/chat/completions.

    Raises:
        UsageError: `url` is no URL.
    """

    url: str
    """Such as "http://localhost:8000/v1"."""
    model: str = "default"
    """Name that the server knows."""
    timeout_s: float = 60.0
    """Of each wait, seconds."""

    def __post_init__(self) -> None:
        check_url("shopper", self.url)

    def __call__(self, messages: Sequence[Mapping[str, str]]) -> str:
        """The model's next message.

        Raises:
            InfrastructureError: none came.
        """
        key = os.environ.get(KEY_VARIABLE)
        body = {
            "model": self.model,
            "messages": list(messages),
            "temperature": 0.0,
            "max_tokens": _MOST_TOKENS,
        }
        for pause in (*_PAUSES_S, None):
            try:
                answer = post_json(
                    f"{self.url.rstrip('/')}/chat/completions",
                    body,
                    timeout_s=self.timeout_s,
                    headers={"authorization": f"Bearer {key}"} if key else None,
                )
                break
            except NotSentError:
                if pause is None:
                    raise
                time.sleep(pause)
        try:
            text = answer["choices"][0]["message"]["content"]
        except (KeyError, IndexError, TypeError):
            raise InfrastructureError(f"{self.url}: the answer holds no choices[0].message.content") from None
        if not isinstance(text, str):
            raise InfrastructureError(f"{self.url}: the answer's content is no text")
        return text
