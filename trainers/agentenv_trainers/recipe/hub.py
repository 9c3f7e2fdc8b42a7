"""`--push_to_hub --hub_model_id NAME` of a recipe: the trained model and its card go to the Hugging Face hub.

Invariant: what can be known to be wrong (no token, no such name, no right to it) is found before training.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agentenv.errors import UsageError
from agentenv.interop.hub import open_repository, push_run
from agentenv.report import Progress

__all__ = ["HubTarget", "take_hub_target"]


@dataclass(frozen=True)
class HubTarget:
    """Where the model goes."""

    repository: str
    is_private: bool | None
    token: str | None = field(repr=False)

    def prepare(self) -> None:
        """Make the repository.

        Raises:
            UsageError: nothing can be pushed there.
        """
        open_repository(self.repository, private=self.is_private, token=self.token)

    def push(self, run: Path) -> None:
        """Push a run's model, and say where it is.

        Raises:
            InfrastructureError: the hub did not take it; the model is in the run's directory.
        """
        url = push_run(run, self.repository, private=self.is_private, token=self.token)
        Progress().note(f"pushed: {url}")


def take_hub_target(config: Any) -> HubTarget | None:
    """The options of a `TrainingArguments`, which is left without: transformers itself would push checkpoints.

    Raises:
        UsageError: they don't go together.
    """
    if not config.push_to_hub:
        if config.hub_model_id is not None:
            raise UsageError("--hub_model_id is for --push_to_hub")
        return None
    config.push_to_hub = False
    if not config.hub_model_id:
        raise UsageError("--push_to_hub needs --hub_model_id NAME, such as me/my-agent")
    return HubTarget(config.hub_model_id, config.hub_private_repo, config.hub_token)
