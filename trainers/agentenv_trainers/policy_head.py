"""Log-probs of the tokens that are trained, without computing those of the others.

TRL's fused head does this where Triton runs. Elsewhere it scores every position; in agent episodes most
positions are observations, and for a small model on a CPU the head is then a large part of the step.

Invariant: equal to TRL's result on the trained positions; where this path cannot promise that, it declines.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel

_MAX_LOGITS = 2**26
"""Logits held at once (256 MB in float32); above it TRL's tiled head is used."""
_LOGIT_TRANSFORMS = (
    "final_logit_softcapping",
    "logit_scale",
    "output_multiplier",
    "lm_head_multiplier",
    "logits_scaling",
)
"""Config entries of architectures that change the logits after the head."""


class TokenScores(NamedTuple):
    """[n] each, in nats, in the order of ``action_mask`` read row by row."""

    logprobs: Tensor
    entropies: Tensor


def can_score_directly(model: nn.Module, num_tokens: int) -> bool:
    """Whether :func:`score_actions` gives what the model's own forward would."""
    if not isinstance(model, PreTrainedModel) or isinstance(model, FSDPModule) or model.device.type != "cpu":
        return False  # wrapped for DDP or sharded, or TRL's head does it better
    head = model.get_output_embeddings()
    config = model.config.get_text_config()
    return (
        isinstance(head, nn.Linear)
        and model.base_model is not model
        and all(getattr(config, name, None) is None for name in _LOGIT_TRANSFORMS)
        and num_tokens * head.weight.size(0) <= _MAX_LOGITS
    )


def score_actions(model: PreTrainedModel, input_ids: Tensor, action_mask: Tensor) -> TokenScores:
    """Log-probs of the masked tokens given what precedes them, and the entropies of their distributions.

    Args:
        model: a causal LM for which :func:`can_score_directly` is true.
        input_ids: [b, t], padded on the right.
        action_mask: [b, t] bool; column 0 is never true.

    Returns:
        Log-probs with gradient, entropies without.
    """
    hidden = model.base_model(input_ids=input_ids, use_cache=False).last_hidden_state
    targets = action_mask[:, 1:]
    logits = model.get_output_embeddings()(hidden[:, :-1][targets]).float()
    distribution = logits.log_softmax(dim=-1)
    logprobs = distribution.gather(1, input_ids[:, 1:][targets].unsqueeze(1)).squeeze(1)
    detached = distribution.detach()
    return TokenScores(logprobs, torch.special.entr(detached.exp()).sum(dim=-1))
