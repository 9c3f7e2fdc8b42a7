"""Copies of a model for the engine: its attention replaced and checked, its weights written from outside.

Invariants:

* A copy shares nothing with the model it came from.
* A model whose attention the engine cannot reproduce is refused, by comparing numbers and not by name.
* Weights are written all or not at all: names and shapes are checked before the first is copied.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from agentenv.errors import UsageError
from agentenv.inference.ragged_attention import (
    IMPLEMENTATION,
    RaggedCache,
    RaggedStep,
    ragged_attention,
    running,
)

_SELF_CHECK_TOKENS = 12
_SELF_CHECK_TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-3, torch.bfloat16: 0.25, torch.float16: 0.1}


@torch.inference_mode()
def engine_copy(model: Any, device: torch.device) -> Any:
    """A copy whose attention is the engine's, compared with the model's own on a random sequence in three pieces.

    Args:
        model: a transformers causal language model; left as it is.
        device: where the copy goes.

    Raises:
        UsageError: log-probs differ by more than rounding: the model's attention has a part this engine lacks.
    """
    from transformers import AttentionInterface

    AttentionInterface.register(IMPLEMENTATION, ragged_attention)
    # Parameters made in inference mode could never be trained or written to outside it.
    with torch.inference_mode(False):
        duplicate = copy.deepcopy(model).to(device).eval().requires_grad_(False)
    vocabulary = int(duplicate.config.get_text_config().vocab_size)
    ids = torch.from_numpy(np.random.default_rng(0).integers(0, vocabulary, (1, _SELF_CHECK_TOKENS))).to(
        device
    )
    expected = duplicate(input_ids=ids, use_cache=False).logits[0].float().log_softmax(-1)
    duplicate.set_attn_implementation(IMPLEMENTATION)
    if duplicate.config.get_text_config()._attn_implementation != IMPLEMENTATION:
        raise UsageError(
            f"TransformersEngine: {type(model).__name__} does not use transformers' attention interface"
        )
    cache = RaggedCache(2, 2 * _SELF_CHECK_TOKENS)
    pieces = []
    for start, end in ((0, 5), (5, 6), (6, _SELF_CHECK_TOKENS)):
        step = RaggedStep.build(cache, np.array([1]), np.array([start]), np.array([end - start]), device)
        with running(step):
            output = duplicate(
                input_ids=ids[:, start:end], position_ids=step.positions[None], use_cache=False
            )
        pieces.append(output.logits[0].float().log_softmax(-1))
    difference = float((torch.cat(pieces) - expected).abs().max())
    tolerance = _SELF_CHECK_TOLERANCE.get(next(duplicate.parameters()).dtype, 0.25)
    if not difference <= tolerance:
        raise UsageError(
            f"TransformersEngine: log-probs of {type(model).__name__} through this engine's attention differ by "
            f"{difference:.2g} from the model's own (allowed {tolerance}); its attention is not supported"
        )
    return duplicate


@torch.inference_mode()
def copy_weights(model: Any, weights: Mapping[str, Tensor]) -> None:
    """Write a state dict into a copy.

    Args:
        model: from :func:`engine_copy`.
        weights: all of its state dict; of weights that are tied one name is enough.

    Raises:
        UsageError: names or shapes do not fit.
    """
    own = model.state_dict(keep_vars=True)
    unknown = sorted(set(weights) - set(own))
    given = {id(own[name]) for name in weights if name in own}
    missing = sorted(name for name, tensor in own.items() if id(tensor) not in given and name not in weights)
    if unknown or missing:
        raise UsageError(
            f"update_weights: {len(unknown)} unknown names {unknown[:3]} and {len(missing)} missing names {missing[:3]}"
        )
    for name, tensor in weights.items():
        if tensor.shape != own[name].shape:
            raise UsageError(
                f"update_weights: {name} is {tuple(tensor.shape)}, must be {tuple(own[name].shape)}"
            )
    for name, tensor in weights.items():
        own[name].copy_(tensor)
