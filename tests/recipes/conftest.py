"""The recipes as modules, and a tiny policy with random weights to run them with."""

import shutil
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="session")
def swe_sao(load_program: Callable[[str], ModuleType]) -> ModuleType:
    """The SWE recipe."""
    return load_program("recipes/swe_sao.py")


@pytest.fixture(scope="session")
def online_learning(load_program: Callable[[str], ModuleType]) -> ModuleType:
    """The recipe of online learning."""
    return load_program("recipes/online_learning.py")


@pytest.fixture
def vowels(tmp_path: Path, repository: Path) -> Path:
    """``vowels.py`` in the test's folder: an environment to train on."""
    return Path(shutil.copy(repository / "tests" / "recipes" / "vowels.py", tmp_path))


@pytest.fixture(scope="session")
def tiny_policy(tmp_path_factory: pytest.TempPathFactory, load_program: Callable[[str], ModuleType]) -> Path:
    """Folder of a Qwen3 of 40,000 random parameters with a byte-level tokenizer and a chat template."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    folder = tmp_path_factory.mktemp("models") / "tiny"
    template = (
        "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    fast = load_program("benchmarks/byte_level.py").byte_level_tokenizer(
        template, end="<|end|>", pad="<|pad|>"
    )
    fast.save_pretrained(folder)
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(fast),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        tie_word_embeddings=True,
        max_position_embeddings=4096,
        eos_token_id=fast.eos_token_id,
        pad_token_id=fast.pad_token_id,
        bos_token_id=None,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    return folder
