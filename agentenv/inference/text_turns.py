"""Conversations as text for policies that have no tokens to show: a chat server, a scripted policy.

The rollout speaks to engines in token ids. Here an id is the code point of a character, and four noncharacters of
Unicode, which no text holds, begin and end messages; so what a policy is asked and what it says can be read back.

Invariants:

* :func:`read_messages` gives back exactly the messages of the conversation, but for the four noncharacters, which
  become replacement characters.
* Log-probs are 0.0 and versions 0: these episodes are for evaluation, never for training.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from agentenv.conversation import Message
from agentenv.inference.protocol import FinishReason, Generation

__all__ = ["TextTokenizer", "read_messages", "text_generation"]

_BEGINNINGS: Final = {"system": "\ufdd0", "user": "\ufdd1", "assistant": "\ufdd2"}
_ROLES: Final = {mark: role for role, mark in _BEGINNINGS.items()}
_END: Final = "\ufdd3"
_MARKS: Final = dict.fromkeys(map(ord, (*_ROLES, _END)), "\ufffd")


class TextTokenizer:
    """One id for each character; fits :class:`agentenv.conversation.Tokenizer`."""

    name_or_path = "agentenv.inference.text_turns.TextTokenizer"
    chat_template = "a character that stands for the role, the content, a character that ends the message"
    eos_token_id: int | None = ord(_END)
    all_special_ids = tuple(_MARKS)

    def apply_chat_template(
        self, conversation: Sequence[Mapping[str, str]], *, add_generation_prompt: bool = False, **_: Any
    ) -> str:
        """Text of a conversation.

        Raises:
            ValueError: a role is none of system, user and assistant.
        """
        parts = []
        for message in conversation:
            if message["role"] not in _BEGINNINGS:
                raise ValueError(f"role {message['role']!r} must be one of {', '.join(_BEGINNINGS)}")
            parts.append(f"{_BEGINNINGS[message['role']]}{_clean(message['content'])}{_END}")
        return "".join(parts) + (_BEGINNINGS["assistant"] if add_generation_prompt else "")

    def encode(self, text: str, **_: Any) -> list[int]:
        """Its code points."""
        return list(map(ord, text))

    def decode(self, token_ids: Iterable[int], *, skip_special_tokens: bool = False, **_: Any) -> str:
        """Inverse of :meth:`encode`."""
        return "".join(chr(id) for id in token_ids if not (skip_special_tokens and id in _MARKS))


def read_messages(prompt_ids: Iterable[int]) -> list[Message]:
    """The messages of a prompt, without the opening of the turn that is asked for."""
    messages: list[Message] = []
    for part in "".join(map(chr, prompt_ids)).split(_END)[:-1]:
        messages.append({"role": _ROLES[part[0]], "content": part[1:]})
    return messages


def text_generation(text: str, finish_reason: FinishReason = "stop") -> Generation:
    """What an engine returns where the policy has written ``text``."""
    ids = [*map(ord, _clean(text)), ord(_END)]
    return Generation(ids, [0.0] * len(ids), [0] * len(ids), finish_reason)


def _clean(text: str) -> str:
    return text.translate(_MARKS).encode("utf-8", "replace").decode("utf-8")
