"""What samples from the policy, from a recipe's options: transformers in this process, or vLLM.

Invariant: whatever cannot work is a UsageError before the first episode, and leaves no server behind.
"""

from __future__ import annotations

import sys
from collections.abc import Collection
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from transformers import PreTrainedModel

from agentenv.cluster.services import resolve_urls
from agentenv.errors import UsageError
from agentenv.inference import Engine
from agentenv.inference.adapters import AdaptedWeights
from agentenv.inference.policy import Policy, open_engine
from agentenv.inference.vllm.opening import VLLMOptions, check_vllm, open_vllm
from agentenv_trainers.adapters import with_trial_adapter
from agentenv_trainers.policy_weights import full_weights
from agentenv_trainers.rollout_settings import RolloutSettings, setting

__all__ = ["EngineArguments"]

_SHARE_OF_UPDATE = 2.0 / 3.0
"""Of ``sync_timeout_s``: what one of several servers may take for new weights."""


@dataclass
class EngineArguments:
    """Options of the engines."""

    engine: Literal["transformers", "vllm", "vllm-in-process"] = setting(
        "transformers",
        "What samples from the policy. vllm: a vLLM server, started here unless --vllm_url names running ones; "
        "vllm-in-process: vLLM without a server.",
    )
    vllm_url: str | None = setting(
        None,
        "Running vLLM servers, such as http://127.0.0.1:8000, several with commas between, or those of a Ray cluster "
        "(ray): docs/engines.md, docs/several-machines.md.",
    )
    vllm_python: str | None = setting(
        None, "Python that has vLLM, for the server that is started here. Unset: the running one."
    )
    vllm_args: str | None = setting(
        None,
        "More arguments of that server, as on a command line: '--tensor-parallel-size 2'; of vllm-in-process as JSON.",
    )
    vllm_devices: str | None = setting(
        None, "GPUs of that server, as CUDA_VISIBLE_DEVICES has them. Unset: all."
    )
    vllm_dtype: Literal["float32", "bfloat16", "float16"] | None = setting(
        None,
        "Type that vLLM computes in. Unset: the policy's. In another one sampled log-probs differ from the trainer's; "
        "the objectives' masks and weights see that as staleness.",
    )
    vllm_start_timeout_s: float = setting(
        900.0, "How long a vLLM server may take to start, and one that died to come back, in seconds."
    )
    weight_transfer: Literal["shared-memory", "filesystem", "nccl"] = setting(
        "shared-memory",
        "How weights get to vLLM: within this machine, by a folder that all machines mount, or between GPUs.",
    )
    weight_folder: str | None = setting(None, "Folder of --weight_transfer filesystem.")

    lora_sync: Literal["auto", "adapter", "merged"] = setting(
        "auto",
        "How the LoRA adapters of --use_peft get to vLLM. adapter: alone; merged: as whole weights; auto: alone where "
        "vLLM can serve them and does not run on processors. Which it is, is printed.",
    )

    def check_engine(self) -> None:
        """Whether the engine can be used here, as far as is seen without a model; cheap.

        Raises:
            UsageError: it can't; where an extra is missing the message says which.
        """
        if self.engine != "transformers":
            check_vllm(self._options)
            return
        for option in fields(EngineArguments):
            if option.name != "engine" and getattr(self, option.name) != option.default:
                raise UsageError(f"--{option.name} is for --engine vllm")

    def open_engines(
        self,
        policy: Policy,
        config: RolloutSettings,
        chosen: Collection[str] = (),
        *,
        peft_config: Any = None,
    ) -> list[Engine]:
        """Engines with the policy's weights.

        Args:
            policy: as it was loaded.
            config: of the run. Its ``sync_timeout_s`` is raised where the user left it alone: an update may find a
                server dead, which then has its time to come back.
            chosen: names of the options that somebody set.
            peft_config: adapters that the run trains; None: it trains whole weights.

        Raises:
            UsageError: they cannot be opened.
        """
        rollout = config.rollout_config()
        sizes: dict[str, Any] = {
            "max_batch": rollout.num_envs,
            "max_length": rollout.max_tokens_per_episode,
        }
        if self.engine == "transformers":
            return [open_engine(policy, **sizes)]
        if rollout.deterministic:
            raise UsageError(f"--deterministic needs --engine transformers, not {self.engine}")
        if self.lora_sync != "auto" and peft_config is None:
            raise UsageError(f"--lora_sync {self.lora_sync} is for --use_peft true")
        trial = None if peft_config is None else _trial(policy.model, peft_config)
        # A server that hangs must be given up before the update's own deadline ends the run.
        options = replace(self._options, update_timeout_s=_SHARE_OF_UPDATE * config.sync_timeout_s)
        if "sync_timeout_s" not in chosen:
            config.sync_timeout_s += self.vllm_start_timeout_s
        return list(open_vllm(policy, options, **sizes, trial=trial, note=_note))

    @property
    def _options(self) -> VLLMOptions:
        urls = [url.strip() for url in resolve_urls(self.vllm_url or "", "engine").split(",")]
        return VLLMOptions(
            urls=tuple(url for url in urls if url),
            python=self.vllm_python,
            arguments=self.vllm_args or "",
            devices=self.vllm_devices,
            dtype=self.vllm_dtype,
            transfer=self.weight_transfer,
            folder=self.weight_folder,
            start_timeout_s=self.vllm_start_timeout_s,
            lora_sync=self.lora_sync,
            in_process=self.engine == "vllm-in-process",
        )


def _trial(model: PreTrainedModel, peft_config: Any) -> AdaptedWeights | None:
    weights = full_weights(with_trial_adapter(model, peft_config))
    return weights if isinstance(weights, AdaptedWeights) else None


def _note(line: str) -> None:
    sys.stderr.write(f"{line}\n")
