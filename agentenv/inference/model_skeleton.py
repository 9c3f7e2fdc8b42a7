"""A language model without its weights: writes and evaluates weights that somebody else holds.

Invariants:

* A skeleton shares no tensor with the model it was made from, and holds none of the size of a weight.
* It may be used by several threads.
* Folders are written as ``save_pretrained`` writes them, with the names that a checkpoint has on disk; but weights that
  are tied are written under each of their names, since a vLLM on processors loads the head apart from the embeddings.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from agentenv.errors import UsageError

__all__ = ["ModelSkeleton"]


class ModelSkeleton:
    """The architecture of a model.

    Args:
        model: a transformers causal language model, as it was loaded; left as it is. A model that PEFT has put its
            layers into is none.
    """

    def __init__(self, model: Any) -> None:
        memo: dict[int, Any] = {
            id(parameter): nn.Parameter(parameter.detach().to("meta"), requires_grad=False)
            for parameter in model.parameters()
        }
        # Copied with its buffers, which rotary embeddings keep outside of the state dict.
        self._model = copy.deepcopy(model, memo).eval()
        self._shapes = {name: tensor.shape for name, tensor in self._model.state_dict().items()}
        own = self._model.state_dict(keep_vars=True)
        names: dict[int, list[str]] = {}
        for name, tensor in own.items():
            names.setdefault(id(tensor), []).append(name)
        self._tied = [group for group in names.values() if len(group) > 1]
        # What is written says so.
        self._model.config.get_text_config().tie_word_embeddings = False
        self.dtype: torch.dtype = next(self._model.parameters()).dtype
        config = self._model.config.get_text_config()
        self.vocab_size = int(config.vocab_size)
        self._lock = threading.Lock()
        """A forward pass puts weights into the model for its time."""

    @property
    def is_tied(self) -> bool:
        """Some weights have several names."""
        return bool(self._tied)

    @property
    def num_bytes(self) -> int:
        """Size of a checkpoint."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self._model.state_dict().values())

    def check(self, weights: Mapping[str, Tensor]) -> None:
        """Whether a state dict is one of this model.

        Args:
            weights: all of it; of weights that are tied one name is enough.

        Raises:
            UsageError: names or shapes do not fit.
        """
        optional = {name for group in self._tied if any(n in weights for n in group) for name in group}
        unknown = sorted(set(weights) - set(self._shapes))
        missing = sorted(set(self._shapes) - set(weights) - optional)
        if unknown or missing:
            raise UsageError(
                f"update_weights: {len(unknown)} unknown names {unknown[:3]} and {len(missing)} missing names "
                f"{missing[:3]}"
            )
        for name, tensor in weights.items():
            if tensor.shape != self._shapes[name]:
                raise UsageError(
                    f"update_weights: {name} is {tuple(tensor.shape)}, must be {tuple(self._shapes[name])}"
                )

    def save(self, weights: Mapping[str, Tensor], folder: Path) -> None:
        """Write a checkpoint.

        Args:
            weights: a state dict that :meth:`check` takes.
            folder: is made.
        """
        from transformers.utils import logging

        tensors = {name: tensor.detach() for name, tensor in self._untied(weights).items()}
        for group in self._tied:
            given = [name for name in group if name in tensors]
            tensors |= {name: tensors[given[0]].clone() for name in group if given and name not in tensors}
        shows_bars = logging.is_progress_bar_enabled()
        logging.disable_progress_bar()  # one bar each training step
        try:
            self._model.save_pretrained(folder, state_dict=tensors)
        finally:
            if shows_bars:
                logging.enable_progress_bar()

    def checkpoint_tensors(self, weights: Mapping[str, Tensor]) -> list[tuple[str, Tensor]]:
        """Weights under the names and in the shapes that a checkpoint has, without writing one.

        Args:
            weights: a state dict that :meth:`check` takes.
        """
        from transformers.core_model_loading import revert_weight_conversion

        return list(revert_weight_conversion(self._model, self._untied(weights)).items())

    @torch.no_grad()
    def logprobs(self, weights: Mapping[str, Tensor], token_ids: Sequence[int]) -> list[float]:
        """Log-probs of a sequence under weights, by one forward pass where they lie.

        Args:
            weights: as for :meth:`check`.
            token_ids: at least two.

        Returns:
            of each token but the first, given those before it.
        """
        device = next(iter(weights.values())).device
        ids = torch.tensor([list(token_ids)], device=device)
        buffers = {
            name: buffer.to(device) for name, buffer in self._model.named_buffers() if name not in weights
        }
        with self._lock:
            output = torch.func.functional_call(
                self._model,
                {**buffers, **{name: tensor.detach() for name, tensor in self._untied(weights).items()}},
                (),
                {"input_ids": ids, "use_cache": False},
            )
        rows = output.logits[0, :-1].float().log_softmax(-1)
        return rows.gather(-1, ids[0, 1:, None])[:, 0].tolist()

    def _untied(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """One name for each weight."""
        dropped = {name for group in self._tied for name in [n for n in group if n in weights][1:]}
        return {name: tensor for name, tensor in weights.items() if name not in dropped}
