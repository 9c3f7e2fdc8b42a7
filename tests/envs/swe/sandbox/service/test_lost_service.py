"""A run over three services in processes of their own, of which one is killed and comes back."""

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

pytest.importorskip("fastapi")

from agentenv.inference import GenerationRequest, LLMProxy
from agentenv.rollout import AsyncController, RolloutConfig
from agentenv.testing import ByteTokenizer, ScriptedModel
from agentenv_envs.swe.embedded.tasks import MODULE
from agentenv_envs.swe.env import SWEEnv
from agentenv_envs.swe.protocols.bash import SUBMIT, as_action
from agentenv_envs.swe.sandbox import SandboxSpec, open_backend
from agentenv_envs.swe.workspace import EmbeddedTasks

TOKEN = "trainer-0123456789abcdef"
SERVICE = f"""
import asyncio, sys
from agentenv.listening import listen
from agentenv_envs.swe.sandbox.local_backend import LocalBackend
from agentenv_envs.swe.sandbox.service.limits import ServiceLimits, Tokens
from agentenv_envs.swe.sandbox.service.serving import Service
listener = listen("127.0.0.1", int(sys.argv[1]))
listener.listen(64)
print(listener.getsockname()[1], flush=True)
asyncio.run(Service(LocalBackend(), Tokens({{"trainer": "{TOKEN}"}}), ServiceLimits()).serve(listener))
"""
SLOTS, BATCH, STEPS = 6, 6, 4


class Process:
    """A service of sandboxes that isolate nothing, in a process that can be killed."""

    def __init__(self, port: int = 0) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", SERVICE, str(port)],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        assert self.process.stdout is not None
        self.port = int(self.process.stdout.readline())
        self.url = f"http://127.0.0.1:{self.port}"

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(60)
        assert self.process.stdout is not None
        self.process.stdout.close()


@pytest.fixture
def start() -> Iterator[Callable[..., Process]]:
    started: list[Process] = []

    def start(port: int = 0) -> Process:
        started.append(Process(port))
        return started[-1]

    yield start
    for process in started:
        process.kill()


def solver() -> ScriptedModel:
    """Writes the right module, looks at the tests for a moment, submits: every reward is 1."""
    tasks = [EmbeddedTasks("train", (1,), None).task(seed) for seed in range(400)]
    gold = {task.issue: task.gold for task in tasks}

    def reply(request: GenerationRequest) -> str:
        text = ByteTokenizer().decode(request.prompt_ids)
        if "written" in text:
            return as_action(SUBMIT)
        module = gold[max((issue for issue in gold if issue in text), key=len)]
        return as_action(f"cat >{MODULE} <<'END'\n{module}\nEND\nsleep 0.3; echo written")

    return ScriptedModel(reply)


def test_a_killed_service_costs_its_episodes_and_is_used_again_when_it_is_back(
    start: Callable[..., Process], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AGENTENV_SANDBOX_TOKEN", TOKEN)
    services = [start() for _ in range(3)]
    urls = ",".join(service.url for service in services)
    held = open_backend(url=urls)
    remote = held.backend
    controller = AsyncController(
        lambda: SWEEnv(split="train", levels=(1,), sandbox_url=urls),
        LLMProxy([solver()]),
        ByteTokenizer(),
        RolloutConfig(
            batch_size=BATCH,
            num_envs=SLOTS,
            num_steps=STEPS,
            max_tokens_per_turn=4096,
            max_tokens_per_episode=16384,
            step_timeout_s=60.0,
            reset_backoff_s=0.05,
        ),
        task_seeds=range(400),
    )
    controller.start()
    try:
        batches = [controller.get_batch(0)]
        controller.sync_weights({}, 1)
        deadline = time.monotonic() + 60
        while not all(endpoint._load for endpoint in remote._endpoints):  # type: ignore[attr-defined]
            assert time.monotonic() < deadline, "each of them lends"
            time.sleep(0.002)  # one may be between two episodes
        victim = services[0]
        stop_in_mid_command(victim)
        victim.kill()
        again = threading.Timer(1.0, lambda: services.append(start(victim.port)))
        again.start()
        for step in range(1, STEPS):
            batches.append(controller.get_batch(step))
            controller.sync_weights({}, step + 1)
        counts = controller.counts()
    finally:
        controller.stop()
    again.join()
    discarded = dict(counts["discarded"])
    assert counts["produced"] == counts["consumed"] + counts["buffered"] + sum(discarded.values())
    assert counts["consumed"] == STEPS * BATCH
    assert set(discarded) <= {"step_SandboxLostError"} and 1 <= sum(discarded.values()) <= SLOTS, discarded
    assert [sample.reward for batch in batches for sample in batch] == [1.0] * STEPS * BATCH
    tasks = [sample.group_id for batch in batches for sample in batch]
    assert len(set(tasks)) == STEPS * BATCH, "each task once, those of the lost episodes in another sandbox"
    deadline = time.monotonic() + 60
    while not any(endpoint.url == victim.url for endpoint in _used(held)):
        assert time.monotonic() < deadline, "the service that came back is not used"
        time.sleep(0.2)
    held.close()


def stop_in_mid_command(service: Process) -> None:
    """Stop a service that has not answered what it was asked: it runs a model's command."""
    deadline = time.monotonic() + 60
    while True:
        assert time.monotonic() < deadline, "it runs no command"
        if _sleeps(service):
            service.process.send_signal(signal.SIGSTOP)
            if _sleeps(service):
                return
            service.process.send_signal(signal.SIGCONT)
        time.sleep(0.002)


def _sleeps(service: Process) -> bool:
    """A command that it started is at its ``sleep``."""
    parents = [service.process.pid]
    while parents:
        with suppress(OSError):
            for task in Path(f"/proc/{(pid := parents.pop())}/task").iterdir():
                parents += map(int, (task / "children").read_text().split())
            if Path(f"/proc/{pid}/cmdline").read_bytes() == b"sleep\x000.3\0":
                return True
    return False


def _used(held: object) -> list[object]:
    """Endpoints of three new sandboxes."""
    sandboxes = [held.acquire(SandboxSpec()) for _ in range(3)]  # type: ignore[attr-defined]
    for sandbox in sandboxes:
        held.release(sandbox)  # type: ignore[attr-defined]
    return [sandbox.endpoint for sandbox in sandboxes]
