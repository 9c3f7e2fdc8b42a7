"""The frozen copy of the starting policy that a KL term compares with."""

from __future__ import annotations

import copy

from transformers import PreTrainedModel
from trl.trainer.utils import add_fused_lm_head

from agentenv_trainers.settings import TrainerSettings


def copy_policy(policy: PreTrainedModel, args: TrainerSettings) -> PreTrainedModel:
    """A copy that is not trained and scores tokens as the trainer's policy does.

    TRL loads its reference from a path or hub name, which a model in memory does not have. The copy must be taken
    before the first training step, and before DDP or autocast is wrapped around the policy's forward.
    """
    reference = copy.deepcopy(policy).requires_grad_(False).eval()
    reference.__dict__.pop("forward", None)  # TRL's patch, bound to the policy
    add_fused_lm_head(
        reference, cast_lm_head_to_fp32=args.cast_lm_head_to_fp32, outputs=("log_probs", "entropy")
    )
    return reference
