"""Inference engines behind one door, :class:`LLMProxy`.

:class:`~agentenv.inference.transformers_engine.TransformersEngine` is imported from its own module, because it alone
needs torch.
"""

from agentenv.inference.protocol import Engine, FinishReason, Generation, GenerationRequest, SamplingParams
from agentenv.inference.proxy import LLMProxy

__all__ = ["Engine", "FinishReason", "Generation", "GenerationRequest", "LLMProxy", "SamplingParams"]
