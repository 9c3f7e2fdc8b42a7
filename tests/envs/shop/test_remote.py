"""The adapter for the official service, against a server that has its protocol and each of its faults."""

from __future__ import annotations

import contextlib
import json
import pickle
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import gymnasium
import pytest

from agentenv import cli, registration
from agentenv.errors import InfrastructureError, UsageError
from agentenv.testing import check_env
from agentenv_envs.shop import RemoteShopEnv, ShopSingleTurnEnv
from agentenv_envs.shop.leases import service_of
from agentenv_envs.shop.policies import Oracle


class FakeService:
    """The official protocol over our own shop, with a pool of slots and no leases, as the official one has it."""

    def __init__(self, slots: int = 4) -> None:
        self.envs = [ShopSingleTurnEnv(products=360) for _ in range(slots)]
        self.free: deque[int] = deque(range(slots))
        self.log: list[tuple[str, Any]] = []
        """Action and env_idx (of reset: that which was given) of every request."""
        self.fault: str | None = None
        """For the next request of `fault_at`: drop, hang, trickle, http 500, no json, no result or error."""
        self.fault_at = "interact"
        self.closing = threading.Event()
        self.lock = threading.Lock()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                with outer.lock:
                    fault = None
                    if body["action"] == outer.fault_at:
                        fault, outer.fault = outer.fault, None
                    try:
                        result = {"error": "raised"} if fault == "error" else outer.answer(body)
                    except Exception as error:  # as the official one: everything is HTTP 200
                        result = {"error": str(error) or repr(error)}
                if fault == "drop":
                    self.connection.shutdown(socket.SHUT_RDWR)
                    return
                if fault == "hang":
                    outer.closing.wait(60.0)
                raw = json.dumps({"result": result}).encode()
                raw = {"no json": b"<html>", "no result": b"{}"}.get(fault or "", raw)
                self.send_response(500 if fault == "http 500" else 200)
                self.send_header("content-length", str(len(raw)))
                self.end_headers()
                for byte in raw[:100] if fault == "trickle" else b"":
                    self.wfile.write(bytes([byte]))
                    time.sleep(0.02)
                self.wfile.write(raw[100:] if fault == "trickle" else raw)

            def log_message(self, format: str, *args: Any) -> None:
                pass

            def handle(self) -> None:
                with contextlib.suppress(OSError):
                    super().handle()

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        self.thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.02})
        self.thread.start()

    def answer(self, body: dict[str, Any]) -> dict[str, Any]:
        """One request, as the official service takes it."""
        action, slot = body["action"], body.get("env_idx")
        if action == "reset":
            if not self.free:
                return {"error": "no slot is free"}
            slot = self.free.popleft()
            self.log.append((action, slot))
            env = self.envs[slot]
            text, info = env.reset(seed=body["idx"])
            return {
                "env_idx": slot,
                "instruction": text,
                "instruction_simple": env.task.request,
                "user_persona": env.task.persona,
                "goal": {
                    "asin": env.task.product_id,
                    "attributes": [need.value for need in env.task.attributes],
                },
            }
        self.log.append((action, slot))
        if action == "release_one":
            self.free.append(slot)  # whoever holds it: there are no leases
            return {"message": "released"}
        text, reward, terminated, truncated, info = self.envs[slot].step(body["response"])
        if terminated or truncated:
            self.free.append(slot)  # the end gives it back by itself
        return {
            "instruction": text,
            "reward": reward,
            "done": terminated,
            "over": terminated or truncated,
            "reward_detail": {name: info["metrics"][name] for name in ("r_type", "loose")}
            if terminated
            else {},
            "goal": {},
            "purchase": {},
        }

    def count(self, action: str) -> int:
        """How many requests of a kind came."""
        return sum(name == action for name, _ in self.log)

    def stop(self) -> None:
        """Close the port."""
        self.closing.set()
        self.server.shutdown()
        self.thread.join()
        self.server.server_close()


@pytest.fixture
def start() -> Iterator[Callable[..., FakeService]]:
    """Starts services."""
    started: list[FakeService] = []

    def new(slots: int = 4) -> FakeService:
        started.append(FakeService(slots))
        return started[-1]

    yield new
    for service in started:
        service.stop()


@pytest.fixture
def service(start: Callable[..., FakeService]) -> FakeService:
    """One of four slots."""
    return start()


def solution(seed: int) -> list[str]:
    """What buys the wish of an index: the fake service plays the same wishes as the embedded shop."""
    env = ShopSingleTurnEnv(products=360)
    oracle, actions, ended = Oracle(env, 0), [], False
    env.reset(seed=seed)
    while not ended:
        actions.append(oracle.act(""))
        ended = env.step(actions[-1])[2]
    return actions


def play(env: RemoteShopEnv, seed: int) -> tuple[float, dict[str, Any]]:
    """An episode that ends well."""
    env.reset(seed=seed)
    reward, info = 0.0, {}
    for action in solution(seed):
        _, reward, _, _, info = env.step(action)
    return reward, info


def test_an_episode_is_played_and_its_slot_is_not_released_after_the_end(service: FakeService) -> None:
    env = RemoteShopEnv(service_url=service.url + "/")
    reward, info = play(env, 3)
    env.close()
    assert reward == 1.0 and info["success"] and info["metrics"]["loose"] == 1.0
    assert service.count("release_one") == 0 and sorted(service.free) == [0, 1, 2, 3]
    assert service.count("interact") == len(solution(3)) == info["metrics"]["turns"]
    with pytest.raises(RuntimeError, match="call reset first"):
        env.step("search[kettle]")


def test_a_slot_is_released_once_when_an_episode_is_left(service: FakeService) -> None:
    env = RemoteShopEnv(service_url=service.url)
    env.reset(seed=0)
    env.step("search[kettle]")
    env.reset(seed=1)  # leaves the first
    env.close()
    env.close()
    assert [entry for entry in service.log if entry[0] == "release_one"] == [
        ("release_one", 0),
        ("release_one", 1),
    ]
    assert sorted(service.free) == [0, 1, 2, 3]


def test_a_slot_is_released_when_the_own_limit_of_turns_cuts_an_episode(service: FakeService) -> None:
    env = RemoteShopEnv(service_url=service.url, max_turns=2)
    env.reset(seed=0)
    env.step("search[kettle]")
    _, reward, terminated, truncated, info = env.step("search[mug]")
    assert (reward, terminated, truncated, info["success"]) == (0.0, False, True, False)
    env.close()
    assert service.count("release_one") == 1


def test_the_services_own_limit_truncates_and_gives_the_slot_back_by_itself(service: FakeService) -> None:
    for env in service.envs:
        env.max_turns = 2
    remote = RemoteShopEnv(service_url=service.url)
    remote.reset(seed=0)
    remote.step("search[kettle]")
    assert remote.step("search[mug]")[2:4] == (False, True)
    remote.close()
    assert service.count("release_one") == 0


@pytest.mark.parametrize("fault", ["drop", "hang", "trickle", "http 500", "no json", "no result"])
def test_an_interact_without_an_answer_is_not_repeated_and_its_slot_left_alone(
    service: FakeService, fault: str
) -> None:
    env = RemoteShopEnv(service_url=service.url)
    env.reset(seed=0)
    env.step("search[kettle]")
    service.fault, env._timeout_s = fault, 0.3
    with pytest.raises(InfrastructureError, match=service.url):
        env.step("search[mug]")
    env.close()
    assert service.count("interact") == 2 and service.count("release_one") == 0
    assert service_of(service.url).abandoned == 1 and service_of(service.url).count == 0
    with pytest.raises(RuntimeError):
        env.step("search[mug]")


def test_an_error_that_comes_as_http_200_raises_and_the_slot_is_released_once(service: FakeService) -> None:
    env = RemoteShopEnv(service_url=service.url)
    env.reset(seed=0)
    service.fault = "error"
    with pytest.raises(InfrastructureError, match="interact: raised"):
        env.step("search[kettle]")
    env.close()
    assert service.count("interact") == 0 and service.count("release_one") == 1


@pytest.mark.parametrize("fault", ["drop", "hang", "trickle", "http 500", "no json", "no result"])
def test_a_reset_without_an_answer_is_not_repeated(service: FakeService, fault: str) -> None:
    env = RemoteShopEnv(service_url=service.url)
    service.fault, service.fault_at, env._timeout_s = fault, "reset", 0.3
    with pytest.raises(InfrastructureError):
        env.reset(seed=0)
    assert service.count("reset") == 1 and service_of(service.url).count == 0
    env._timeout_s = 60.0
    env.reset(seed=0)
    env.close()


def test_a_release_that_fails_is_not_repeated_and_does_not_raise(service: FakeService) -> None:
    env = RemoteShopEnv(service_url=service.url)
    env.reset(seed=0)
    service.fault, service.fault_at = "drop", "release_one"
    env.close()
    env.close()
    assert service.count("release_one") == 1


def test_a_slot_that_a_foreign_client_gave_back_twice_is_noticed(service: FakeService) -> None:
    one, other = RemoteShopEnv(service_url=service.url), RemoteShopEnv(service_url=service.url)
    one.reset(seed=0)
    service.free.appendleft(0)  # somebody else's second release of slot 0
    with pytest.raises(InfrastructureError, match="gave slot 0 to a second episode"):
        other.reset(seed=1)
    with pytest.raises(InfrastructureError, match="gave slot 0 to a second episode"):
        one.step("search[kettle]")
    one.reset(seed=3)
    one.close()
    other.close()
    assert service.count("release_one") == 1 and service.count("interact") == 0
    assert play(other, 2)[0] == 1.0


def test_an_episode_stays_on_its_service_and_episodes_are_spread(start: Callable[..., FakeService]) -> None:
    services = [start(), start()]
    urls = [service.url for service in services]
    envs = [RemoteShopEnv(service_url=urls) for _ in range(6)]
    for seed, env in enumerate(envs):
        env.reset(seed=seed)
    assert [service.count("reset") for service in services] == [3, 3]
    for seed, env in enumerate(envs):
        for action in solution(seed):
            reward = env.step(action)[1]
        assert reward == 1.0
    for service in services:
        held = {slot for name, slot in service.log if name == "reset"}
        assert {slot for name, slot in service.log if name == "interact"} == held


def test_a_service_that_is_down_or_full_is_passed_over(start: Callable[..., FakeService]) -> None:
    alive, full = start(), start(1)
    RemoteShopEnv(service_url=full.url).reset(seed=0)
    env = RemoteShopEnv(service_url=["http://127.0.0.1:9", full.url, alive.url])
    for seed in range(3):
        env.reset(seed=seed)
    env.close()
    assert alive.count("reset") == 3


def test_no_service_at_all_is_infrastructure(start: Callable[..., FakeService]) -> None:
    with pytest.raises(InfrastructureError, match=r"127\.0\.0\.1:9"):
        RemoteShopEnv(service_url="http://127.0.0.1:9").reset(seed=0)
    full = start(1)
    full.free.clear()
    with pytest.raises(InfrastructureError, match="reset: no slot is free"):
        RemoteShopEnv(service_url=full.url).reset(seed=0)


def test_more_episodes_than_slots_wait_for_one_or_give_up_in_time(service: FakeService) -> None:
    first = RemoteShopEnv(service_url=service.url, slots=1)
    first.reset(seed=0)
    second = RemoteShopEnv(service_url=service.url, slots=1, wait_s=0.05)
    with pytest.raises(
        InfrastructureError, match=r"all 1 slots of .* were in use by this process for 0\.05 s"
    ):
        second.reset(seed=1)
    assert service.count("reset") == 1
    patient = RemoteShopEnv(service_url=service.url, slots=1, wait_s=60.0)
    timer = threading.Timer(0.1, first.close)
    timer.start()
    patient.reset(seed=1)
    timer.join()
    patient.close()


def test_many_threads_leave_every_slot_free_exactly_once(service: FakeService) -> None:
    def episodes(worker: int) -> float:
        env = RemoteShopEnv(service_url=service.url, slots=4)
        total = 0.0
        for number in range(4):
            seed = worker * 10 + number
            if number == 2:
                env.reset(seed=seed)
                env.step("search[kettle]")
                env.close()
            else:
                total += play(env, seed)[0]
        return total

    with ThreadPoolExecutor(12) as pool:
        assert list(pool.map(episodes, range(12))) == [3.0] * 12
    assert sorted(service.free) == [0, 1, 2, 3]
    assert service.count("release_one") == 12


def test_the_goal_that_reset_gives_away_reaches_neither_observation_nor_info(service: FakeService) -> None:
    env = RemoteShopEnv(service_url=service.url)
    text, info = env.reset(seed=0)
    target = service.envs[0].task.product_id
    assert target not in text and target not in json.dumps(info)
    assert set(info) == {"task_id", "family"}
    env.close()


def test_persona_mode_shows_the_persona_and_the_simple_wish(service: FakeService) -> None:
    env = RemoteShopEnv(service_url=service.url, persona=True)
    text, _ = env.reset(seed=0)
    task = service.envs[0].task
    assert task.persona in text and task.request in text and task.instruction not in text
    env.close()


def test_what_is_no_action_never_reaches_the_service(service: FakeService) -> None:
    env = RemoteShopEnv(service_url=service.url)
    env.reset(seed=0)
    for action in ("", "prose", "search[]", "ask[colour?]", "search[a] click[b]", "x" * 1_000_000):
        text, *_, info = env.step(action)
        assert text.startswith("Not understood") and info["action_valid"] is False
        assert info["invalid_actions"] > 0
    env.step("Thought: so.\nCLICK [ Buy  Now ]")
    assert service.count("interact") == 1
    env.close()


def test_the_contract_of_environments_is_kept(service: FakeService) -> None:
    check_env(RemoteShopEnv(service_url=service.url), actions=solution(0), seed=0)
    assert sorted(service.free) == [0, 1, 2, 3]


def test_a_copy_of_an_environment_has_no_episode_of_its_own(service: FakeService) -> None:
    env = RemoteShopEnv(service_url=service.url)
    env.reset(seed=0)
    copy = pickle.loads(pickle.dumps(env))
    copy.close()
    assert service.count("release_one") == 0
    env.close()
    assert service.count("release_one") == 1


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({}, "service_url is needed"),
        ({"service_url": "shop:5000"}, "service_url must be a URL such as"),
        ({"service_url": ["http://a", "ftp://b"]}, "got 'ftp://b'"),
        ({"service_url": "http://a", "slots": 0}, "slots must be a whole number of at least 1, got 0"),
        ({"service_url": "http://a", "first_task": -1}, "first_task must be a whole number of at least 0"),
        ({"service_url": "http://a", "timeout_s": 0}, "timeout_s must be seconds above 0, got 0"),
    ],
)
def test_arguments_out_of_range_are_refused(kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        RemoteShopEnv(**kwargs)


def test_an_evaluation_leaves_out_what_the_service_broke_and_no_slot_is_lost(
    service: FakeService, tmp_path: Path
) -> None:
    registration.register(
        "OfficialShopInTests-v0", "agentenv_envs.shop:RemoteShopEnv", kwargs={"service_url": service.url}
    )
    service.fault = "error"  # for one action
    command = ["eval", "OfficialShopInTests-v0", "--policy", "agentenv_envs.shop.policies:Scripted"]
    command += ["--episodes", "12", "--num-envs", "4", "--json", str(tmp_path / "report.json")]
    try:
        assert cli.main(command) == 0
    finally:
        del gymnasium.registry["agentenv/OfficialShopInTests-v0"]
        registration._registered.discard("agentenv/OfficialShopInTests-v0")
    report = json.loads((tmp_path / "report.json").read_text())
    assert (report["episodes"], report["failed"]) == (11, 1)
    assert report["success"] > 0.0 and sorted(service.free) == [0, 1, 2, 3]
    assert service.count("release_one") == 1


def test_a_process_that_exits_releases_its_slot_once_and_its_forked_child_does_not(
    service: FakeService,
) -> None:
    program = f"""
import os
from agentenv.errors import InfrastructureError
from agentenv_envs.shop import RemoteShopEnv
env = RemoteShopEnv(service_url={service.url!r})
env.reset(seed=0)
child = os.fork()
if child == 0:
    try:
        env.step("search[kettle]")
    except InfrastructureError:
        env.close()
        raise SystemExit(7)
    raise SystemExit(8)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
env.step("search[kettle]")
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
    assert [name for name, _ in service.log] == ["reset", "interact", "release_one"]
