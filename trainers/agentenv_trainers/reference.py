"""The frozen copy of the starting policy that a KL term compares with."""

from __future__ import annotations

import copy
from typing import cast

from accelerate import Accelerator
from transformers import PreTrainedModel
from trl.trainer.utils import add_fused_lm_head

from agentenv_trainers.adapters import merge_adapters, without_peft
from agentenv_trainers.settings import TrainerSettings
from agentenv_trainers.sharding import shard


def copy_policy(
    policy: PreTrainedModel, args: TrainerSettings, accelerator: Accelerator | None = None
) -> PreTrainedModel:
    """A copy that is not trained and scores tokens as the trainer's policy does; adapters (PEFT) are merged into it.

    TRL loads its reference from a path or hub name, which a model in memory does not have. The copy must be taken
    before the first training step, and before DDP or autocast is wrapped around the policy's forward.

    Args:
        policy: the starting policy.
        args: settings.
        accelerator: of the run; with FSDP2 the copy is sharded.
    """
    reference = cast(PreTrainedModel, copy.deepcopy(without_peft(policy)))
    merge_adapters(reference)
    reference.requires_grad_(False).eval()
    reference.__dict__.pop("forward", None)  # TRL's patch, bound to the policy
    add_fused_lm_head(
        reference, cast_lm_head_to_fp32=args.cast_lm_head_to_fp32, outputs=("log_probs", "entropy")
    )
    if accelerator is not None and accelerator.is_fsdp2:
        shard(reference, reference, accelerator)
    return reference
