"""Baselines of SWE-v0 on its embedded tasks: an oracle, guess-and-test, and one edit at random.

They write single edits, as the demonstrators of the warm start do, by the protocol "bash".

Invariants:
- only `Oracle` reads which edits are right; the others know the values that the shown module could have instead;
- `Oracle` solves levels 1 to 3; on level 4, where a function has to be written, it writes the right module.
"""

import random
from collections.abc import Generator, Mapping
from typing import TYPE_CHECKING, Any, Final, cast

from agentenv.errors import UsageError

from .embedded.demonstrations import GUESS_AND_TEST, LOOK, Skill, demonstrate
from .embedded.tasks import MODULE, EmbeddedTask
from .protocols import SUBMIT, as_action
from .workspace import EmbeddedWorkspace

if TYPE_CHECKING:
    from .env import SWEEnv

__all__ = ["Oracle", "RandomEdit", "Scripted"]

_ANY_EDIT: Final = Skill(edit_right=0.0, test=0.0, retry=0.0)


class _Demonstrator:
    def __init__(self, env: "SWEEnv", seed: int) -> None:
        self.env = env
        self.rng = random.Random(seed)

    def begin(self, observation: str, info: Mapping[str, Any]) -> None:
        """Choose what to do by the task.

        Raises:
            UsageError: the task is not an embedded one, or the protocol is not "bash".
        """
        workspace = self.env.workspace
        if not isinstance(workspace, EmbeddedWorkspace):
            raise UsageError(f"policy {self._name!r} plays the embedded tasks of SWE-v0 only, not a data set")
        if self.env.protocol.name != "bash":
            raise UsageError(
                f"policy {self._name!r} speaks the protocol 'bash' only, not {self.env.protocol.name!r}"
            )
        self._actions = self._plan(workspace.task)
        self._has_begun = False

    def act(self, observation: str) -> str:
        if self._has_begun:
            return self._actions.send(observation)
        self._has_begun = True
        return next(self._actions)

    @property
    def _name(self) -> str:
        return type(self).__name__

    def _plan(self, task: EmbeddedTask) -> Generator[str, str, None]:
        """The actions; each is sent the observation that it led to."""
        raise NotImplementedError


class Oracle(_Demonstrator):
    """Makes the right edits and submits; where a function is gone, it writes the module anew."""

    def _plan(self, task: EmbeddedTask) -> Generator[str, str, None]:
        yield as_action(LOOK)
        if task.gold_edits:
            yield as_action(
                "; ".join(
                    f"sed -i '{edit.line}s/{edit.old}/{edit.new}/' {MODULE}" for edit in task.gold_edits
                )
            )
        else:
            yield as_action(f"cat >{MODULE} <<'EOF'\n{task.gold}EOF")
        yield as_action(SUBMIT)


class Scripted(_Demonstrator):
    """Guess and test: never reads the issue, tries up to four edits until the visible tests pass."""

    def _plan(self, task: EmbeddedTask) -> Generator[str, str, None]:
        return cast("Generator[str, str, None]", demonstrate(task, GUESS_AND_TEST, self.rng))


class RandomEdit(_Demonstrator):
    """One edit out of those that the shown module allows, submitted untested."""

    def _plan(self, task: EmbeddedTask) -> Generator[str, str, None]:
        return cast("Generator[str, str, None]", demonstrate(task, _ANY_EDIT, self.rng))
