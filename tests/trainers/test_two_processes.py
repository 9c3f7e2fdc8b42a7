"""Two processes (DDP over gloo) train as one does, and none of them waits for one that failed."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agentenv.report.token_records import read_tokens, recorded_episodes

ACCELERATE = ("-m", "accelerate.commands.launch", "--num_machines", "1", "--mixed_precision", "no")
# With --cpu accelerate starts several processes over MPI only; this is torchrun, which takes CPUs too.
TWO = (
    *ACCELERATE,
    "--dynamo_backend",
    "no",
    "--multi_gpu",
    "--num_processes",
    "2",
    "--main_process_port",
    "0",
)
COMPARED = {
    "sao": {"critic_loss", "critic_grad_norm", "explained_variance", "value_mean", "return_mean"},
    "grpo": {"zero_variance_share"},
}


def assert_same_tokens(found: Path, expected: Path) -> None:
    """The same episodes in the same order, and the same numbers for each of their tokens."""
    names = [(entry["step"], entry["episode_id"]) for entry in recorded_episodes(expected)]
    assert [(entry["step"], entry["episode_id"]) for entry in recorded_episodes(found)] == names
    assert {step for step, _ in names} == {1, 2, 3} and len(names) > 6
    for _, name in names:
        one, other = read_tokens(found, name), read_tokens(expected, name)
        assert one is not None and other is not None
        for mine, its in zip(one.segments, other.segments, strict=True):
            assert (mine.token_ids, mine.action_mask, mine.kept) == (its.token_ids, its.action_mask, its.kept)
            for column in ("policy_logprobs", "values", "advantages"):
                got, wanted = getattr(mine, column), getattr(its, column)
                missing = [value is None for value in wanted]
                assert [value is None for value in got] == missing, column
                numbers = [value for value in wanted if value is not None]
                assert [value for value in got if value is not None] == pytest.approx(
                    numbers, rel=1e-3, abs=1e-4
                ), column


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["sao", "grpo"])
def test_two_processes_that_accelerate_launched_have_the_losses_of_one(
    run_training: Callable[..., Any], tmp_path: Path, algorithm: str
) -> None:
    # SGD: in AdamW a tiny difference of a gradient near zero flips the whole step.
    settings = {"max_steps": 3, "optim": "sgd", "max_grad_norm": 1.0}
    one = run_training(
        "one",
        algorithm,
        options={"tokens": str(tmp_path / "tokens-one")},
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        **settings,
    )
    assert one.code == 0, one.stderr[-4000:]
    names = {"loss", "grad_norm", "reward", "entropy", "advantage_std", "response_tokens", "staleness/0"}
    names |= COMPARED[algorithm]
    for accumulation in (1, 2) if algorithm == "sao" else (2,):
        two = run_training(
            f"two-{accumulation}",
            algorithm,
            launcher=TWO,
            options={"tokens": str(tmp_path / f"tokens-{accumulation}")},
            per_device_train_batch_size=4 // accumulation,
            gradient_accumulation_steps=accumulation,
            **settings,
        )
        assert two.code == 0, two.stderr[-4000:]
        assert list(two.steps) == [1, 2, 3]
        for step, line in two.steps.items():
            expected = {name: one.steps[step][name] for name in names}
            got = {name: line[name] for name in names}
            assert got == pytest.approx(expected, rel=1e-4, abs=1e-5), (accumulation, step)
        assert_same_tokens(tmp_path / f"tokens-{accumulation}", tmp_path / "tokens-one")
    # The batch's episodes: it was two processes, not one with half of them.
    assert one.steps[1]["staleness/0"] == 8.0
    # The second process waits for as long as a batch may take, and more.
    assert (one.steps[1]["ddp_timeout"], two.steps[1]["ddp_timeout"]) == (1800, 7200 + 600)


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["sao"])
def test_an_error_of_the_rollouts_on_the_main_process_ends_the_other_one_too(
    tmp_path: Path, algorithm: str, small_run: Callable[[str], dict[str, Any]]
) -> None:
    options = {
        "algorithm": algorithm,
        "log": str(tmp_path / "log"),
        "fail_at": 1,
        "settings": {
            **small_run(algorithm),
            "output_dir": str(tmp_path / "run"),
            "max_steps": 3,
            "per_device_train_batch_size": 4,
        },
    }
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # Without a launcher, which would end the second process when the first has ended.
    program = Path(__file__).with_name("run_training.py")
    processes = [
        subprocess.Popen(
            [sys.executable, str(program), json.dumps(options)],
            env={
                **os.environ,
                **{"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"},
                **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)},
                **{"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
            },
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        stories = [process.communicate(timeout=300)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [1, 1]
    assert stories[0].rstrip().endswith("RolloutError: the sandboxes are gone")
    assert (
        stories[1]
        .rstrip()
        .endswith("MainProcessFailedError: the main process failed: RolloutError: the sandboxes are gone")
    )
    assert len((tmp_path / "log").read_text(encoding="utf-8").splitlines()) == 1
