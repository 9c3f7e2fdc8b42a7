"""Episodes on embedded tasks with a fault each, for `sandbox_chaos.py`: what happens in them, and how they must end.

Invariants:
- An episode's fault and the type of its end are fixed by the table; the seed only draws the order.
- Requests to the engine fail only in the thread that asked for it, so that an episode's fault is its own.
"""

import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, ClassVar

from agentenv.errors import SandboxError
from agentenv_envs.swe import SWEEnv
from agentenv_envs.swe.embedded.tasks import MODULE, generate_task
from agentenv_envs.swe.protocols import SUBMIT, as_action
from agentenv_envs.swe.sandbox import SandboxSpec, docker_backend

SPLIT = "train"
COMMAND_TIMEOUT_S = 5.0
REQUESTS = ("create_container", "start", "exec_create", "exec_start", "exec_inspect", "remove_container")
"""Of the engine, which fail on demand."""

# What the agent runs between its repair and its submission, and how the episode must end.
COMMANDS: Mapping[str, tuple[str, str]] = {
    "none": ("true", "solved"),
    "out of memory": ("python -c 'x = bytearray(4 * 10**9)'; tail /dev/zero", "solved"),
    "fork bomb": ("bomb() { bomb | bomb & }; bomb; sleep 1; kill -9 -1", "solved"),
    "fork bomb in the foreground": ("bomb() { bomb | bomb; }; bomb", "solved"),
    "hanging command": ("trap '' TERM; sleep 1000; sleep 1000", "solved"),
    "hanging command in another session": ("setsid sleep 1000 & cat /dev/zero | sleep 1000", "solved"),
    "driver killed": ("kill -9 $PPID; sleep 5", "solved"),
    "everything killed": ("kill -9 -1", "solved"),
    "huge output": ("head -c 300000000 /dev/zero", "solved"),
}
OTHERS: Mapping[str, str] = {
    "all files removed": "solved",
    "no work": "unsolved",
    "container removed": "infrastructure",
    "engine fails at a start": "infrastructure",
    "engine fails at a sweep": "infrastructure",
    "engine fails at a removal": "solved",
}
KINDS = (*COMMANDS, *OTHERS)


class FaultyClient:
    """A `docker.DockerClient` whose requests fail in a thread that asks for it.

    Args:
        client: the real one.
    """

    def __init__(self, client: Any) -> None:
        self._client = client
        self.api = FaultyApi(client.api)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)


class FaultyApi:
    """A `docker.APIClient` of which the next requests of a name fail in the thread that called `failing`."""

    wanted = threading.local()
    made: ClassVar[list[str]] = []
    """Ids of all containers of this process."""

    def __init__(self, api: Any) -> None:
        self._api = api

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._api, name)
        if name not in REQUESTS:
            return method

        def request(*args: Any, **kwargs: Any) -> Any:
            error = getattr(FaultyApi.wanted, "errors", {}).get(name)
            if error is not None:
                raise error
            answer = method(*args, **kwargs)
            if name == "create_container":
                FaultyApi.made.append(answer["Id"])
            return answer

        return request


@contextmanager
def failing(request: str, number: int) -> Iterator[None]:
    """While this lasts the engine fails such requests of this thread, in one of three ways."""
    import requests
    from docker.errors import APIError

    errors = (
        APIError("injected: 500 Server Error"),
        requests.exceptions.ConnectionError("injected: connection aborted"),
        requests.exceptions.ReadTimeout("injected: read timed out"),
    )
    FaultyApi.wanted.errors = {request: errors[number % len(errors)]}
    try:
        yield
    finally:
        FaultyApi.wanted.errors = {}


def connect_faulty() -> FaultyClient:
    """In place of the backend's own `connect`."""
    return FaultyClient(REAL_CONNECT())


REAL_CONNECT = docker_backend.connect


def expected(kind: str) -> str:
    """The type in which an episode with this fault must end."""
    return OTHERS[kind] if kind in OTHERS else COMMANDS[kind][1]


def play(env: SWEEnv, kind: str, number: int) -> str:
    """One episode: the type of its end, or what was wrong with it."""
    try:
        reward = _steps(env, kind, number)
        end = "solved" if reward == 1.0 else "unsolved"
    except SandboxError:
        end = "infrastructure"
    try:
        env.step(as_action("true"))
    except RuntimeError:
        return end
    return f"{end}, and goes on"


def _steps(env: SWEEnv, kind: str, number: int) -> float:
    if kind == "engine fails at a start":
        with failing(("create_container", "start", "exec_create")[number % 3], number // 3):
            _use_up_the_pool(env)
    env.reset(seed=number)
    workspace = env._workspace
    assert workspace is not None
    gold = generate_task(number, split=SPLIT, levels=(1, 2)).gold
    if kind == "all files removed":
        env.step(as_action("rm -rf --no-preserve-root /"))
    if kind != "no work":
        env.step(as_action(f"cat >{MODULE} <<'END_OF_MODULE'\n{gold}\nEND_OF_MODULE"))
    if kind in COMMANDS:
        env.step(as_action(COMMANDS[kind][0]))
    elif kind == "container removed":
        api = env._backend.backend.client.api  # type: ignore[union-attr, attr-defined]
        container = workspace.sandbox.container_id  # type: ignore[attr-defined]
        timer = threading.Timer(0.2, lambda: api.remove_container(container, force=True, v=True))
        timer.start()
        try:
            env.step(as_action("sleep 30"))
        finally:
            timer.join()
    elif kind == "engine fails at a sweep":
        with failing(("exec_create", "exec_start", "exec_inspect")[number % 3], number // 3):
            env.step(as_action("kill -9 -1"))
    elif kind == "engine fails at a removal":
        env.step(as_action("kill -9 $$"))
        env.step(as_action("kill -9 $$"))  # the second in a row costs the container
        with failing("remove_container", number):
            return env.step(as_action(SUBMIT))[1]
    return env.step(as_action(SUBMIT))[1]


def _use_up_the_pool(env: SWEEnv) -> None:
    """A start of a container, whatever the pool holds: this specification is nobody's."""
    backend = env._backend
    assert backend is not None
    backend.release(backend.acquire(SandboxSpec(read_only=True, memory_mb=100)))


def run_episodes(
    count: int, threads: int, seed: int, told: Callable[[str, str], None] = lambda kind, end: None
) -> list[tuple[str, str]]:
    """(fault, end) of every episode; all kinds in equal shares, in an order drawn from the seed."""
    kinds = [KINDS[number % len(KINDS)] for number in range(count)]
    random.Random(seed).shuffle(kinds)
    waiting = iter(list(enumerate(kinds)))
    lock = threading.Lock()
    ends: list[tuple[str, str]] = []

    def worker(_: int) -> None:
        env = SWEEnv(split=SPLIT, sandbox="docker", command_timeout_s=COMMAND_TIMEOUT_S)
        try:
            while True:
                with lock:
                    number, kind = next(waiting, (-1, ""))
                if number < 0:
                    return
                try:
                    end = play(env, kind, number)
                except Exception as error:
                    end = f"raised {type(error).__name__}: {error}"
                with lock:
                    ends.append((kind, end))
                    told(kind, end)
        finally:
            env.close()

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(worker, range(threads)))
    return ends


def wrong_ends(ends: Sequence[tuple[str, str]], count: int) -> Counter[str]:
    """Episodes that did not end as they must, by fault and end; those without an end are "missing"."""
    wrong = Counter(f"{kind}: {end}" for kind, end in ends if end != expected(kind))
    if len(ends) != count:
        wrong["missing or twice"] = abs(count - len(ends))
    return wrong
