"""The texts of single tokens, joined, are the text of the sequence."""

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from agentenv_trainers.token_texts import TokenTexts

TEXT = "Über 3 naïve  cafés:\n\t日本 🙂 done"


@pytest.fixture(scope="module")
def byte_level() -> PreTrainedTokenizerFast:
    """A byte-level tokenizer that learned nothing but its bytes and a few ASCII merges."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=270, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(["done done done caf caf"], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, additional_special_tokens=["<|end|>"])


@pytest.fixture(scope="module")
def sentencepiece() -> PreTrainedTokenizerFast:
    """One whose spaces are U+2581 and whose unknown characters fall back to bytes."""
    words = {"<unk>": 0, "▁": 1, "▁done": 2, "d": 3} | {f"<0x{byte:02X}>": 4 + byte for byte in range(256)}
    tokenizer = Tokenizer(models.BPE(vocab=words, merges=[], byte_fallback=True, unk_token="<unk>"))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def test_a_character_of_several_tokens_stands_at_the_last_of_them(byte_level) -> None:
    ids = byte_level("é🙂", add_special_tokens=False)["input_ids"]
    assert TokenTexts(byte_level)(ids) == ["", "é", "", "", "", "🙂"]


def test_the_texts_joined_are_what_the_tokenizer_decodes(byte_level) -> None:
    ids = byte_level(TEXT, add_special_tokens=False)["input_ids"]
    texts = TokenTexts(byte_level)(ids)
    assert len(texts) == len(ids)
    assert "".join(texts) == TEXT


def test_special_tokens_are_shown(byte_level) -> None:
    ids = byte_level("done<|end|>", add_special_tokens=False)["input_ids"]
    assert TokenTexts(byte_level)(ids)[-1] == "<|end|>"


def test_bytes_that_are_no_text_are_shown_as_such_and_shift_nothing(byte_level) -> None:
    first, *_ = byte_level("é", add_special_tokens=False)["input_ids"]
    (letter,) = byte_level("d", add_special_tokens=False)["input_ids"]
    assert TokenTexts(byte_level)([first, letter, first]) == ["", "�d", "�"]


def test_spaces_and_bytes_of_a_sentencepiece_tokenizer_are_kept(sentencepiece) -> None:
    face = [4 + byte for byte in "é".encode()]
    assert TokenTexts(sentencepiece)([2, 2, 3, *face]) == [" done", " done", "d", "", "é"]


def test_no_tokens_have_no_texts(byte_level) -> None:
    assert TokenTexts(byte_level)([]) == []
