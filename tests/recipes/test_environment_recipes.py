"""The recipes of households, the shop and mathematics: the whole way at a tiny size, their settings, bad input."""

import json

import pytest

from agentenv_trainers.recipe import run_recipe

RECIPES = ["alfworld_sao", "alfworld_grpo", "shop_sao", "math_tir_sao", "math_rlvr_grpo"]
NEEDS = {
    "shop_sao": ["bm25s", "rapidfuzz"],
    "alfworld_sao": ["alfworld", "textworld"],
    "alfworld_grpo": ["alfworld", "textworld"],
}
OPTIONS = {"math_tir_sao": ["--sandbox", "local-unisolated"]}


@pytest.fixture(params=RECIPES)
def recipe(request, load_program):
    for package in NEEDS.get(request.param, []):
        pytest.importorskip(package)
    return load_program(f"recipes/{request.param}.py")


@pytest.fixture
def rlvr(load_program):
    return load_program("recipes/math_rlvr_grpo.py")


@pytest.fixture
def refused(tmp_path, monkeypatch, capsys):
    """Runs a recipe with bad input and returns the one line that it says."""
    monkeypatch.chdir(tmp_path)

    def run(recipe, *argv):
        before = sorted(tmp_path.rglob("*"))
        assert run_recipe(recipe.main, [str(item) for item in argv]) == 2
        lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
        assert len(lines) == 1
        assert sorted(tmp_path.rglob("*")) == before
        return lines[0]

    return run


def test_it_runs_to_its_end_and_can_be_resumed(recipe, tiny_policy, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    argv = ["--smoke", "--model", str(tiny_policy), *OPTIONS.get(recipe.RECIPE.name, [])]
    argv += ["--output_dir", "out", "--max_tokens_per_turn", "6", "--max_tokens_per_episode", "4000"]
    assert run_recipe(recipe.main, argv) == 0
    out = tmp_path / "out"
    summary = json.loads((out / "summary.json").read_text())
    assert (summary["status"], summary["steps"]) == ("finished", 2)
    assert summary["after"]["episodes"] == 4
    assert (out / "report.html").is_file()
    lines = [json.loads(line) for line in (out / "trajectories.jsonl").read_text().splitlines()]
    tasks = {
        phase: {line["task_id"] for line in lines if line["phase"] == phase} for phase in ("before", "train")
    }
    assert tasks["before"] and not tasks["before"] & tasks["train"]
    assert run_recipe(recipe.main, ["--output_dir", "out", "--resume", "--max_steps", "3"]) == 0
    assert json.loads((out / "summary.json").read_text())["steps"] == 3


def test_the_presets_of_the_papers_win_over_the_recipes_settings_and_the_users_over_both(recipe):
    config = recipe.RECIPE.parse(["--model", "mine", "--preset", "math"]).config
    assert config.trajectories_per_step == 128
    assert (config.max_turns, config.max_tokens_per_episode) == (50, 131072)
    config = recipe.RECIPE.parse(["--model", "mine", "--preset", "math", "--max_turns", "3"]).config
    assert config.max_turns == 3
    if recipe.RECIPE.name == "math_tir_sao":
        assert (config.clip_low, config.clip_high) == (0.3, 5.0)


def test_its_help_begins_with_commands_that_it_takes(recipe):
    commands = [
        line.split("--smoke")[0] for line in (recipe.__doc__ or "").splitlines() if "python recipes/" in line
    ]
    assert len(commands) >= 3
    assert all(f"python recipes/{recipe.RECIPE.name}.py" in line for line in commands)


def test_rlvr_filters_groups_that_teach_nothing_and_fills_its_batches_all_the_same(
    rlvr, vowels, tiny_policy, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    argv = ["--env", "vowels.py", "--model", str(tiny_policy), "--output_dir", "out", "--max_steps", "3"]
    argv += ["--per_device_train_batch_size", "8", "--gradient_accumulation_steps", "1", "--group_size", "4"]
    argv += [
        "--redundant_groups",
        "1",
        "--num_envs",
        "12",
        "--eval_episodes",
        "4",
        "--max_tokens_per_turn",
        "6",
    ]
    assert run_recipe(rlvr.main, [*argv, "--max_tokens_per_episode", "200"]) == 0
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert summary["args"]["filter_zero_variance"] is True
    assert summary["args"]["prompt_replication"] is True
    assert summary["episodes"]["consumed"] == 24
    groups = {}
    for line in (tmp_path / "out" / "trajectories.jsonl").read_text().splitlines():
        episode = json.loads(line)
        if episode["phase"] == "train":
            groups.setdefault((episode["step"], episode["seed"]), set()).add(episode["reward"])
    assert all(len(rewards) > 1 for rewards in groups.values())


def test_a_data_set_is_trained_and_evaluated_on_without_overlap(rlvr, tiny_policy, tmp_path, monkeypatch):
    pytest.importorskip("math_verify")
    monkeypatch.chdir(tmp_path)
    rows = [{"problem": f"What is {n} + 1?", "answer": str(n + 1)} for n in range(60)]
    (tmp_path / "sums.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    argv = ["--smoke", "--model", str(tiny_policy), "--dataset", "sums.jsonl", "--output_dir", "out"]
    assert run_recipe(rlvr.main, argv) == 0
    episodes = [
        json.loads(line) for line in (tmp_path / "out" / "trajectories.jsonl").read_text().splitlines()
    ]
    tasks = {phase: {e["task_id"] for e in episodes if e["phase"] == phase} for phase in ("train", "after")}
    assert tasks["train"] and tasks["after"] and not tasks["train"] & tasks["after"]


def test_bad_input_is_one_line(rlvr, refused, load_program, tiny_policy):
    assert "--eval_dataset belongs to" in refused(rlvr, "--env", "Echo-v0", "--eval_dataset", "x.jsonl")
    assert "takes no argument 'level'" in refused(
        rlvr, "--model", tiny_policy, "--env_kwargs", '{"level": [0]}'
    )
    pytest.importorskip("math_verify")
    assert "absent.jsonl" in refused(rlvr, "--model", tiny_policy, "--dataset", "absent.jsonl")
    pytest.importorskip("bm25s")
    shop = load_program("recipes/shop_sao.py")
    assert "absent.json" in refused(shop, "--model", tiny_policy, "--data", "absent.json")
    assert "--reward" in refused(shop, "--reward", "lose")
