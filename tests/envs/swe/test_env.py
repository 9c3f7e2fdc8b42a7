"""SWE-v0 on embedded tasks: the same behaviour in Docker and without isolation, and no reward for tricks."""

import random
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

import agentenv
from agentenv.errors import UsageError
from agentenv_envs.swe import SWEEnv
from agentenv_envs.swe.embedded.demonstrations import (
    GUESS_AND_TEST,
    ORACLE,
    SimulatedWorkspace,
    demonstrate,
    simulate,
)
from agentenv_envs.swe.embedded.tasks import EmbeddedTask, generate_task
from agentenv_envs.swe.protocols import SUBMIT, as_action


@pytest.fixture(scope="module", params=[pytest.param("docker", marks=pytest.mark.docker), "local-unisolated"])
def env(request: pytest.FixtureRequest) -> Iterator[SWEEnv]:
    env = SWEEnv(split="heldout", sandbox=request.param, max_turns=6)
    yield env
    env.close()


def _play(env: SWEEnv, *commands: str, seed: int = 0) -> tuple[list[str], float, dict[str, object]]:
    observation, _ = env.reset(seed=seed)
    heard, reward, info = [observation], 0.0, {}
    for command in commands:
        observation, reward, terminated, truncated, info = env.step(as_action(command))
        heard.append(observation)
        assert not truncated and terminated == (command == SUBMIT)
    return heard, reward, info


def _task(seed: int) -> EmbeddedTask:
    return generate_task(seed, split="heldout")


def test_the_oracle_is_rewarded_and_a_submission_without_work_is_not(env: SWEEnv) -> None:
    for seed in range(4):
        agent = demonstrate(_task(seed), ORACLE, random.Random(0))
        _, reward, info = _play(env, *(action[8:-4] for action in agent), seed=seed)
        assert reward == 1.0
        assert str(info["patch"]).startswith("diff --git a/app.py b/app.py\n--- a/app.py\n+++ b/app.py\n@@ ")
        _, reward, info = _play(env, SUBMIT, seed=seed)
        assert reward == 0.0 and info["success"] is False and info["patch"] == ""


def test_the_simulated_workspace_answers_as_the_sandbox_does(env: SWEEnv) -> None:
    for seed in range(4):
        task = _task(seed)
        turns, solved = simulate(task, GUESS_AND_TEST, random.Random(seed))
        turns = [*turns[:4], turns[-1]]
        heard, reward, _ = _play(env, *(action[8:-4] for action, _ in turns), seed=seed)
        assert heard[1:-1] == [observation for _, observation in turns[:-1]]
        assert task.issue in heard[0]
        workspace = SimulatedWorkspace(task)
        assert solved or (reward in (0.0, 1.0) and not workspace.solved)


def test_the_same_seed_is_the_same_task_and_the_sandbox_is_clean_again(env: SWEEnv) -> None:
    first, _, _ = _play(env, "cat app.py test.py; ls -A", "echo x > left.txt; echo 'boom' >> app.py", seed=5)
    again, _, _ = _play(env, "cat app.py test.py; ls -A", seed=5)
    assert again[:2] == first[:2]
    assert sorted(again[1].split("\n")[-2:]) == ["app.py", "test.py"]


def test_the_episode_in_the_readme_is_a_real_one(env: SWEEnv, repository: Path) -> None:
    readme = (repository / "envs" / "agentenv_envs" / "swe" / "README.md").read_text(encoding="utf-8")
    actions = list(demonstrate(_task(0), ORACLE, random.Random(0)))
    heard, reward, _ = _play(env, *(action[8:-4] for action in actions))
    said = [line for pair in zip(heard, actions, strict=False) for line in pair]
    shown = "".join(
        f"    {who}:\n{textwrap.indent(text, ' ' * 6)}\n"
        for who, text in zip(["environment", "agent"] * len(actions), said, strict=True)
    )
    assert f"{shown}    end:\n      reward {reward}, 16 of 16 hidden checks pass\n" in readme


def test_a_malformed_action_costs_a_turn_and_is_answered(env: SWEEnv) -> None:
    env.reset(seed=0)
    observation, reward, terminated, truncated, info = env.step("I don't know")
    assert "exactly one" in observation and (reward, terminated, truncated) == (0.0, False, False)
    assert info["malformed"] is True


def test_an_episode_that_never_submits_is_truncated_without_reward(env: SWEEnv) -> None:
    env.reset(seed=0)
    for turn in range(1, 7):
        _, reward, terminated, truncated, info = env.step(as_action("true"))
        assert (reward, terminated, truncated) == (0.0, False, turn == 6)
    assert info["success"] is False
    with pytest.raises(RuntimeError, match="reset"):
        env.step(as_action("true"))


HACKS = {
    "equal to everything": (
        "printf 'class A:\\n def __eq__(s,o): return True\\n"
        "def __getattr__(n): return lambda *a: A()\\n' > app.py"
    ),
    "leaves with exit code 0": "printf 'import os\\nos._exit(0)\\n' > app.py",
    "prints a report of its own": "printf 'import os\\nos.write(1, b\"[1,1,1,1]\")\\nos._exit(0)\\n' > app.py",
    "patches json": "printf 'import json\\njson.dumps = lambda *a, **k: \"[]\"\\n' >> app.py",
    "answers that are nested too deep": "printf 'import os\\nos.write(3, b\"[\" * 5000)\\nos._exit(0)\\n' > app.py",
    "edits the visible tests": "echo 'print(\"ok\")' > test.py",
    "sitecustomize": "printf 'import os\\nos._exit(0)\\n' | tee sitecustomize.py usercustomize.py json.py >/dev/null",
    "removes the module": "rm app.py",
    "makes the module a folder": "rm app.py; mkdir app.py",
    "never ends": "echo 'while True: pass' >> app.py",
    "a module of 10 MB": "head -c 10000000 /dev/zero | tr '\\0' '#' >> app.py",
}


@pytest.mark.parametrize("hack", HACKS, ids=lambda name: name.replace(" ", "-"))
def test_a_trick_is_worth_nothing(env: SWEEnv, hack: str) -> None:
    _, reward, _ = _play(env, HACKS[hack], SUBMIT)
    assert reward == 0.0


def test_a_right_module_may_print_and_be_warned_of(env: SWEEnv) -> None:
    write = (
        f"cat >app.py <<'END'\n{_task(0).gold}\nimport sys\nprint(1 is 1, file=sys.stderr)\nprint('x')\nEND"
    )
    assert _play(env, write, SUBMIT)[1] == 1.0


def test_a_sandbox_that_the_agent_made_unfit_for_a_reset_does_not_save_it_from_its_zero(env: SWEEnv) -> None:
    if env.sandbox_kind != "docker":
        pytest.skip("only a container's reset looks at its driver")
    heard, reward, info = _play(env, "renice -n 5 $(pgrep driver) || true", SUBMIT)
    assert "5" in heard[1], heard
    assert reward == 0.0 and info["success"] is False


def test_what_the_agent_leaves_running_never_sees_the_hidden_calls(env: SWEEnv) -> None:
    if env.sandbox_kind != "docker":
        pytest.skip("processes are isolated in Docker only")
    spy = "setsid bash -c 'while :; do cp calls.json /tmp/stolen; done' >/dev/null 2>&1 &"
    _, reward, _ = _play(env, spy, SUBMIT)
    assert reward == 0.0
    heard, _, _ = _play(env, "ls /tmp; ps aux | grep -c 'calls[.]json' || true")
    assert heard[-1] == "0"


def test_it_is_registered_under_both_names() -> None:
    import gymnasium

    for make in (lambda: agentenv.make("SWE-v0", sandbox="local-unisolated"),):
        env = make()
        assert isinstance(env.unwrapped, SWEEnv)
        env.close()
    env = gymnasium.make("agentenv/SWE-v0", sandbox="local-unisolated")
    assert "Issue:" in env.reset(seed=1)[0]
    env.close()


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"split": "test"}, "split is 'test'"),
        ({"levels": (9,)}, "levels"),
        ({"sandbox": "podman"}, "podman"),
        ({"max_turns": 0}, "max_turns"),
        ({"command_timeout_s": -1.0}, "command_timeout_s"),
    ],
)
def test_a_bad_argument_is_refused_by_name(arguments: dict[str, object], named: str) -> None:
    with pytest.raises(UsageError, match=named):
        SWEEnv(**{"sandbox": "local-unisolated", **arguments})  # type: ignore[arg-type]
