"""What each token adds to a text, as a person reads it.

Invariants:
- The pieces of a sequence, joined, are its text: a character of several tokens stands at the last of them.
- Bytes that are no text become U+FFFD; so does a character that the sequence ends in the middle of.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterable

from transformers import PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import bytes_to_unicode

_BYTE_OF = {character: byte for byte, character in bytes_to_unicode().items()}
"""The alphabet in which byte-level tokenizers write tokens."""
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
"""What a SentencePiece tokenizer writes for a byte that it has no piece for."""
_REPLACEMENT = "�"


class TokenTexts:
    """The texts of a tokenizer's tokens; looked up once per id.

    Args:
        tokenizer: byte-level, SentencePiece-like or of whole words.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._bytes: dict[int, bytes] = {}

    def __call__(self, ids: Iterable[int]) -> list[str]:
        """One text for each id of a sequence."""
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        texts = [decoder.decode(self._bytes_of(token_id)) for token_id in ids]
        if texts:
            texts[-1] += decoder.decode(b"", final=True)
        return texts

    def _bytes_of(self, token_id: int) -> bytes:
        known = self._bytes.get(token_id)
        if known is None:
            known = self._bytes[token_id] = self._look_up(token_id)
        return known

    def _look_up(self, token_id: int) -> bytes:
        token = self._tokenizer.convert_ids_to_tokens(token_id) or ""
        text = self._tokenizer.decode([token_id], clean_up_tokenization_spaces=False)
        assert isinstance(token, str) and isinstance(text, str)
        if _REPLACEMENT in text:
            # Part of a character: its bytes are in the token's own spelling.
            if found := _BYTE_TOKEN.fullmatch(token):
                return bytes([int(found[1], 16)])
            if all(character in _BYTE_OF for character in token):
                return bytes(_BYTE_OF[character] for character in token)
        if token.startswith("▁") and not text.startswith(" "):
            text = " " + text  # decoding takes it for the start of a text, which has no space
        return text.encode("utf-8", "replace")
