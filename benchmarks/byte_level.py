"""Small tokenizers of transformers that need no download, for benchmarks and for tests."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast
from trl.chat_template_utils import qwen3_chat_template

__all__ = ["byte_level_tokenizer", "qwen3_tokenizer"]


def byte_level_tokenizer(
    chat_template: str,
    *,
    end: str,
    pad: str,
    more_special: Sequence[str] = (),
    texts: Iterable[str] = (),
    vocab_size: int = 0,
) -> PreTrainedTokenizerFast:
    """Bytes as tokens, which any text is written in; and frequent pieces of some texts.

    Args:
        chat_template: Jinja.
        end: special token that ends a turn.
        pad: special token of padding.
        more_special: other special tokens.
        texts: whose pieces become tokens, up to ``vocab_size``.
        vocab_size: tokens; where it is below the bytes and special tokens, those are all.
    """
    words = Tokenizer(models.BPE())
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    words.decoder = decoders.ByteLevel()
    words.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=[end, pad, *more_special],
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        ),
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, eos_token=end, pad_token=pad, additional_special_tokens=list(more_special)
    )
    tokenizer.chat_template = chat_template
    return tokenizer


def qwen3_tokenizer(texts: Iterable[str] = (), vocab_size: int = 0) -> PreTrainedTokenizerFast:
    """The same with the chat template of Qwen3, which has tools."""
    return byte_level_tokenizer(
        qwen3_chat_template,
        end="<|im_end|>",
        pad="<|endoftext|>",
        more_special=["<|im_start|>"],
        texts=texts,
        vocab_size=vocab_size,
    )
