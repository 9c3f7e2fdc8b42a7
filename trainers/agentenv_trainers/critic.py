"""The critic: a copy of the policy's backbone with one value per token.

Invariants:

* The critic shares no parameter with the policy.
* Attention is frozen by its role in a decoder layer, not by the class of one model family; where no attention
  is found that is an error, never a silent no-op.
* A forward pass is deterministic: dropout is off, so that targets and predictions come from one function.
* A saved critic is a folder that ``AutoModel`` loads, with the value head beside the backbone; adapters are merged.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModel, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils import cached_file, has_file

from agentenv.errors import UsageError
from agentenv_trainers.adapters import adapter_layers, merge_adapters, without_peft

if TYPE_CHECKING:
    from peft import PeftConfig

VALUE_HEAD = "value_head.safetensors"
"""File of a saved critic's head: ``weight`` [1, hidden] and ``bias`` [1], float32."""


class Critic(nn.Module):
    """Backbone and scalar head.

    The head is float32 and starts at zero, so that an untrained critic says 0 everywhere instead of noise.

    Args:
        backbone: a transformer without language-model head (``AutoModel``); it becomes the critic's own.

    Raises:
        ValueError: the backbone's config names no hidden size.
    """

    def __init__(self, backbone: PreTrainedModel) -> None:
        super().__init__()
        hidden_size = getattr(backbone.config.get_text_config(), "hidden_size", None)
        if hidden_size is None:
            raise ValueError(
                f"config of {type(backbone).__name__} has no hidden_size: no value head can be built"
            )
        self.backbone = backbone
        self.head = nn.Linear(hidden_size, 1, dtype=torch.float32, device=backbone.device)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)
        self.head_is_trained = False
        """Whether the head has the values of a pretraining or of an earlier run."""
        _disable_dropout(self)

    @classmethod
    def from_policy(cls, policy: PreTrainedModel) -> Critic:
        """A critic that starts from a copy of the policy's backbone, all parameters trainable and in float32.

        In bfloat16 an AdamW step of a usual learning rate is rounded away; autocast still computes in bfloat16.
        Adapters of the policy (PEFT) are merged into the copy.

        Raises:
            ValueError: the policy has no separate backbone (``base_model``), or is quantized.
        """
        policy = cast(PreTrainedModel, without_peft(policy))
        backbone = policy.base_model
        if backbone is policy:
            raise ValueError(f"{type(policy).__name__} has no separate backbone (base_model_prefix)")
        if getattr(policy, "is_quantized", False):
            raise UsageError("a quantized policy cannot be copied into a critic that trains: give a critic")
        copied = copy.deepcopy(backbone)
        merge_adapters(copied)
        critic = cls(cast(PreTrainedModel, copied))
        critic.requires_grad_(True)
        return critic.float()

    @classmethod
    def from_pretrained(
        cls,
        folder: str | os.PathLike[str],
        tokenizer: PreTrainedTokenizerBase | None = None,
        **model_kwargs: Any,
    ) -> Critic:
        """A saved critic, or one whose backbone is that of any causal LM and whose head is zero.

        Args:
            folder: folder or hub name.
            tokenizer: the policy's; a critic of another vocabulary would read other text than the policy wrote.
            model_kwargs: for ``AutoModel.from_pretrained``. The critic is float32 whatever the file's dtype.

        Raises:
            UsageError: there is no such model, the tokenizers' vocabularies differ, weights are missing, the head
                does not fit, or the folder holds an adapter alone.
        """
        hub = _only(model_kwargs, "revision", "token", "cache_dir")
        try:
            if has_file(folder, "adapter_config.json", **hub):
                raise UsageError(
                    f"critic {str(folder)!r} is a PEFT adapter: merge it into its model, save that and give its folder"
                )
            if tokenizer is not None:
                _check_tokenizer(folder, tokenizer, {**hub, **_only(model_kwargs, "trust_remote_code")})
            backbone, report = AutoModel.from_pretrained(folder, output_loading_info=True, **model_kwargs)
        except UsageError:
            raise
        except (OSError, ValueError, SafetensorError) as error:
            raise UsageError(f"critic {str(folder)!r} cannot be loaded: {error}") from error
        if report["missing_keys"]:
            raise UsageError(
                f"critic {str(folder)!r} lacks weights of {type(backbone).__name__}: "
                f"{', '.join(sorted(report['missing_keys'])[:3])}, ..."
            )
        critic = cls(backbone)
        if tokenizer is not None:
            critic.check_size(tokenizer)
        if has_file(folder, VALUE_HEAD, **hub):
            critic._load_head(cast(str, cached_file(folder, VALUE_HEAD, **hub)))
        critic.requires_grad_(True)
        return critic.float()

    def save_pretrained(
        self,
        folder: str | os.PathLike[str],
        tokenizer: PreTrainedTokenizerBase | None = None,
        *,
        state_dict: Mapping[str, Tensor] | None = None,
    ) -> None:
        """Write what :meth:`from_pretrained` reads.

        Args:
            folder: made if it does not exist.
            tokenizer: the policy's; saved beside the critic, so that a later policy's can be compared with it.
            state_dict: the critic's weights under plain names, where they are not in the critic itself (sharded).
        """
        Path(folder).mkdir(parents=True, exist_ok=True)
        backbone = self.backbone
        if state_dict is None:
            if adapter_layers(backbone):
                backbone = copy.deepcopy(backbone)
                merge_adapters(backbone)
            backbone.save_pretrained(folder)
            head: Mapping[str, Tensor] = self.head.state_dict()
        else:
            backbone.save_pretrained(folder, state_dict=_below("backbone.", state_dict))
            head = _below("head.", state_dict)
        save_file(
            {name: tensor.detach().contiguous() for name, tensor in head.items()}, Path(folder, VALUE_HEAD)
        )
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)

    def add_adapters(self, config: PeftConfig) -> None:
        """Put trainable adapters into the backbone; of its own weights none trains from then on.

        Args:
            config: such as ``peft.LoraConfig``; not changed, so that the policy may have the same.

        Raises:
            UsageError: peft is not installed, or the backbone has adapters already.
            ValueError: of peft, the config fits no layer of the backbone.
        """
        try:
            from peft import inject_adapter_in_model
        except ImportError:
            raise UsageError("adapters for the critic need peft: pip install peft") from None
        if adapter_layers(self.backbone):
            raise UsageError("the critic has adapters already")
        inject_adapter_in_model(copy.deepcopy(config), self.backbone)
        _disable_dropout(self)

    def check_size(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Whether every token id has an embedding.

        Raises:
            UsageError: the tokenizer knows more ids than the critic.
        """
        known = cast(nn.Embedding, self.backbone.get_input_embeddings()).num_embeddings
        needed = max(tokenizer.get_vocab().values(), default=-1) + 1
        if needed > known:
            raise UsageError(
                f"the policy's tokenizer has {needed} tokens, but the critic embeds only {known}"
            )

    def _load_head(self, path: str) -> None:
        try:
            head = load_file(path)
        except SafetensorError as error:
            raise UsageError(f"value head {path!r} cannot be read: {error}") from error
        expected = {name: tuple(tensor.shape) for name, tensor in self.head.state_dict().items()}
        found = {name: tuple(tensor.shape) for name, tensor in head.items()}
        if found != expected:
            raise UsageError(f"value head {path!r} has {found}, the critic's backbone needs {expected}")
        self.head.load_state_dict(head)
        self.head_is_trained = any(bool(tensor.any()) for tensor in head.values())

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """[B, T] float32: value of the state after each token, so position t - 1 is the value that token t
        met.

        Args:
            input_ids: [B, T], padded on the right.
            attention_mask: [B, T]; may be left out, as right padding cannot reach earlier tokens of a causal
                model.
        """
        hidden = self.backbone(
            input_ids=input_ids, attention_mask=attention_mask, use_cache=False
        ).last_hidden_state
        # The head stays in float32 under autocast: a value in bfloat16 has two decimal digits.
        with torch.autocast(hidden.device.type, enabled=False):
            # Flat and cloned: outputs of a sharded module must not be views.
            values = self.head(hidden.to(self.head.weight.dtype).flatten(0, 1))
            return cast(Tensor, values.view(input_ids.shape).clone())


def freeze_attention(module: nn.Module) -> list[str]:
    """Freeze every attention parameter below the module, by role.

    Attention is a direct child of a decoder layer whose class name ends in "Attention" or whose attribute
    name contains "attn" (linear-attention mixers included). Norms inside it (q_norm, k_norm) are attention
    parameters too.
    Source: SAO, arXiv 2607.07508 (the critic's attention is frozen during RL).

    Args:
        module: a critic, a model or a backbone.

    Returns:
        Names of the frozen sub-modules, in order.

    Raises:
        ValueError: no attention is recognised.
    """
    names = []
    for name, child in _attention_modules(module):
        child.requires_grad_(False)
        names.append(name)
    if not names:
        backbone = getattr(module, "backbone", module)
        raise ValueError(
            f"no attention is recognised in {type(backbone).__name__}: expected decoder layers with a child "
            "whose class name ends in 'Attention' or whose name contains 'attn'. Pass "
            "freeze_critic_attention=False to train all parameters of the critic"
        )
    return names


def _attention_modules(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for layer_name, layer in module.named_modules():
        if not isinstance(layer, GradientCheckpointingLayer):
            continue
        for child_name, child in layer.named_children():
            if type(child).__name__.endswith("Attention") or "attn" in child_name:
                yield (f"{layer_name}.{child_name}" if layer_name else child_name), child


def check_same_vocabulary(policy: PreTrainedTokenizerBase, critic: PreTrainedTokenizerBase) -> None:
    """Whether each token id means the same to both.

    Raises:
        UsageError: it does not; the message names the sizes and the first difference.
    """
    ours = {number: token for token, number in policy.get_vocab().items()}
    theirs = {number: token for token, number in critic.get_vocab().items()}
    for number in sorted(ours.keys() | theirs.keys()):
        if ours.get(number) != theirs.get(number):
            raise UsageError(
                f"the critic's tokenizer differs from the policy's: {len(theirs)} tokens against {len(ours)}; first "
                f"at id {number}, which is {theirs.get(number)!r} for the critic and {ours.get(number)!r} for the "
                "policy"
            )


def _check_tokenizer(
    folder: str | os.PathLike[str], tokenizer: PreTrainedTokenizerBase, kwargs: dict[str, Any]
) -> None:
    """Compare with the tokenizer saved beside a critic, if one is."""
    where = _only(kwargs, "revision", "token", "cache_dir")
    if any(has_file(folder, name, **where) for name in ("tokenizer_config.json", "tokenizer.json")):
        check_same_vocabulary(tokenizer, AutoTokenizer.from_pretrained(folder, **kwargs))


def _only(arguments: Mapping[str, Any], *names: str) -> dict[str, Any]:
    return {name: arguments[name] for name in names if name in arguments}


def _below(prefix: str, state_dict: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {
        name.removeprefix(prefix): tensor for name, tensor in state_dict.items() if name.startswith(prefix)
    }


def _disable_dropout(module: nn.Module) -> None:
    for child in module.modules():
        if isinstance(child, nn.Dropout):
            child.p = 0.0
        if isinstance(getattr(child, "attention_dropout", None), float):
            setattr(child, "attention_dropout", 0.0)  # noqa: B010 - not in the type of every module
