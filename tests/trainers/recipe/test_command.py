"""A recipe as a program: what is left behind at its end."""

from pathlib import Path

import pytest
import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

from agentenv.errors import RolloutError
from agentenv_trainers.recipe import run_recipe


def gloo_threads():
    """Names of this process's threads that belong to gloo."""
    names = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
    return [name for name in names if "gloo" in name]


@pytest.mark.skipif(
    not Path("/proc/self/task").exists(), reason="threads of libraries are seen on Linux only"
)
@pytest.mark.parametrize(("fails", "code"), [(False, 0), (True, 1)])
def test_no_thread_of_other_processes_group_runs_on_into_the_interpreters_end(fails, code):
    """gloo's abort the process now and then when they outlive it: "terminate called without an active exception"."""
    seen = []

    def train(argv):
        distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
        model = DistributedDataParallel(torch.nn.Linear(2, 2))
        model(torch.ones(1, 2)).sum().backward()
        model.itself = [model]  # as in a trainer: only the garbage collector frees it
        seen.extend(gloo_threads())
        if fails:
            raise RolloutError("the shop is closed")
        return 0

    assert run_recipe(train, []) == code
    assert seen
    assert not gloo_threads()
    assert not distributed.is_initialized()
