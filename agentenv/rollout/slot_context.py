"""What a run gives each of its slots."""

from __future__ import annotations

from dataclasses import dataclass

from agentenv.conversation import Tokenizer
from agentenv.inference.protocol import SamplingParams
from agentenv.inference.proxy import LLMProxy
from agentenv.rollout.barrier import TurnBarrier
from agentenv.rollout.config import RolloutConfig
from agentenv.rollout.failures import FailurePolicy

__all__ = ["SlotContext"]


@dataclass(frozen=True)
class SlotContext:
    """The same for all slots of a run, or of an evaluation."""

    proxy: LLMProxy
    """Where turns come from."""
    tokenizer: Tokenizer
    """With a chat template."""
    config: RolloutConfig
    """Limits and deadlines."""
    sampling: SamplingParams | None = None
    """Of every turn; ``max_tokens`` is cut to what the episode has left. None: the config's."""
    policy: FailurePolicy | None = None
    """What is tried again and what is replaced; None: each slot has one of its own."""
    barrier: TurnBarrier | None = None
    """Of batch rollout; None: an episode waits for no other."""

    @property
    def turn_sampling(self) -> SamplingParams:
        """Of every turn."""
        return self.sampling or self.config.sampling()
