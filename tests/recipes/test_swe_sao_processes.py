"""The SWE recipe in two processes, launched by accelerate: the main one plays and reports, the other only trains."""

import json
import os
import signal
import socket
import subprocess
import sys
import time

import pytest

LAUNCHER = ("-m", "accelerate.commands.launch", "--mixed_precision", "no", "--dynamo_backend", "no")
ONE_MACHINE = ("--num_machines", "1", "--main_process_port", "0")
SIZE = {
    "max_steps": 4,
    "num_envs": 4,
    "eval_episodes": 6,
    "value_pretrain_episodes": 6,
    "value_pretrain_steps": 2,
    "max_tokens_per_turn": 6,
    "max_tokens_per_episode": 200,
    "learning_rate": 1e-3,
    "optim": "sgd",
    "save_steps": 2,
    "mode": "sync",
    "deterministic": "true",
}

pytestmark = pytest.mark.slow


@pytest.fixture
def launch(tmp_path, vowels, tiny_policy, repository):
    """Start the recipe in some processes, in a folder of its own."""
    started = []

    def start(output_dir, *more, processes=2, resume=False, where=ONE_MACHINE, **environment):
        batch = {"per_device_train_batch_size": 4 // processes, "gradient_accumulation_steps": 1}
        sizes = [item for name, value in {**SIZE, **batch}.items() for item in (f"--{name}", str(value))]
        arguments = ["--resume"] if resume else ["--env", "vowels.py", "--model", str(tiny_policy), *sizes]
        how = (*LAUNCHER, *where, "--multi_gpu", "--num_processes", str(processes)) if processes > 1 else ()
        recipe = str(repository / "recipes" / "swe_sao.py")
        process = subprocess.Popen(
            [sys.executable, *how, recipe, "--output_dir", output_dir, *arguments, *more],
            cwd=tmp_path,
            env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", **environment},
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        if process.poll() is None:
            process.kill()


def finish(process):
    """Exit code and what was said."""
    _, said = process.communicate(timeout=300)
    return process.returncode, said


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def assert_same_runs(one, two):
    """Folders of two runs."""
    mine, theirs = (json.loads((folder / "summary.json").read_text()) for folder in (one, two))
    assert theirs["status"] == "finished"
    assert (theirs["before"], theirs["episodes"]) == (mine["before"], mine["episodes"])
    for mine, theirs in zip(lines(one / "metrics.jsonl"), lines(two / "metrics.jsonl"), strict=True):
        for name in ("step", "reward", "loss", "critic_loss", "policy_grad_norm", "value_mean"):
            assert theirs[name] == pytest.approx(mine[name], rel=1e-3, abs=1e-5), (mine["step"], name)


def test_two_processes_and_two_machines_leave_what_one_process_leaves(launch, tmp_path):
    for name, processes in (("one", 1), ("two", 2)):
        code, said = finish(launch(name, processes=processes))
        assert code == 0, said
    assert_same_runs(tmp_path / "one", tmp_path / "two")
    # One writer: no line twice.
    assert len(lines(tmp_path / "two" / "trajectories.jsonl")) == 6 + 4 * 4 + 6
    assert (tmp_path / "two" / "model" / "model.safetensors").exists()
    assert (tmp_path / "two" / "critic" / "model.safetensors").exists()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        meeting = ("--main_process_ip", "127.0.0.1", "--main_process_port", str(free.getsockname()[1]))
    machines = [
        launch("machines", where=("--num_machines", "2", "--machine_rank", str(rank), *meeting))
        for rank in range(2)
    ]
    for machine in machines:
        code, said = finish(machine)
        assert code == 0, said
    assert_same_runs(tmp_path / "one", tmp_path / "machines")
    assert [
        path.name
        for path in tmp_path.iterdir()
        if path.is_dir() and path.name not in ("one", "two", "machines")
    ] in (
        [],
        ["__pycache__"],
    )


def test_a_signal_to_the_launcher_ends_both_with_a_checkpoint_to_go_on_from(launch, tmp_path):
    out = tmp_path / "out"
    process = launch("out", VOWELS_S="0.3")
    deadline = time.monotonic() + 200
    while not lines(out / "metrics.jsonl"):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)  # SIGINT goes the same way
    code, said = finish(process)
    assert code == 1, said  # torchrun's, whatever the reason
    summary = json.loads((out / "summary.json").read_text())
    assert summary["status"] == "interrupted"
    done = summary["steps"]
    assert 1 <= done < 4
    assert [line["step"] for line in lines(out / "metrics.jsonl")] == list(range(1, done + 1))
    checkpoint = out / "checkpoints" / f"checkpoint-{done}"
    assert {"COMPLETE", "rng_state_0.pth", "rng_state_1.pth"} <= {path.name for path in checkpoint.iterdir()}
    code, said = finish(launch("out", resume=True))
    assert code == 0, said
    assert [line["step"] for line in lines(out / "metrics.jsonl")] == [1, 2, 3, 4]
    assert json.loads((out / "summary.json").read_text())["status"] == "finished"


def test_episodes_that_all_fail_end_both_and_the_summary_says_why(launch, tmp_path):
    code, said = finish(launch("out", "--value_pretrain_episodes", "0", VOWELS_FAIL="1"))
    assert code == 1
    assert "error: " in said and "the shop is closed" in said
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert summary["status"] == "failed"
    assert "the shop is closed" in summary["error"]


def test_several_processes_that_accelerate_does_not_start_are_no_run_of_one(launch, tmp_path, monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_CPU", "True")
    monkeypatch.setenv("MASTER_PORT", "29500")
    code, said = finish(launch("out", processes=1))
    assert code == 2
    assert "starts a single process" in said and "--multi_gpu" in said
