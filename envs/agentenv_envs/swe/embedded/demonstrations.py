"""Scripted agents for the embedded tasks: an oracle, a guess-and-test baseline, a mediocre demonstrator.

They act by the environment's protocol, as a model does. `SimulatedWorkspace` answers the few commands
they use as the sandbox would (a test holds the two against each other), so that tens of thousands of
demonstrations for the warm start cost seconds. It only ever runs modules that this package generated.

The demonstrator is mediocre on purpose and in ways that reinforcement learning can mend: it often edits the
wrong place or writes the wrong thing, it often submits without a test, and it often gives up after a failed one.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from agentenv_envs.swe.protocols import SUBMIT, as_action, format_observation

from .tasks import MODULE, TEST_COMMAND, TEST_SCRIPT, Edit, EmbeddedTask

LOOK: Final = f"cat -n {MODULE}"
_BACKUP = f"{MODULE}.bak"


def first_edit(edit: Edit) -> str:
    """The command that makes an edit and keeps a copy of the file as it was."""
    return f"sed -i.bak '{edit.line}s/{edit.old}/{edit.new}/' {MODULE}"


def next_edit(edit: Edit) -> str:
    """The command that makes an edit on the copy, so that the edit before it is undone."""
    return f"sed '{edit.line}s/{edit.old}/{edit.new}/' {_BACKUP} >{MODULE}"


class SimulatedWorkspace:
    """Answers the demonstrators' commands as a sandbox with the task's files would."""

    def __init__(self, task: EmbeddedTask) -> None:
        self.task = task
        self.source = task.files[MODULE]

    @property
    def solved(self) -> bool:
        return self.source == self.task.gold

    def look(self) -> str:
        lines = self.source.rstrip("\n").split("\n")
        return format_observation("".join(f"{i:6d}\t{text}\n" for i, text in enumerate(lines, 1)), 0)

    def edit(self, edit: Edit) -> str:
        """Both forms of an edit start from the module as it was at first."""
        self.source = edit.apply(self.task.files[MODULE])
        return format_observation("", 0)

    def test(self) -> str:
        output, code = run_test_script(self.source, self.task.files[TEST_SCRIPT])
        return format_observation(output, code)


def run_test_script(source: str, script: str) -> tuple[str, int]:
    """Output and exit code of the visible tests on a generated module, in this process."""
    namespace: dict[str, object] = {}
    exec(compile(source, MODULE, "exec"), namespace)
    body = script.split("\n\n", 2)[2]  # without its imports
    printed: list[str] = []
    scope = {**namespace, "sys": _Exit, "print": printed.append}
    try:
        exec(compile(body, TEST_SCRIPT, "exec"), scope)
    except _Exit.Ended as ended:
        return f"{ended}\n", 1
    return "".join(f"{line}\n" for line in printed), 0


class _Exit:
    """Stands for the module sys in the simulated test script: only exit is used there."""

    class Ended(BaseException):
        pass

    @staticmethod
    def exit(message: str) -> None:
        raise _Exit.Ended(message)


@dataclass(frozen=True)
class Skill:
    """How good a demonstrator is: probabilities of doing the right thing at each choice.

    Args:
        edit_right: that an edit is a right one; otherwise any other candidate, evenly.
        test: that it runs the tests after an edit instead of submitting at once.
        retry: that it tries again after a failed test instead of submitting all the same.
        max_edits: how often it edits at most.
    """

    edit_right: float
    test: float
    retry: float
    max_edits: int = 4


#: Where the warm start of the embedded policy comes from.
MEDIOCRE: Final = Skill(edit_right=0.4, test=0.45, retry=0.45)
#: Never reads the issue: any candidate edit, always tested, until the tests pass.
GUESS_AND_TEST: Final = Skill(edit_right=0.0, test=1.0, retry=1.0)
ORACLE: Final = Skill(edit_right=1.0, test=0.0, retry=0.0)


def demonstrate(task: EmbeddedTask, skill: Skill, rng: random.Random) -> Iterator[str]:
    """The demonstrator's actions, one by one; send it each observation.

    A generator: `next` gives the first action, `send(observation)` each further one. On a task with more than
    one gold edit it works as if each edit were the only one, which can't solve the task; it never meets level 4.
    """
    yield as_action(LOOK)
    tried: list[Edit] = []
    while True:
        edit = _choose(task, skill, rng, tried)
        yield as_action(next_edit(edit) if tried else first_edit(edit))
        tried.append(edit)
        if rng.random() >= skill.test:
            break
        observation = yield as_action(TEST_COMMAND)
        if observation == "ok" or len(tried) >= skill.max_edits or rng.random() >= skill.retry:
            break
    yield as_action(SUBMIT)


def _choose(task: EmbeddedTask, skill: Skill, rng: random.Random, tried: list[Edit]) -> Edit:
    """A right edit with the skill's probability, else another candidate that was not tried yet."""
    right = [edit for edit in task.gold_edits if edit not in tried]
    if right and rng.random() < skill.edit_right:
        return rng.choice(right)
    reads = skill.edit_right > 0
    wrong = [e for e in task.candidate_edits if e not in tried and not (reads and e in task.gold_edits)]
    return rng.choice(wrong or list(task.candidate_edits))


def simulate(task: EmbeddedTask, skill: Skill, rng: random.Random) -> tuple[list[tuple[str, str]], bool]:
    """A whole demonstration: (action, observation) pairs, the last without observation, and whether it solved."""
    workspace = SimulatedWorkspace(task)
    agent = demonstrate(task, skill, rng)
    turns: list[tuple[str, str]] = []
    action = next(agent)
    while True:
        observation = _answer(workspace, task, action)
        turns.append((action, observation))
        if action == as_action(SUBMIT):
            return turns, workspace.solved
        action = agent.send(observation)  # type: ignore[attr-defined]


def _answer(workspace: SimulatedWorkspace, task: EmbeddedTask, action: str) -> str:
    if action == as_action(LOOK):
        return workspace.look()
    if action == as_action(TEST_COMMAND):
        return workspace.test()
    for edit in task.candidate_edits:
        if action in (as_action(first_edit(edit)), as_action(next_edit(edit))):
            return workspace.edit(edit)
    return ""
