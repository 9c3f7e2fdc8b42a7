"""Whole runs of the SWE recipe: to the end, interrupted, killed, resumed."""

import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter

import pytest

from agentenv.report.token_records import read_tokens, recorded_episodes
from agentenv.timeline import find_trace, read_trace
from agentenv_trainers.recipe import run_recipe

SIZE = {
    "max_steps": 4,
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 1,
    "num_envs": 4,
    "eval_episodes": 6,
    "value_pretrain_episodes": 6,
    "value_pretrain_steps": 2,
    "max_tokens_per_turn": 6,
    "max_tokens_per_episode": 200,
    "learning_rate": 1e-3,
    "save_steps": 2,
}


@pytest.fixture
def arguments(tmp_path, vowels, tiny_policy, monkeypatch):
    """Command line of a run of four tiny steps."""
    monkeypatch.chdir(tmp_path)
    sizes = [item for name, value in SIZE.items() for item in (f"--{name}", str(value))]
    return ["--env", "vowels.py", "--model", str(tiny_policy), "--output_dir", "out", *sizes]


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def steps(folder):
    return [line["step"] for line in lines(folder / "metrics.jsonl")]


def episodes(folder):
    """How many episodes of each phase and step were written down."""
    return Counter((line["phase"], line["step"]) for line in lines(folder / "trajectories.jsonl"))


def wait_for_threads(before):
    """Whether the threads that a run started have ended."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        left = [
            thread for thread in threading.enumerate() if thread not in before and "agentenv" in thread.name
        ]
        if not left:
            return []
        time.sleep(0.05)
    return left


@pytest.mark.parametrize(("argv", "turns"), [(["--max_turns", "300"], 300), (["--env", "SWE-v0"], 50)])
def test_the_environment_plays_as_many_turns_as_the_config_allows(
    swe_sao, monkeypatch, tmp_path, argv, turns
):
    monkeypatch.chdir(tmp_path)
    options = ["--sandbox", "local-unisolated"] if "--env" not in argv else []
    setup = swe_sao.set_up(swe_sao.RECIPE.parse([*argv, *options]))
    try:
        for make in (setup.train_env, setup.eval_env):
            env = make()
            assert env.unwrapped.max_turns == turns
            env.close()
    finally:
        if setup.sandboxes is not None:
            setup.sandboxes.close()


def test_a_run_leaves_result_report_and_a_model_that_transformers_loads(swe_sao, arguments, tmp_path, capsys):
    threads = threading.enumerate()
    assert run_recipe(swe_sao.main, arguments) == 0
    out = tmp_path / "out"
    summary = json.loads((out / "summary.json").read_text())
    assert summary["status"] == "finished"
    assert summary["before"]["episodes"] == summary["after"]["episodes"] == 6
    assert summary["sandbox"] is None
    assert summary["containers_left"] == 0
    assert summary["args"]["learning_rate"] == 1e-3
    counts = summary["episodes"]
    assert counts["consumed"] == 16
    assert counts["produced"] == counts["consumed"] + counts["buffered"] + sum(counts["discarded"].values())
    assert steps(out) == [1, 2, 3, 4]
    logged = lines(out / "metrics.jsonl")
    assert {"reward", "success", "staleness_mean", "masked_share", "response_tokens"} <= set(logged[0])
    # A batch of equal rewards has none.
    assert any("explained_variance" in line for line in logged)
    assert episodes(out) == {
        ("before", 0): 6,
        ("after", 4): 6,
        **{("train", step): 4 for step in (1, 2, 3, 4)},
    }
    before, after = (
        [line["seed"] for line in lines(out / "trajectories.jsonl") if line["phase"] == phase]
        for phase in ("before", "after")
    )
    assert before == after
    assert all(
        line["seed"] < min(before) for line in lines(out / "trajectories.jsonl") if line["phase"] == "train"
    )
    assert (out / "report.html").read_text().count("<svg") >= 7
    assert not (out / "trace.json").exists()

    from transformers import AutoModelForCausalLM, AutoTokenizer

    AutoModelForCausalLM.from_pretrained(out / "model")
    card = (out / "model" / "README.md").read_text()
    assert "# vowels.py by SAO" in card.replace("\\", "") and (out / "model" / "curve.svg").is_file()
    assert AutoTokenizer.from_pretrained(out / "model").chat_template
    assert sorted(item.name for item in (out / "checkpoints").iterdir()) == ["checkpoint-2", "checkpoint-4"]
    said = capsys.readouterr()
    assert said.out == ""
    assert "training  step 4/4  reward" in said.err
    assert wait_for_threads(threads) == []


def test_an_interrupted_run_ends_with_a_checkpoint_and_goes_on_from_it(
    swe_sao, arguments, tmp_path, monkeypatch
):
    monkeypatch.setenv("VOWELS_SIGNAL", f"{signal.SIGINT.value} 14")
    threads = threading.enumerate()
    assert run_recipe(swe_sao.main, arguments) == 130
    assert wait_for_threads(threads) == []
    out = tmp_path / "out"
    summary = json.loads((out / "summary.json").read_text())
    assert summary["status"] == "interrupted"
    assert summary["after"] is None
    done = summary["steps"]
    assert 1 <= done < 4
    assert steps(out) == list(range(1, done + 1))
    assert (out / "checkpoints" / f"checkpoint-{done}" / "COMPLETE").exists()
    assert "--resume goes on" in (out / "report.html").read_text()

    monkeypatch.delenv("VOWELS_SIGNAL")
    assert run_recipe(swe_sao.main, ["--output_dir", "out", "--resume"]) == 0
    resumed = json.loads((out / "summary.json").read_text())
    assert resumed["status"] == "finished"
    assert resumed["before"] == summary["before"]
    assert steps(out) == [1, 2, 3, 4]
    assert episodes(out) == {
        ("before", 0): 6,
        ("after", 4): 6,
        **{("train", step): 4 for step in (1, 2, 3, 4)},
    }
    trained = [line["episode_id"] for line in lines(out / "trajectories.jsonl") if line["phase"] == "train"]
    assert len(set(trained)) == 16
    assert [entry["episode_id"] for entry in recorded_episodes(out)] == trained


def test_a_killed_run_goes_on_at_its_last_checkpoint(swe_sao, arguments, tmp_path, repository):
    arguments = [*arguments, "--max_steps", "5", "--trace", "true"]
    killed = subprocess.run(
        [sys.executable, str(repository / "recipes" / "swe_sao.py"), *arguments],
        env={**os.environ, "VOWELS_SIGNAL": f"{signal.SIGKILL.value} 18", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    out = tmp_path / "out"
    assert not (out / "summary.json").exists()
    assert steps(out)[-1] >= 2
    assert (out / "checkpoints" / "checkpoint-2" / "COMPLETE").exists()
    before = json.loads((out / "run.json").read_text())["before"]

    assert run_recipe(swe_sao.main, [*arguments, "--resume"]) == 0
    summary = json.loads((out / "summary.json").read_text())
    assert summary["before"] == before
    assert steps(out) == [1, 2, 3, 4, 5]
    assert episodes(out) == {
        ("before", 0): 6,
        ("after", 5): 6,
        **{("train", step): 4 for step in (1, 2, 3, 4, 5)},
    }
    used = [line for line in lines(out / "trajectories.jsonl") if line["phase"] == "train"]
    recorded = [(entry["step"], entry["episode_id"]) for entry in recorded_episodes(out)]
    assert recorded == [(line["step"], line["episode_id"]) for line in used]
    assert all(read_tokens(out, name) is not None for _, name in recorded)

    cut, whole = read_trace(out / "trace.json"), read_trace(out / "trace-2.json")
    assert (cut.is_whole, whole.is_whole) == (False, True)
    assert find_trace(out) == out / "trace-2.json"
    trainer = whole.spans["trainer"]["trainer"]
    done = [s.arguments["step"] for s in cut.spans["trainer"]["trainer"] if s.name == "policy update"]
    assert done[:2] == [1, 2]
    trained = [span.arguments["step"] for span in trainer if span.name == "policy update"]
    assert trained[-1] == 5 and trained == list(range(trained[0], 6))
    for name in ("wait for batch", "critic update"):
        assert [span.arguments["step"] for span in trainer if span.name == name] == trained
    # One before the first batch, and one after each.
    assert sum(span.name == "weight sync" for span in trainer) == len(trained) + 1
    assert {"checkpoint", "evaluation"} <= {span.name for span in trainer}
    for before, after in itertools.pairwise(trainer):
        assert before.end_s <= after.start_s, "the trainer does one thing at a time"


def test_a_signal_during_an_evaluation_ends_the_run_at_once(
    swe_sao, arguments, vowels, tmp_path, monkeypatch
):
    vowels.write_text(vowels.read_text().replace("seed < 2**31 and", ""))
    monkeypatch.setenv("VOWELS_SIGNAL", f"{signal.SIGTERM.value} 3")
    assert run_recipe(swe_sao.main, arguments) == 143
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert summary["status"] == "interrupted"
    assert summary["before"] is None
    assert summary["steps"] == 0
    assert not (tmp_path / "out" / "metrics.jsonl").exists()


def test_a_run_whose_environment_always_fails_says_why(swe_sao, arguments, vowels, tmp_path, capsys):
    failure = 'if self.np_random_seed < 2**31: raise OSError("the shop is closed")'
    vowels.write_text(vowels.read_text().replace("        won = ", f"        {failure}\n        won = "))
    assert (
        run_recipe(swe_sao.main, [*arguments, "--value_pretrain_episodes", "0", "--failure_window", "8"]) == 1
    )
    said = capsys.readouterr().err
    assert "the shop is closed" in said.splitlines()[-1]
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert summary["status"] == "failed"
    assert "the shop is closed" in summary["error"]
    assert summary["before"]["episodes"] == 6


def test_an_evaluation_whose_episodes_fail_is_no_result(
    swe_sao, arguments, vowels, tmp_path, monkeypatch, capsys
):
    failure = 'if os.environ.get("VOWELS_CLOSED"): raise OSError("the shop is closed")'
    vowels.write_text(vowels.read_text().replace("        won = ", f"        {failure}\n        won = "))
    monkeypatch.setenv("VOWELS_CLOSED", "1")
    assert run_recipe(swe_sao.main, arguments) == 1
    last = capsys.readouterr().err.splitlines()[-1]
    assert "evaluation before: 6 of 6 episodes failed" in last and "the shop is closed" in last
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert (summary["status"], summary["before"], summary["steps"]) == ("failed", None, 0)

    monkeypatch.delenv("VOWELS_CLOSED")
    assert run_recipe(swe_sao.main, ["--output_dir", "out", "--resume"]) == 0
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert summary["before"]["episodes"] == summary["after"]["episodes"] == 6
