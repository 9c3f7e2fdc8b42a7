"""What a run is made of, found by name: the environment, the policy, the engine.

Invariants:
- Whatever can't be found or can't work is a UsageError before anything is written.
- A file or class of the user's is imported from where the user stands; it needs no installation.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import logging
import os
import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from types import ModuleType
from typing import Any

import gymnasium
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

import agentenv
from agentenv import registration
from agentenv.errors import MissingExtraError, UsageError
from agentenv.inference import Engine
from agentenv_trainers.rollout_settings import RolloutSettings

logger = logging.getLogger(__name__)

TextEnv = gymnasium.Env[str, str]
EnvFactory = Callable[[], TextEnv]


@dataclass
class Policy:
    """A language model with its tokenizer."""

    name: str
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase


def find_environment(name: str, kwargs: Mapping[str, Any] | None = None) -> EnvFactory:
    """What makes the environment that ``--env`` names.

    Args:
        name: a registered id; ``module:Class``; ``file.py`` (which registers or defines one environment) or
            ``file.py:Class``.
        kwargs: arguments for every environment that is made.

    Raises:
        UsageError: there is no such environment, or it can't be made with these arguments.
    """
    arguments = dict(kwargs or {})
    path, _, attribute = name.partition(":")
    if path.endswith(".py"):
        factory = _from_file(path, attribute, arguments)
    elif attribute:
        factory = _factory(name, _attribute(_import(path, name), attribute, name), arguments)
    else:
        agentenv.spec(name)
        factory = _registered(name, arguments)
    # Made once here: a wrong argument is the user's mistake now, and would be a failed episode later.
    factory().close()
    return factory


def load_policy(name: str, *, embedded: Path, model_options: Mapping[str, Any] | None = None) -> Policy:
    """Load a causal language model and its tokenizer.

    Args:
        name: "embedded", a folder, or a name on the Hugging Face hub.
        embedded: folder of the embedded policy.
        model_options: passed on to ``from_pretrained``; the dtype is float32 unless given.

    Raises:
        UsageError: there is no model under that name, or its tokenizer has no chat template.
    """
    source = str(embedded) if name == "embedded" else name
    if name == "embedded" and not (embedded / "config.json").is_file():
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
    return Policy(name, model, tokenizer)


def fit_context(config: RolloutSettings, policy: Policy, given: Collection[str]) -> None:
    """Limit episodes to the model's positions, unless the user gave their length: then it must fit.

    Args:
        config: ``max_tokens_per_episode`` is changed.
        policy: whose positions count.
        given: names of the options that the user set.

    Raises:
        UsageError: a length was given that the model cannot hold.
    """
    positions = getattr(policy.model.config, "max_position_embeddings", None)
    wanted = config.rollout_config().max_tokens_per_episode  # an unset one has its default there
    if positions is None or wanted <= positions:
        return
    if "max_tokens_per_episode" in given:
        raise UsageError(
            f"--max_tokens_per_episode is {wanted}, but model {policy.name} has {positions} positions"
        )
    logger.warning("episodes are limited to the %d positions of model %s", positions, policy.name)
    config.max_tokens_per_episode = positions


def check_engine(kind: str) -> None:
    """Whether an engine can be used here; cheap.

    Raises:
        UsageError: it can't; where an extra is missing the message says which.
    """
    if kind == "vllm":
        if importlib.util.find_spec("vllm") is None:
            raise MissingExtraError("vllm", "vllm")
        raise UsageError("--engine vllm: this version samples with transformers only; leave --engine out")
    if kind != "transformers":
        raise UsageError(f"--engine {kind}: must be transformers or vllm")


def open_engine(policy: Policy, *, max_batch: int, max_length: int) -> Engine:
    """The engine that samples from a copy of the policy, on the accelerator where there is one.

    Args:
        policy: what to copy.
        max_batch: most requests decoded side by side.
        max_length: most tokens of a sequence.
    """
    from agentenv.inference.transformers_engine import TransformersEngine

    device = "cuda" if torch.cuda.is_available() else "cpu"
    return TransformersEngine(
        policy.model, policy.tokenizer, max_batch=max_batch, max_length=max_length, device=device
    )


def _registered(name: str, kwargs: Mapping[str, Any]) -> EnvFactory:
    return partial(agentenv.make, name, **kwargs)


def _factory(name: str, creator: Any, kwargs: Mapping[str, Any]) -> EnvFactory:
    if not callable(creator):
        raise UsageError(f"--env {name}: is a {type(creator).__name__}, must be a class or function")
    try:
        inspect.signature(creator).bind(**kwargs)
    except TypeError as error:
        raise UsageError(f"--env {name}: {error}") from None
    return partial(creator, **kwargs)


def _from_file(path: str, attribute: str, kwargs: Mapping[str, Any]) -> EnvFactory:
    name = f"{path}:{attribute}" if attribute else path
    file = Path(path).expanduser().resolve()
    if not file.is_file():
        raise UsageError(f"--env {path}: no such file")
    module, registered = _load_file(file, path, file.stat().st_mtime_ns)
    if attribute:
        return _factory(name, _attribute(module, attribute, name), kwargs)
    if len(registered) == 1:
        return _registered(registered[0], kwargs)
    classes = [
        value
        for value in vars(module).values()
        if isinstance(value, type)
        and issubclass(value, agentenv.BaseEnv)
        and value.__module__ == module.__name__
    ]
    if not registered and len(classes) == 1:
        return _factory(name, classes[0], kwargs)
    found = registered or [value.__name__ for value in classes]
    raise UsageError(
        f"--env {path}: must register or define exactly one environment, found {', '.join(found) or 'none'}"
        + (f"; name one: --env {path}:Class" if found else "")
    )


@cache
def _load_file(file: Path, name: str, modified_ns: int) -> tuple[ModuleType, list[str]]:
    """Run a file once, however often it is asked for; with the ids of the environments that it registered."""
    known = dict(gymnasium.registry)
    module_name = f"agentenv_user_{file.stem}"
    spec = importlib.util.spec_from_file_location(module_name, file)
    if spec is None or spec.loader is None:
        raise UsageError(f"--env {name}: can't be imported")
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    sys.path.insert(0, str(file.parent))
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise UsageError(f"--env {name}: {type(error).__name__} while importing it: {error}") from error
    return module, [id for id in registration.registered_ids() if gymnasium.registry[id] is not known.get(id)]


def _import(module: str, name: str) -> ModuleType:
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise UsageError(f"--env {name}: {error}") from error


def _attribute(module: ModuleType, attribute: str, name: str) -> Any:
    try:
        return getattr(module, attribute)
    except AttributeError:
        raise UsageError(f"--env {name}: {module.__name__} has no {attribute!r}") from None
