"""A tokenizer that needs no file and no library: one token per UTF-8 byte, and a ChatML template.

Invariant: `decode(encode(text)) == text` for every text. The reverse does not hold: bytes that are no UTF-8
decode to the replacement character, like the fragments that a real policy samples.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

__all__ = ["ByteTokenizer"]

_SPECIAL = ("<|im_start|>", "<|im_end|>", "<|pad|>")
_SPECIAL_PATTERN = re.compile("(" + "|".join(re.escape(token) for token in _SPECIAL) + ")")
_NUM_BYTES = 256
_SPECIAL_IDS = {token: _NUM_BYTES + index for index, token in enumerate(_SPECIAL)}


class ByteTokenizer:
    """Ids 0-255 are bytes; 256 begins a message, 257 ends it (end of sequence), 258 pads.

    Has the part of a Hugging Face tokenizer's interface that conversations and rollouts use.
    """

    name_or_path = "agentenv.testing.ByteTokenizer"
    chat_template = (
        "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    """The template that `apply_chat_template` follows, for those who render it themselves."""
    bos_token_id: int | None = None
    eos_token_id: int | None = _NUM_BYTES + 1
    pad_token_id: int | None = _NUM_BYTES + 2
    eos_token = "<|im_end|>"
    pad_token = "<|pad|>"
    vocab_size = _NUM_BYTES + len(_SPECIAL)

    def __len__(self) -> int:
        return self.vocab_size

    def encode(self, text: str, *, add_special_tokens: bool = False, **_: Any) -> list[int]:
        """Ids of `text`; special tokens written out in it become their ids, none are added."""
        ids: list[int] = []
        for part in _SPECIAL_PATTERN.split(text):
            special = _SPECIAL_IDS.get(part)
            if special is None:
                ids.extend(part.encode("utf-8", "surrogatepass"))
            else:
                ids.append(special)
        return ids

    def decode(self, token_ids: Iterable[int], *, skip_special_tokens: bool = False, **_: Any) -> str:
        """Text of `token_ids`.

        Raises:
            ValueError: an id is outside the vocabulary.
        """
        ids = [int(token) for token in token_ids]
        try:
            return bytes(ids).decode("utf-8", "replace")
        except ValueError:
            pass  # an id above those of bytes, or outside the vocabulary
        data = bytearray()
        for token in ids:
            if not 0 <= token < self.vocab_size:
                raise ValueError(f"token id must be between 0 and {self.vocab_size - 1}, got {token}")
            if token < _NUM_BYTES:
                data.append(token)
            elif not skip_special_tokens:
                data.extend(_SPECIAL[token - _NUM_BYTES].encode())
        return data.decode("utf-8", "replace")

    def apply_chat_template(
        self,
        conversation: Sequence[Mapping[str, str]],
        *,
        tokenize: bool = True,
        add_generation_prompt: bool = False,
        **_: Any,
    ) -> str | list[int]:
        """The conversation in ChatML, as ids or (`tokenize=False`) as text."""
        text = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in conversation)
        if add_generation_prompt:
            text += "<|im_start|>assistant\n"
        return self.encode(text) if tokenize else text
