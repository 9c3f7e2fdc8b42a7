"""Small tokenizers for tests: any text round-trips, whatever its tokens were made from."""

from collections.abc import Callable
from types import ModuleType

import pytest


@pytest.fixture(scope="module")
def byte_level(load_program: Callable[[str], ModuleType]) -> ModuleType:
    return load_program("benchmarks/byte_level.py")


def test_bytes_are_tokens_unless_pieces_are_wanted(byte_level: ModuleType) -> None:
    text = "the cat and the cat 🐈\n\tsat"
    bytes_only = byte_level.qwen3_tokenizer()
    pieces = byte_level.qwen3_tokenizer(["the cat and the cat"] * 3, vocab_size=265)
    assert len(bytes_only) == 256 + 3 and len(bytes_only.encode(text)) == len(text.encode())
    assert len(pieces) == 265 and len(pieces.encode(text)) < len(text.encode())
    for tokenizer in (bytes_only, pieces):
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_special_tokens_are_one_and_the_template_has_tools(byte_level: ModuleType) -> None:
    tokenizer = byte_level.qwen3_tokenizer()
    assert tokenizer.encode("<|im_end|>") == [tokenizer.eos_token_id]
    tool = {"type": "function", "function": {"name": "bash", "parameters": {"type": "object"}}}
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], tools=[tool], tokenize=False, add_generation_prompt=True
    )
    assert '"name": "bash"' in prompt and prompt.endswith("<|im_start|>assistant\n")


def test_a_template_of_ones_own_ends_turns_as_it_says(byte_level: ModuleType) -> None:
    tokenizer = byte_level.byte_level_tokenizer("{{ messages[0]['content'] }}<end>", end="<end>", pad="<pad>")
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], return_dict=False)
    assert ids[-1] == tokenizer.eos_token_id != tokenizer.pad_token_id
