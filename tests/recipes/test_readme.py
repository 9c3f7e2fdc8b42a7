"""What README and docs show works as it is shown."""

import json
import re
import shlex
from functools import partial

import pytest

import agentenv
from agentenv import cli
from agentenv.errors import UsageError
from agentenv.testing import check_env
from agentenv_trainers.recipe import DataSetArguments, HouseholdArguments, find_environment, parse, run_recipe
from agentenv_trainers.sao import SAOConfig


@pytest.fixture(scope="module")
def texts(repository):
    """README and docs, by name."""
    paths = [
        repository / "README.md",
        repository / "recipes" / "README.md",
        *sorted((repository / "docs").glob("*.md")),
    ]
    return {str(path.relative_to(repository)): path.read_text(encoding="utf-8") for path in paths}


@pytest.fixture
def examples(texts, tmp_path):
    """Writes the files that the texts show, each marked by a comment with its name."""
    for text in texts.values():
        for name, content in re.findall(r"<!-- example: (\S+) -->\n```\w*\n(.*?)```", text, re.S):
            (tmp_path / name).write_text(content)
    return tmp_path


def test_the_environment_of_the_readme_is_twenty_lines_and_keeps_the_contract(examples):
    source = (examples / "guess.py").read_text()
    assert len([line for line in source.splitlines() if line.strip()]) <= 20
    env = find_environment(str(examples / "guess.py"))()
    check_env(env)
    assert agentenv.spec("Guess-v0").id == "agentenv/Guess-v0"


def test_the_environment_of_the_readme_can_be_won_and_lost(examples):
    env = find_environment(str(examples / "guess.py"))()
    low, high, turns, terminated = 1, 9, 0, False
    env.reset(seed=3)
    while not terminated:
        guess = (low + high) // 2
        answer, reward, terminated, truncated, info = env.step(f"I say {guess}.")
        low, high = (guess + 1, high) if answer == "higher" else (low, guess - 1)
        turns += 1
    assert (answer, reward, truncated, info["success"]) == ("right", 1.0, False, True)
    assert turns <= 4
    assert env.reset(seed=3)[1] == env.reset(seed=3)[1]


def test_the_environment_of_the_readme_trains(examples, swe_sao, tiny_policy, monkeypatch):
    monkeypatch.chdir(examples)
    argv = ["--env", "guess.py", "--smoke", "--output_dir", "out", "--max_tokens_per_turn", "6", "--model"]
    argv.append(str(tiny_policy))
    assert run_recipe(swe_sao.main, argv) == 0
    summary = json.loads((examples / "out" / "summary.json").read_text())
    assert summary["steps"] == 2
    assert summary["after"]["episodes"] == 4
    episodes = [
        json.loads(line) for line in (examples / "out" / "trajectories.jsonl").read_text().splitlines()
    ]
    assert max(episode["turns"] for episode in episodes) == 6  # as the environment advises


def test_the_environment_of_the_page_on_online_learning_trains(
    examples, online_learning, tiny_policy, monkeypatch
):
    monkeypatch.chdir(examples)
    check_env(find_environment("sums.py")())
    env = find_environment("sums.py")()
    a, b = map(int, re.findall(r"\d+", env.reset(seed=1)[0]))
    assert env.step(f"{a + b}")[4] == {"quality": 1, "style": "terse"}
    env.reset(seed=1)
    assert env.step(f"It is {a + b}.")[4] == {"quality": 1, "style": "wordy"}
    env.reset(seed=1)
    assert env.step(f"{a + b} or {a}")[4]["quality"] == 0
    argv = ["--env", "sums.py", "--styles", "terse", "wordy", "--smoke", "--output_dir", "out"]
    argv += ["--max_tokens_per_turn", "6", "--advantage", "gae", "--model", str(tiny_policy)]
    assert run_recipe(online_learning.main, argv) == 0
    assert json.loads((examples / "out" / "summary.json").read_text())["steps"] == 4


SMALL = {
    "max_steps": 2,
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 1,
    "num_envs": 4,
    "eval_episodes": 4,
    "value_pretrain_episodes": 4,
    "max_tokens_per_turn": 6,
}
"""In the place of the sizes of train.yaml."""


def test_what_agentenv_new_writes_trains(swe_sao, tiny_policy, monkeypatch, tmp_path):
    """As docs/own-environment.md shows it, at a tiny size."""
    monkeypatch.chdir(tmp_path)
    assert cli.main(["new", "trained_walk"]) == 0
    monkeypatch.syspath_prepend(tmp_path / "trained_walk")
    argv = ["--config", "trained_walk/train.yaml", "--env", "trained_walk:TrainedWalkEnv"]
    argv += ["--env_kwargs", '{"size": 2}', "--model", str(tiny_policy)]
    argv += [word for name, value in SMALL.items() for word in (f"--{name}", str(value))]
    assert run_recipe(swe_sao.main, argv) == 0
    summary = json.loads((tmp_path / "runs" / "trained_walk" / "summary.json").read_text())
    assert (summary["steps"], summary["after"]["episodes"]) == (2, 4)


def test_the_data_set_of_the_page_on_own_environments_is_split_and_played(examples, texts, monkeypatch):
    monkeypatch.chdir(examples)
    rows = re.findall(r"^echo '(\{.*\})' >", texts["docs/own-environment.md"], re.M)
    (examples / "questions.jsonl").write_text("\n".join(rows))
    options = {"file": "questions.jsonl"}
    check_env(find_environment("questions.py", options)(), actions=["Rome", "It is Paris."])
    env = find_environment("questions.py", options | {"split": "heldout"})()
    assert env.reset(seed=2**31)[0] == "What is the capital of Peru?"
    assert env.step("Lima")[1:4] == (1.0, True, False)
    with pytest.raises(UsageError, match="has no row of split 'test'"):
        find_environment("questions.py", options | {"split": "test"})


def shown(texts, recipe):
    """The arguments of every command of a recipe that is shown; other recipes: tests/docs."""
    return [
        shlex.split(line, comments=True)[2:]
        for text in texts.values()
        for block in re.findall(r"```bash\n(.*?)```", text, re.S)
        for line in block.splitlines()
        if line.startswith(f"python recipes/{recipe}.py")
    ]


def test_every_command_of_online_learning_that_is_shown_is_accepted(
    texts, examples, online_learning, monkeypatch
):
    monkeypatch.chdir(examples)
    commands = shown(texts, "online_learning")
    assert len(commands) >= 3
    for argv in commands:
        parsed = parse(
            online_learning.OnlineArguments,
            SAOConfig,
            argv,
            defaults=partial(online_learning.defaults, advantage="gae", output_dir="out"),
            description="",
        )
        assert parsed.config.max_steps >= parsed.arguments.phase_steps


def test_every_option_that_is_named_exists(texts, swe_sao, online_learning, repository):
    recipes = (swe_sao.SWEArguments, online_learning.OnlineArguments)
    fields = {name for arguments in recipes for name in arguments.__dataclass_fields__}
    for path in (repository / "recipes").glob("*.py"):  # some need an extra to be imported
        fields |= set(re.findall(r"^    (\w+): .* = setting\(", path.read_text(), re.M))
    fields |= {*DataSetArguments.__dataclass_fields__, *HouseholdArguments.__dataclass_fields__}
    fields |= {*SAOConfig.__dataclass_fields__, "config", "help"}
    named = {
        option.replace("-", "_")
        for text in texts.values()
        for option in re.findall(r"(?<![\w-])--([a-z][a-z_-]*[a-z])", text)
    }
    commands = {
        option.replace("-", "_")
        for folder in ("agentenv", "benchmarks", "envs")
        for path in (repository / folder).rglob("*.py")
        for option in re.findall(r'add_argument\(\s*"--([\w-]+)"', path.read_text())
    }
    # Options of other programs: the curve, compose, the simulation, accelerate launch, Django's test runner.
    others = {"verbose", "json", "sandbox", "svg", "rm", "profile", "build_arg", "plot"}
    others |= {"config_file", "multi_gpu", "num_processes", "cpu", "shm_size"}
    # Ray's, Slurm's, curl's, and more of accelerate's.
    others |= {
        "head",
        "block",
        "num_gpus",
        "generate",
        "job_name",
        "nodes",
        "ntasks",
        "nodelist",
        "gpus_per_node",
    }
    others |= {"gpus_per_task", "kill_on_bad_exit", "time", "silent", "fail"}
    others |= {"num_machines", "machine_rank", "main_process_ip", "main_process_port"}
    others |= {"mixed_precision", "dynamo_backend"}
    # vLLM's own, and families of ours that are written --vllm_... and --weight_...
    others |= {"api_key", "dtype", "enforce_eager", "generation_config", "logprobs_mode", "max_model_len"}
    others |= {"gpu_memory_utilization", "tensor_parallel_size", "weight_transfer_config", "vllm", "weight"}
    others |= {"no_enable_chunked_prefill", "enable_lora", "max_lora_rank"}
    assert named - others <= fields | commands, named - others - fields - commands


def test_every_file_that_is_linked_exists(texts, repository):
    missing = [
        f"{name} -> {target}"
        for name, text in texts.items()
        for target in re.findall(r"\]\(([^)#]+)", text)
        if "://" not in target and not ((repository / name).parent / target).exists()
    ]
    assert missing == []
