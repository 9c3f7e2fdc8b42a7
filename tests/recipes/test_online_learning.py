"""The recipe of online learning: the judge, what is logged, whole runs, and bad input."""

import asyncio
import json
from collections import defaultdict

import pytest

from agentenv.errors import RewardError
from agentenv.trajectory import Trajectory
from agentenv_trainers.recipe import parse, run_recipe
from agentenv_trainers.sao import SAOConfig

GAME = '''
import os, signal, threading
import agentenv

class Lengths(agentenv.BaseEnv):
    """Right is an answer without a digit; its style is short or long. Its Nth training task sends a signal."""

    worker = "inline"
    resets = 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        if seed < 2**31 and os.environ.get("LENGTHS_INTERRUPT"):
            Lengths.resets += 1
            if Lengths.resets == int(os.environ["LENGTHS_INTERRUPT"]):
                os.kill(os.getpid(), signal.SIGINT)
        return "Write letters.", {"task_id": f"t{seed}"}

    def step(self, action):
        info = {"quality": int(not any(c.isdigit() for c in action)), "style": "long" if len(action) > 3 else "short"}
        return "", 0.0, True, False, {name: info[name] for name in info if name != os.environ.get("LENGTHS_HIDE")}
'''


@pytest.fixture
def recipe(online_learning):
    return online_learning


@pytest.fixture
def run(recipe, tmp_path, monkeypatch):
    """Runs the recipe in an empty directory; returns its exit code."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "lengths.py").write_text(GAME)
    return lambda *argv: run_recipe(recipe.main, [str(item) for item in argv])


@pytest.fixture
def own(tiny_policy):
    """Options of a run with a model, an environment and styles of one's own."""
    sizes = ["--max_tokens_per_turn", "6", "--max_tokens_per_episode", "200"]
    return ["--smoke", "--model", tiny_policy, "--env", "lengths.py", "--styles", "short", "long", *sizes]


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def episode(version, **info):
    return Trajectory([1], [2], [-1.0], [True], [version], start_version=version, info=info)


def settings(recipe, *argv, advantage="gae"):
    def defaults(given):
        return recipe.defaults(given, advantage=advantage, output_dir="out")

    parsed = parse(recipe.OnlineArguments, SAOConfig, [*argv], defaults=defaults, description="")
    return parsed.arguments, parsed.config


# The judge


def test_the_wanted_style_depends_on_the_version_that_began_the_episode(recipe):
    judge = recipe.Judge(["plain", "polite", "loud"], 150)
    assert [judge.wanted(version) for version in (0, 149, 150, 299, 300, 449)] == [
        "plain",
        "plain",
        "polite",
        "polite",
        "loud",
        "loud",
    ]
    assert judge.wanted(450) == judge.wanted(10_000) == "loud", "the last wish stays"


@pytest.mark.parametrize(
    ("version", "quality", "style", "reward"),
    [
        (1, 1, "plain", 1.0),
        (1, 0, "plain", 0.0),
        (1, 1, "polite", 0.0),
        (2, 1, "polite", 1.0),
        (2, 1, "plain", 0.0),
    ],
)
def test_reward_is_quality_times_style_whatever_the_environment_paid(recipe, version, quality, style, reward):
    judge = recipe.Judge(["plain", "polite"], 2)
    said = episode(version, quality=quality, style=style, wanted="loud", success=True)
    found, info = asyncio.run(judge.reward(said))
    assert found == reward
    assert info == {"wanted": judge.wanted(version), "success": reward == 1.0}


def test_a_reply_that_the_environment_says_nothing_about_is_no_reply_of_reward_zero(recipe):
    with pytest.raises(RewardError, match="info has no 'style'"):
        asyncio.run(recipe.Judge(["plain"], 2).reward(episode(0, quality=1)))


# Settings


def test_a_run_lasts_as_long_as_its_phases_unless_it_is_told_otherwise(recipe):
    assert settings(recipe)[1].max_steps == 3 * 150
    assert settings(recipe, "--phase_steps", "7", "--styles", "loud", "plain")[1].max_steps == 14
    assert settings(recipe, "--phase_steps", "7", "--max_steps", "30")[1].max_steps == 30
    assert settings(recipe, "--smoke")[1].max_steps == 6


def test_both_methods_have_the_same_objective_batch_and_limits(recipe):
    sao, baseline = (vars(settings(recipe, advantage=name)[1]) for name in recipe.METHODS)
    assert sao["objective"] == baseline["objective"] == "dis"
    assert baseline["baseline_window"] == 128
    different = {name for name in sao if repr(sao[name]) != repr(baseline[name])}
    # learning_rate and beta are tuned for each method; they may be equal.
    assert different - {"learning_rate", "beta"} == {
        "advantage",
        "baseline_window",
        "critic_learning_rate",
        "critic_only_steps",
    }
    assert sao["critic_learning_rate"] == pytest.approx(5 * sao["learning_rate"]), "the paper's ratio"


def test_a_model_of_ones_own_has_the_papers_rates_and_a_preset_the_papers_batch(recipe):
    config = settings(recipe, "--model", "mine")[1]
    assert (config.learning_rate, config.critic_learning_rate, config.beta) == (1e-6, 5e-6, 0.0)
    assert config.trajectories_per_step == 32
    config = settings(recipe, "--model", "mine", "--preset", "math")[1]
    assert (config.trajectories_per_step, config.clip_low, config.clip_high) == (128, 0.3, 5.0)


def test_styles_come_from_a_yaml_file_too(recipe, tmp_path):
    (tmp_path / "run.yaml").write_text("styles: [loud, plain]\nphase_steps: 5\nlearning_rate: 2e-4\n")
    arguments, config = settings(recipe, "--config", str(tmp_path / "run.yaml"))
    assert (arguments.styles, config.max_steps, config.learning_rate) == (["loud", "plain"], 10, 2e-4)


# Whole runs


def test_alone_it_trains_by_both_methods_and_draws_them(run, tmp_path, capsys):
    assert run("--smoke", "--output_dir", "out") == 0
    out = tmp_path / "out"
    for method in ("gae", "running_mean"):
        summary = json.loads((out / method / "summary.json").read_text())
        assert (summary["status"], summary["steps"], summary["args"]["advantage"]) == ("finished", 6, method)
        metrics = lines(out / method / "metrics.jsonl")
        assert ("critic_loss" in metrics[0]) == (method == "gae")
        batches = defaultdict(list)
        for line in lines(out / method / "trajectories.jsonl"):
            if line["phase"] == "train":
                batches[line["step"]].append(line)
        for line in metrics:
            batch = batches[line["step"]]
            assert len(batch) == 4
            assert line["quality"] == sum(item["info"]["quality"] for item in batch) / 4
            for style in ("plain", "polite", "loud"):
                assert line[f"style_{style}"] == sum(item["info"]["style"] == style for item in batch) / 4
            for item in batch:
                info, wanted = item["info"], ("plain", "polite", "loud")[item["start_version"] // 2]
                assert info["wanted"] == wanted
                assert item["reward"] == float(info["quality"] == 1 and info["style"] == wanted)
                assert item["success"] == (item["reward"] == 1.0)
    first, second = (
        json.loads((out / method / "run.json").read_text()) for method in ("gae", "running_mean")
    )
    assert first["before"] == second["before"], "the same policy, asked the same"
    figure = (out / "online_learning.svg").read_text()
    assert figure.count('class="smooth one"') == figure.count('class="smooth two"') == 2, (
        "a curve and its key"
    )
    assert [style for style in ("plain", "polite", "loud") if f">{style}</text>" in figure] == [
        "plain",
        "polite",
        "loud",
    ]
    said = capsys.readouterr()
    assert said.out == ""
    assert "SAO: reward at the end of each phase: plain 0." in said.err


def test_one_method_with_a_model_an_environment_and_styles_of_ones_own(run, own, tmp_path, capsys):
    assert run(*own, "--advantage", "running_mean", "--baseline_window", 7, "--output_dir", "out") == 0
    out = tmp_path / "out"
    assert not (out / "running_mean").exists()
    metrics = lines(out / "metrics.jsonl")
    assert [line["step"] for line in metrics] == [1, 2, 3, 4]
    assert {"style_short", "style_long", "quality"} <= set(metrics[0])
    train = [line for line in lines(out / "trajectories.jsonl") if line["phase"] == "train"]
    assert {line["info"]["wanted"] for line in train} == {"short", "long"}
    assert (out / "online_learning.svg").read_text().count('class="smooth') == 1
    assert "mean of the last 7 rewards: reward at the end of each phase" in capsys.readouterr().err
    assert (out / "model" / "config.json").exists()


def test_an_interrupted_comparison_goes_on_where_it_was_and_repeats_nothing(run, own, tmp_path, monkeypatch):
    # 16 training tasks of the first method and at most 4 beyond them; the signal falls into the second method.
    monkeypatch.setenv("LENGTHS_INTERRUPT", "30")
    assert run(*own, "--output_dir", "out") == 130
    out = tmp_path / "out"
    done, cut = (json.loads((out / name / "summary.json").read_text()) for name in ("gae", "running_mean"))
    assert (done["status"], done["steps"]) == ("finished", 4)
    assert cut["status"] == "interrupted"
    assert cut["steps"] < 4
    assert not (out / "online_learning.svg").exists()

    monkeypatch.delenv("LENGTHS_INTERRUPT")
    before = (out / "gae" / "summary.json").stat().st_mtime_ns
    assert run("--output_dir", "out", "--resume") == 0
    assert (out / "gae" / "summary.json").stat().st_mtime_ns == before
    resumed = json.loads((out / "running_mean" / "summary.json").read_text())
    assert (resumed["status"], resumed["steps"]) == ("finished", 4)
    assert resumed["before"] == cut["before"]
    assert [line["step"] for line in lines(out / "running_mean" / "metrics.jsonl")] == [1, 2, 3, 4]
    assert (out / "online_learning.svg").exists()


def test_an_environment_that_can_not_be_judged_ends_the_run_and_says_why(run, own, monkeypatch, capsys):
    monkeypatch.setenv("LENGTHS_HIDE", "style")
    assert run(*own, "--output_dir", "out") == 1
    assert "the environment's info has no 'style'" in capsys.readouterr().err.splitlines()[-1]


# Bad input


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--styles", "plain", "rude"], "--styles: 'rude' is none of StyledReply-v0's: plain, polite, loud"),
        (["--phase_steps", "0"], "--phase_steps is 0, must be at least 1"),
        (["--advantage", "gea"], "invalid choice: 'gea'"),
        (["--phase_step", "3"], "did you mean --phase_steps?"),
        (["--env_kwargs", '{"items": 99}'], "items must be a whole number from 2 to 8"),
        (["--resume", "--output_dir", "out"], "run.json: no such file"),
        (["--output_dir", "."], "already in use"),
        (["--model", "absent/model/here"], "no such folder"),
        (["--max_tokens_per_episode", "5000"], "has 1024 positions"),
    ],
)
def test_a_mistake_is_one_line_and_nothing_is_written(run, tmp_path, capsys, argv, said):
    assert run(*argv) == 2
    captured = capsys.readouterr()
    [line] = captured.err.splitlines()
    assert line.startswith("error: ")
    assert said in line
    assert [item.name for item in tmp_path.iterdir()] == ["lengths.py"]


def test_a_phase_that_a_run_did_not_reach_has_no_reward(recipe, tmp_path, capsys):
    lines = [json.dumps({"step": step, "reward": 0.5}) for step in (1, 2)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    recipe.show(tmp_path, {"SAO": tmp_path}, recipe.Judge(("plain", "polite"), 2))
    assert "plain 0.50, polite not reached" in capsys.readouterr().err
