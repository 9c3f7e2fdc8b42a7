"""Ours on OpenEnv's server and its servers as ours, with OpenEnv as released; runs the example of docs/interop.md."""

import json
import os
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

if os.environ.get("AGENTENV_REQUIRE_INTEROP") != "1":
    pytest.importorskip("openenv")

from openenv.core import GenericEnvClient
from openenv.core.env_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State

import agentenv
from agentenv.baselines import make_baseline
from agentenv.cli import main
from agentenv.errors import EnvError, InfrastructureError, UsageError
from agentenv.interop.openenv import OpenEnvClientEnv
from agentenv.interop.openenv.server import make_app
from agentenv.listening import listen
from agentenv.rollout.loop_thread import LoopThread
from agentenv.serving import AppServer
from agentenv.testing import check_env

pytestmark = pytest.mark.interop

Step = tuple[str, float, bool, bool, dict[str, Any]]


@pytest.fixture(scope="module")
def loop() -> Iterator[LoopThread]:
    thread = LoopThread("openenv-servers")
    yield thread
    thread.stop()


@pytest.fixture(scope="module")
def run_app(loop: LoopThread) -> Iterator[Callable[[Any], AppServer]]:
    """Serves an application until the end of the module."""
    servers: list[AppServer] = []

    def run(app: Any) -> AppServer:
        servers.append(AppServer(app, listen("127.0.0.1", 0)))
        loop.call(servers[-1].start())
        return servers[-1]

    yield run
    for server in servers:
        loop.call(server.stop())


@pytest.fixture(scope="module")
def serve(run_app: Callable[[Any], AppServer]) -> Callable[..., str]:
    """URL of a server of that environment of ours."""

    def run(id: str, *, max_sessions: int = 4, token: str | None = None, **kwargs: Any) -> str:
        make = partial(agentenv.make, id, **kwargs)
        return run_app(make_app(id, make, max_sessions=max_sessions, token=token)).url

    return run


class Flaky(agentenv.BaseEnv):
    """Breaks at the action "break"; counts what is open."""

    open: set[int] = set()  # noqa: RUF012 - shared by all of them on purpose

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        Flaky.open.add(id(self))
        return f"begin {options}", {"task_id": "flaky", "nothing": None}

    def step(self, action: str) -> Step:
        if action == "break":
            raise OSError("the disk is full")
        return "caf\udce9 \x1b[31m", 0.5, True, True, {"success": False}

    def close(self) -> None:
        Flaky.open.discard(id(self))


agentenv.register("Flaky-v0", Flaky)


class Sum(Action):
    """Two numbers."""

    a: int
    b: int


class Total(Observation):
    """Their sum so far."""

    total: int


class Adder(Environment[Sum, Total, State]):
    """As a user of OpenEnv writes one: ends with the reward 1 above ten."""

    total = 0

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> Total:
        self.total = seed or 0
        return Total(total=self.total)

    def step(self, action: Sum, timeout_s: float | None = None, **kwargs: Any) -> Total:
        self.total += action.a + action.b
        return Total(total=self.total, reward=float(self.total > 10), done=self.total > 10)

    @property
    def state(self) -> State:
        return State()


def play(env: Any, seed: int, actions: list[str]) -> list[Any]:
    return [env.reset(seed=seed), *(env.step(action) for action in actions)]


def solution(id: str, seed: int, baseline: str) -> list[str]:
    """An episode's actions."""
    env = agentenv.make(id)
    policy = make_baseline(env, baseline)
    observation, info = env.reset(seed=seed)
    policy.begin(observation, info)
    actions, ended = [], False
    while not ended:
        actions.append(policy.act(observation))
        observation, _, terminated, truncated, _ = env.step(actions[-1])
        ended = terminated or truncated
    return actions


@pytest.mark.parametrize("id", ["GuessNumber-v0", "KeyDoor-v0", "ToolArithmetic-v0"])
def test_through_openenvs_client_an_environment_is_itself_step_by_step(
    id: str, serve: Callable[..., str]
) -> None:
    url = serve(id)
    with GenericEnvClient(base_url=url).sync() as client:
        for seed in range(3):
            for baseline in ("oracle", "random"):
                actions = solution(id, seed, baseline)
                direct = agentenv.make(id)
                observation, info = direct.reset(seed=seed)
                result = client.reset(seed=seed)
                assert (result.observation["text"], result.observation["info"]) == (observation, info)
                assert (result.reward, result.done) == (None, False)
                for number, action in enumerate(actions, 1):
                    observation, reward, terminated, truncated, info = direct.step(action)
                    result = client.step({"text": action})
                    told = result.observation
                    assert (told["text"], told["info"]) == (observation, info)
                    assert (told["terminated"], told["truncated"]) == (terminated, truncated)
                    assert (result.reward, result.done) == (reward, terminated or truncated)
                    assert client.state()["step_count"] == number


@pytest.mark.parametrize("id", ["GuessNumber-v0", "Echo-v0"])
def test_ours_served_and_taken_back_is_ours(id: str, serve: Callable[..., str]) -> None:
    env = agentenv.make("OpenEnvClient-v0", url=serve(id))
    for seed in (0, 5):
        for baseline in ("oracle", "random"):
            actions = solution(id, seed, baseline)
            assert play(env, seed, actions) == play(agentenv.make(id), seed, actions)
    check_env(env, actions=solution(id, 1, "oracle"), seed=1)


def test_the_example_of_the_documentation_runs(
    serve: Callable[..., str], documented: Callable[..., str]
) -> None:
    exec(
        documented("OpenEnvClient-v0", **{"http://127.0.0.1:8000": serve("GuessNumber-v0", numbers=8)}),
        found := {},
    )
    assert found["observation"] in ("higher", "lower", "right")


def test_arguments_options_and_what_json_or_utf8_cannot_hold_come_through(serve: Callable[..., str]) -> None:
    env = OpenEnvClientEnv(serve("Flaky-v0"), max_turns=7)
    assert env.max_turns == 7
    observation, info = env.reset(seed=3, options={"level": 2})
    assert observation == "begin {'level': 2}"
    assert info == {"task_id": "flaky", "nothing": None, "family": "openenv"}
    assert env.step("\udc80") == ("caf? \x1b[31m", 0.5, True, True, {"success": False})
    with pytest.raises(RuntimeError, match="call reset first"):
        env.step("more")
    env.close()


def test_sessions_are_apart_bounded_and_closed_with_their_environment(serve: Callable[..., str]) -> None:
    url = serve("Flaky-v0", max_sessions=2)
    one, two, three = (OpenEnvClientEnv(url, timeout_s=60.0) for _ in range(3))
    one.reset(seed=0)
    two.reset(seed=0)
    assert len(Flaky.open) == 2
    with pytest.raises(InfrastructureError, match="CAPACITY_REACHED"):
        three.reset(seed=0)
    one.close()
    one.close()
    for _ in range(200):
        try:
            three.reset(seed=0)
            break
        except InfrastructureError:  # the server has not yet seen the end of the first
            pass
    two.close()
    three.close()
    assert three.reset(seed=0)[0].startswith("begin")
    three.close()


def test_a_failure_of_the_environment_is_an_env_error_and_the_next_episode_a_new_session(
    serve: Callable[..., str],
) -> None:
    env = OpenEnvClientEnv(serve("Flaky-v0"))
    env.reset(seed=0)
    with pytest.raises(EnvError, match="the disk is full"):
        env.step("break")
    with pytest.raises(RuntimeError, match="call reset first"):
        env.step("again")
    env.reset(seed=0)
    assert env.step("on")[2]
    env.close()


def test_a_server_that_is_gone_is_no_fault_of_the_policy(
    run_app: Callable[[Any], AppServer], loop: LoopThread
) -> None:
    make = partial(agentenv.make, "Echo-v0")
    server = run_app(make_app("Echo-v0", make, max_sessions=1))
    env = OpenEnvClientEnv(server.url, timeout_s=60.0)
    env.reset(seed=0)
    loop.call(server.stop())
    with pytest.raises(InfrastructureError):
        env.step("apple")
    with pytest.raises(InfrastructureError):
        env.reset(seed=0)
    env.close()


def test_an_environment_written_for_openenv_takes_json_and_tells_what_it_wants(
    run_app: Callable[[Any], AppServer],
) -> None:
    env = OpenEnvClientEnv(run_app(create_fastapi_app(Adder, Sum, Total)).url)
    observation, info = env.reset(seed=2)
    assert json.loads(observation) == {"total": 2}
    assert info == {"task_id": "openenv-2", "family": "openenv"}
    for malformed in ("two and two", "[1]", '{"a": 1}', '{"a": "x", "b": 1}'):
        text, reward, terminated, truncated, info = env.step(malformed)
        assert '{"a": "integer", "b": "integer"}' in text
        assert (reward, terminated, truncated, info) == (0.0, False, False, {"malformed": True})
    assert env.step('{"a": 1, "b": 1}') == ('{"total": 4}', 0.0, False, False, {})
    assert env.step('{"a": 9, "b": 1}') == ('{"total": 14}', 1.0, True, False, {})
    check_env(env, actions=['{"a": 9, "b": 1}'], seed=2)
    named = OpenEnvClientEnv(env.url, observation_field="total")
    assert named.reset(seed=6)[0] == "6"
    named.close()
    wrong = OpenEnvClientEnv(env.url, observation_field="sum")
    with pytest.raises(EnvError, match="have no field 'sum'; they have metadata, total"):
        wrong.reset(seed=6)
    wrong.close()


def status(url: str, **headers: str) -> int:
    request = urllib.request.Request(url, headers=headers)
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=60) as response:
            return int(response.status)
    except urllib.error.HTTPError as error:
        error.close()
        return error.code


def test_pages_of_other_sites_and_other_names_of_this_machine_are_not_answered(
    serve: Callable[..., str],
) -> None:
    url = serve("Echo-v0")
    assert status(f"{url}/health") == 200
    assert status(f"{url}/health", Origin="http://localhost:3000") == 200
    assert status(f"{url}/health", Origin="https://elsewhere.example") == 403
    assert status(f"{url}/health", Host="rebound.example") == 403
    assert status(f"{url}/state") == 404
    crossing = GenericEnvClient(base_url=url, headers={"Origin": "https://elsewhere.example"}).sync()
    with pytest.raises(ConnectionError, match="403"):
        crossing.connect()
    crossing.close()


def test_with_a_token_only_who_has_it_is_answered(serve: Callable[..., str], tmp_path: Path) -> None:
    url = serve("Echo-v0", token="sesame-sesame-sesame")
    assert status(f"{url}/health") == status(f"{url}/health", Authorization="Bearer wrong") == 401
    (tmp_path / "token").write_text("sesame-sesame-sesame\n")
    env = agentenv.make("OpenEnvClient-v0", url=url, token_file=str(tmp_path / "token"))
    assert env.reset(seed=0)[0].startswith("Say the word")
    env.close()
    refused = OpenEnvClientEnv(url)
    with pytest.raises(InfrastructureError, match="401"):
        refused.reset(seed=0)


def test_the_command_serves_until_a_signal() -> None:
    command = [
        sys.executable,
        "-m",
        "agentenv",
        "openenv",
        "serve",
        "GuessNumber-v0",
        "--env-option",
        "numbers=8",
    ]
    with subprocess.Popen([*command, "--port", "0"], stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr is not None
        line = server.stderr.readline()
        try:
            assert line.startswith("agentenv openenv: http://127.0.0.1:"), line
            env = OpenEnvClientEnv(line.split()[-1])
            observation, info = env.reset(seed=0)
            assert (observation, info) == agentenv.make("GuessNumber-v0", numbers=8).reset(seed=0)
            env.close()
        finally:
            server.send_signal(signal.SIGTERM)
        assert server.wait(timeout=60) == 0
        assert server.stderr.read() == ""


def test_bad_arguments_of_the_command_are_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for arguments, message in (
            (["Echo-v0", "--host", "0.0.0.0"], "--token-file"),
            (["Ecko-v0"], "did you mean 'Echo-v0'"),
            (["Echo-v0", "--env-option", "turns=3"], "no argument 'turns'"),
            (["Echo-v0", "--port", str(port)], "can't listen there"),
        ):
            assert main(["openenv", "serve", *arguments]) == 2
            error = capsys.readouterr().err
            assert message in error and error.count("\n") == 1


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"url": "localhost:8000"}, "url must begin with"),
        ({"url": "http://h", "timeout_s": 0}, "timeout_s must be"),
        ({"url": "http://h", "max_turns": 0}, "max_turns must be"),
        ({"url": "http://h", "token_file": "/nowhere/token"}, "token_file /nowhere/token"),
    ],
)
def test_bad_arguments_of_the_client_are_one_clear_error(kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        agentenv.make("OpenEnvClient-v0", **kwargs)


def test_no_server_is_an_infrastructure_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with pytest.raises(InfrastructureError, match="/schema"):
        OpenEnvClientEnv(f"http://127.0.0.1:{port}").reset(seed=0)
