"""The commands of docs/several-machines.md: what accelerate and the recipe take; the Slurm script with stand-ins."""

import os
import re
import shlex
import subprocess
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

STAND_INS = {
    # A task after the other, as Slurm numbers them; what runs in one is a stand-in again.
    "srun": """
while [[ $1 == --* ]]; do [[ $1 == --ntasks=* ]] && tasks=${1#*=}; shift; done
for ((task = 0; task < tasks; task++)); do SLURM_PROCID=$task SLURM_LOCALID=$task "$@" || exit; done
""",
    "scontrol": 'printf "gpu%d\\n" 1 2 3 4',
    "curl": 'port=${@: -1}; port=${port##*:}; grep -q "${port%/health}" calls',  # the engine there was started
    "sleep": "exec /bin/sleep 0.05",
    "python": """printf '%s\\t' python "$@" >>calls; echo >>calls""",
    "accelerate": """printf '%s\\t' accelerate "$@" >>calls; echo >>calls; exit "${TRAINER_CODE:-0}" """,
}


@pytest.fixture(scope="module")
def page(repository: Path) -> str:
    return (repository / "docs" / "several-machines.md").read_text(encoding="utf-8")


def launched(words: list[str], swe_sao: ModuleType) -> tuple[Any, Any]:
    """What accelerate and the recipe make of a command line that begins after `accelerate launch`."""
    launch = pytest.importorskip("accelerate.commands.launch")
    found = launch.launch_command_parser().parse_args(words)
    assert found.training_script == "recipes/swe_sao.py"
    return found, swe_sao.RECIPE.parse(found.training_script_args)


def test_what_is_planned_for_several_machines_is_launched_with_the_same_words_and_another_rank(
    page: str, swe_sao: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    commands = [shlex.split(line)[2:] for line in page.splitlines() if line.startswith("accelerate launch ")]
    found = [launched(words, swe_sao) for words in commands]
    assert [launcher.machine_rank for launcher, _ in found] == [0, 1, 2]
    for launcher, parsed in found:
        assert (launcher.num_machines, launcher.num_processes) == (3, 24)
        assert parsed.arguments.vllm_url.count("http://HOST4:") == 4
    words = [shlex.join(words).replace(f"--machine_rank {rank}", "") for rank, words in enumerate(commands)]
    assert len(set(words)) == 1


@pytest.mark.parametrize("code", [0, 3])
def test_the_slurm_script_starts_engines_and_trainers_and_ends_as_the_trainers_do(
    page: str, swe_sao: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, code: int
) -> None:
    for name, body in STAND_INS.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    section = page.split("## Slurm")[1].split("\n## ")[0]
    script = tmp_path / "train.sbatch"
    script.write_text(re.findall(r"```bash\n(.*?)```", section, re.S)[0])
    variables = {"SLURM_JOB_NODELIST": "gpu[1-4]", "SLURM_SUBMIT_DIR": str(tmp_path), "SLURM_JOB_ID": "7"}
    path = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "TRAINER_CODE": str(code)}
    done = subprocess.run(
        ["bash", str(script)], cwd=tmp_path, env=os.environ | variables | path, check=False, timeout=120
    )
    assert done.returncode == code
    calls = [line.split("\t")[:-1] for line in (tmp_path / "calls").read_text().splitlines()]
    engines = [call for call in calls if call[0] == "python"]
    trainers = [call for call in calls if call[0] == "accelerate"]
    assert all(call[:3] == ["python", "-m", "vllm.entrypoints.openai.api_server"] for call in engines)
    assert sorted(call[-1] for call in engines) == ["8001", "8002", "8003", "8004"]
    assert len(trainers) == (1 if code else 3), "what fails ends the others"
    monkeypatch.chdir(tmp_path)
    for rank, call in enumerate(trainers):
        assert call[:2] == ["accelerate", "launch"]
        found, parsed = launched(call[2:], swe_sao)
        assert (found.num_machines, found.num_processes, found.machine_rank) == (3, 24, rank)
        assert found.main_process_ip == "gpu1"
        assert parsed.arguments.vllm_url == ",".join(f"http://gpu4:{port}" for port in range(8001, 8005))
        assert parsed.arguments.weight_folder == str(tmp_path / "weights")
        assert parsed.config.output_dir == str(tmp_path / "runs/7")


def test_the_ray_cluster_of_kubernetes_is_yaml_with_three_groups(page: str) -> None:
    yaml = pytest.importorskip("yaml")
    cluster = yaml.safe_load(re.findall(r"```yaml\n(.*?)```", page, re.S)[0])
    assert cluster["kind"] == "RayCluster"
    assert [group["groupName"] for group in cluster["spec"]["workerGroupSpecs"]] == ["engines", "sandboxes"]
