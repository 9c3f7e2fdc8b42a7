"""Options of a recipe: one command line (or YAML file) over the recipe's own fields and the trainer's config.

A value is taken from the first place that has it: command line, YAML file of ``--config``, the run that is
resumed, the recipe's defaults for what was chosen, the field's default.

Invariants:
- A misspelt option or YAML key is an error that names the closest one; abbreviations are not accepted.
- Every mistake is a UsageError: one line, no usage text of two hundred options around it.
- Parsing writes nothing and loads no model.
"""

from __future__ import annotations

import argparse
import difflib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Literal, NoReturn, TypeVar

import torch
import yaml
from trl.scripts.utils import TrlParser

from agentenv.errors import UsageError
from agentenv.report.run_directory import read_json
from agentenv.trace import ChromeTrace, NoTrace
from agentenv_trainers.processes import processes_of_run
from agentenv_trainers.recipe.engines import EngineArguments
from agentenv_trainers.recipe.lora import LoraArguments
from agentenv_trainers.rollout_settings import setting

Arguments = TypeVar("Arguments", bound="RecipeArguments")
Config = TypeVar("Config")


@dataclass
class RecipeArguments(EngineArguments, LoraArguments):
    """What every recipe can be told, beside its trainer's config."""

    model: str = setting("embedded", "embedded, a model's folder, or its name on the Hugging Face hub.")
    env: str | None = setting(
        None,
        "What to train on: a registered id, module:Class, file.py or file.py:Class. Unset: the recipe's own.",
    )
    env_kwargs: str | None = setting(None, "Arguments of the environment, as JSON: '{\"levels\": [1]}'.")
    eval_env_kwargs: str | None = setting(
        None, "Arguments of the evaluated environment, as JSON, over those of --env_kwargs."
    )
    eval_episodes: int = setting(256, "Held-out episodes played before and after training, at temperature 1.")
    control: Literal["none", "shuffled_rewards"] = setting(
        "none",
        "shuffled_rewards: a control run that can learn nothing, each batch's rewards dealt out among its episodes "
        "anew; what still changes is drift.",
    )
    logged_trajectories: int | None = setting(
        None,
        "Training episodes of a step that trajectories.jsonl keeps; unset: all. Long episodes fill a disk.",
    )
    trace: bool = setting(
        False,
        "Write trace.json, what each environment, engine and the trainer did when: docs/timeline.md. "
        "It ends at 256 MiB.",
    )
    token_records: int = setting(
        16384,
        "Tokens of a training step, prompts included, whose log-probs, ratios, values and advantages tokens/ keeps: "
        "of its first episodes, at least one; 0: of none.",
    )
    token_records_mb: float = setting(
        256.0, "Room that tokens/ may take in all, in MB of 10^6 bytes; then no more is kept."
    )
    resume: bool = setting(
        False, "Go on with the run in --output_dir, with its settings, from its last checkpoint."
    )
    smoke: bool = setting(
        False, "The whole way at a tiny size, to see that it works; its numbers mean nothing."
    )
    quiet: bool = setting(False, "No progress on stderr; results, warnings and errors stay.")
    log_format: Literal["text", "json"] = setting("text", "Of stderr: text, or one JSON object a line.")

    def __post_init__(self) -> None:
        if self.eval_episodes < 1:
            raise UsageError(f"--eval_episodes is {self.eval_episodes}, must be at least 1")
        if self.logged_trajectories is not None and self.logged_trajectories < 0:
            raise UsageError(f"--logged_trajectories is {self.logged_trajectories}, must not be negative")
        if self.token_records < 0:
            raise UsageError(f"--token_records is {self.token_records}, must not be negative")
        if not self.token_records_mb > 0.0:
            raise UsageError(f"--token_records_mb is {self.token_records_mb}, must be positive")
        self.env_options, self.eval_env_options  # noqa: B018 - refuses what is not JSON

    def new_trace(self) -> ChromeTrace | NoTrace:
        """What the run's events go to; not opened yet."""
        return ChromeTrace() if self.trace else NoTrace()

    @property
    def env_options(self) -> dict[str, Any]:
        """Arguments of the training environment."""
        return parse_json_object("--env_kwargs", self.env_kwargs)

    @property
    def eval_env_options(self) -> dict[str, Any]:
        """Arguments of the evaluated environment."""
        return {**self.env_options, **parse_json_object("--eval_env_kwargs", self.eval_env_kwargs)}


@dataclass
class Parsed(Generic[Arguments, Config]):
    """The result of :func:`parse`."""

    arguments: Arguments
    config: Config
    given: dict[str, Any]
    """What the user set, on the command line, in YAML or in the run that is resumed."""
    chosen: frozenset[str]
    """Names of the options that the user or the recipe set; the others have their field's default."""

    @property
    def is_main_process(self) -> bool:
        """Whether this process plays and reports; with several the others only train."""
        return processes_of_run().is_main_process


def parse(
    arguments_type: type[Arguments],
    config_type: type[Config],
    argv: Sequence[str] | None,
    *,
    defaults: Callable[[Mapping[str, Any]], Mapping[str, Any]],
    description: str,
    several_processes: bool = False,
) -> Parsed[Arguments, Config]:
    """Read the options.

    Args:
        arguments_type: the recipe's own fields.
        config_type: the trainer's config, a ``transformers.TrainingArguments``.
        argv: arguments without the program's name; those of the process by default.
        defaults: the recipe's defaults for what the user set (``given``); they stand below everything given.
        description: first part of ``--help``.
        several_processes: whether the recipe works under a launcher of several processes.

    Raises:
        UsageError: any mistake in the options.
        SystemExit: ``--help`` was asked for.
    """
    _check_launcher(several_processes)
    parser = _Parser([arguments_type, config_type], description=description)
    given = parser.read(argv)
    if given.get("resume"):
        if "output_dir" not in given:
            raise UsageError("--resume needs the run's --output_dir")
        earlier = read_json(Path(given["output_dir"]) / "run.json").get("given")
        given = {**(earlier if isinstance(earlier, dict) else {}), **given}
    values = {**_for_this_machine(), **defaults(given), **given}
    arguments, config = parser.build(values)
    arguments.check_lora(has_critic=getattr(config, "advantage", None) == "gae")
    return Parsed(arguments, config, given, frozenset(values))


def parse_json_object(name: str, text: str | None) -> dict[str, Any]:
    """The JSON object in an option, empty where the option is unset.

    Raises:
        UsageError: the text is no JSON object.
    """
    if text is None:
        return {}
    try:
        value = json.loads(text)
    except ValueError as error:
        raise UsageError(
            f"{name} is {text!r}, which is not valid JSON such as '{{\"levels\": [1]}}' ({error})"
        ) from None
    if not isinstance(value, dict):
        raise UsageError(f"{name} is {text!r}, must be a JSON object like '{{\"levels\": [1]}}'")
    return value


class _HelpFormatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Example commands keep their lines."""


class _Parser(TrlParser):
    """TRL's parser, strict, and with the sources of values kept apart."""

    def __init__(self, types: Sequence[Any], *, description: str) -> None:
        super().__init__(
            types,
            allow_abbrev=False,
            usage="%(prog)s [--OPTION VALUE ...]",
            description=description,
            formatter_class=_HelpFormatter,
        )
        self.add_argument("--config", metavar="FILE", help="YAML file with any of these options.")
        self._by_name = {
            action.dest: action for action in self._actions if action.dest not in ("help", "config")
        }

    def error(self, message: str) -> NoReturn:
        raise UsageError(message)

    def read(self, argv: Sequence[str] | None) -> dict[str, Any]:
        """The values that the user set, typed; the command line over YAML."""
        # A default cannot be told from the same value given: so parse without defaults.
        saved = {action: action.default for action in self._actions}
        for action in self._actions:
            action.default = argparse.SUPPRESS
        try:
            namespace, unknown = self.parse_known_args(argv)
        finally:
            for action, default in saved.items():
                action.default = default
        if unknown:
            option = unknown[0].split("=")[0]
            if not option.startswith("-"):
                raise UsageError(f"unexpected argument {unknown[0]!r}")
            raise UsageError(
                f"unknown option {option}{self._hint(option.lstrip('-').replace('-', '_'), '--')}"
            )
        values = vars(namespace)
        path = values.pop("config", None)
        return {**(self._read_yaml(path) if path is not None else {}), **values}

    def build(self, values: Mapping[str, Any]) -> tuple[Any, ...]:
        """Make the dataclasses from values over the fields' defaults."""
        results = []
        for dataclass_type in self.dataclass_types:
            names = dataclass_type.__dataclass_fields__
            try:
                results.append(
                    dataclass_type(**{name: value for name, value in values.items() if name in names})
                )
            except UsageError:
                raise
            except (ValueError, TypeError) as error:
                raise UsageError(f"{dataclass_type.__name__}: {error}") from error
        return tuple(results)

    def _read_yaml(self, path: str) -> dict[str, Any]:
        try:
            content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
        except OSError as error:
            raise UsageError(f"--config {path}: {error.strerror}") from None
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            raise UsageError(f"--config {path}: not valid YAML ({' '.join(str(error).split())})") from None
        if not isinstance(content, dict):
            raise UsageError(
                f"--config {path}: must hold a mapping of options, found {type(content).__name__}"
            )
        if isinstance(content.get("env"), dict):
            # TRL's custom: a mapping under `env` sets environment variables. A text names the environment.
            os.environ.update({str(name): str(value) for name, value in content.pop("env").items()})
        for name in content:
            if name not in self._by_name:
                raise UsageError(f"--config {path}: unknown option {name!r}{self._hint(str(name), '')}")
        return {name: self._typed(path, name, value) for name, value in content.items()}

    def _typed(self, path: str, name: str, value: Any) -> Any:
        """A YAML value as the command line would read it: YAML takes 1e-5 for a text."""
        action = self._by_name[name]
        if value is None:
            return None
        if isinstance(value, dict):
            return json.dumps(value) if name.endswith("kwargs") and action.type is str else value
        try:
            if isinstance(value, list):
                return [self._get_value(action, str(item)) for item in value]
            typed = self._get_value(action, str(value))
            self._check_value(action, typed)
        except Exception as error:
            raise UsageError(f"--config {path}: {name}: {error}") from None
        return typed

    def _hint(self, name: str, prefix: str) -> str:
        close = difflib.get_close_matches(name, self._by_name, n=1, cutoff=0.7)
        return f"; did you mean {prefix}{close[0]}?" if close else "; --help lists them all"


def _check_launcher(several_processes: bool) -> None:
    """Whether the program was launched as it works.

    Raises:
        UsageError: in several processes where it needs one, or in one where several were asked for.
    """
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    if processes > 1 and not several_processes:
        raise UsageError(
            f"this recipe runs in one process, WORLD_SIZE is {processes}: start it without torchrun or accelerate "
            "launch"
        )
    if "MASTER_PORT" in os.environ and "WORLD_SIZE" not in os.environ and "ACCELERATE_USE_CPU" in os.environ:
        raise UsageError(
            "accelerate launch --cpu --num_processes N starts a single process (it leaves more to MPI): give "
            "--multi_gpu instead of --cpu, which starts N also where there is no GPU"
        )


def _for_this_machine() -> dict[str, Any]:
    """What fits the machine and the launcher, where TRL's defaults do not."""
    settings: dict[str, Any] = {}
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        # The others wait while the main process evaluates; the launcher notices one that died.
        settings["ddp_timeout"] = 7 * 24 * 3600
    if not torch.cuda.is_available():
        # bf16 and recomputed activations fail or only cost time.
        settings |= {"use_cpu": True, "bf16": False, "gradient_checkpointing": False}
    return settings
