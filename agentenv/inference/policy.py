"""A language model by path or name, with its tokenizer, and the engine that samples from it in this process.

Invariant: what can't be loaded is a UsageError that names it, before anything is written.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils.logging import disable_progress_bar

from agentenv.errors import UsageError
from agentenv.inference.protocol import Engine
from agentenv.inference.transformers_engine import TransformersEngine

__all__ = ["Policy", "default_dtype", "hide_progress_bars", "load_policy", "open_engine"]


@dataclass
class Policy:
    """A language model with its tokenizer."""

    name: str
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    source: str = ""
    """Folder or name on the hub that it was loaded from."""


def default_dtype() -> str:
    """The checkpoint's own type where there is a GPU, float32 on processors: they have no fast bfloat16."""
    return "auto" if torch.cuda.is_available() else "float32"


def hide_progress_bars() -> None:
    """Leave the terminal to a command's own line, in all of this process."""
    disable_progress_bar()


def load_policy(
    name: str, *, embedded: Path | None = None, model_options: Mapping[str, Any] | None = None
) -> Policy:
    """Load a causal language model and its tokenizer.

    Args:
        name: a folder, or a name on the Hugging Face hub.
        embedded: folder of the policy that the name "embedded" stands for; None: it stands for none.
        model_options: passed on to ``from_pretrained``; the dtype is float32 unless given.

    Raises:
        UsageError: there is no model under that name, or its tokenizer has no chat template.
    """
    is_embedded = name == "embedded" and embedded is not None
    source = str(embedded) if is_embedded else name
    if embedded is not None and is_embedded and not (embedded / "config.json").is_file():
        raise UsageError(
            f"--model embedded: the embedded policy is not installed ({embedded} holds no model)"
        )
    if Path(source).is_dir() and not (Path(source) / "config.json").is_file():
        raise UsageError(f"--model {name}: that folder holds no model (config.json is missing)")
    if not Path(source).exists() and (source.startswith((".", "/", "~")) or source.count("/") > 1):
        raise UsageError(f"--model {name}: no such folder")
    try:
        tokenizer = AutoTokenizer.from_pretrained(source)
        model = AutoModelForCausalLM.from_pretrained(source, **{"dtype": "float32", **(model_options or {})})
    except (OSError, ValueError, KeyError, TypeError, ImportError) as error:
        first_line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UsageError(f"--model {name}: can't be loaded: {first_line}") from error
    if not tokenizer.chat_template:
        raise UsageError(
            f"--model {name}: its tokenizer has no chat template; use an instruction-tuned model"
        )
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return Policy(name, model, tokenizer, source)


def open_engine(policy: Policy, *, max_batch: int, max_length: int) -> Engine:
    """The engine that samples from a copy of the policy, on the accelerator where there is one.

    Args:
        policy: what to copy.
        max_batch: most requests decoded side by side.
        max_length: most tokens of a sequence.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return TransformersEngine(
        policy.model, policy.tokenizer, max_batch=max_batch, max_length=max_length, device=device
    )
