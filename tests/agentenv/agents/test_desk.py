"""Episodes over HTTP: opened with the token, ended with a reward, written down."""

import json
from pathlib import Path
from typing import Any

import pytest

from agentenv.agents.desk import EpisodeDesk, read_token
from agentenv.agents.endpoint import EpisodeSettings
from agentenv.errors import UsageError
from agentenv.trajectory import Trajectory

_HEADERS = {"authorization": "Bearer a-token-of-the-desk"}


async def _play(service: Any, opened: dict[str, Any]) -> None:
    answer = await service.client.post(
        f"{opened['base_url']}/chat/completions",
        json={"model": opened["model"], "messages": [{"role": "user", "content": "hi"}]},
        headers={"authorization": f"Bearer {opened['api_key']}"},
    )
    assert answer.status_code == 200


def test_an_episode_over_http_yields_its_trajectory(serve: Any, run: Any, tmp_path: Path) -> None:
    output = tmp_path / "episodes.jsonl"

    async def check() -> None:
        async with serve(["hello"], output=output) as service:
            opened = await service.client.post(
                "/episodes", json={"id": "one", "task_id": "t", "seed": 7}, headers=_HEADERS
            )
            assert opened.status_code == 201
            await _play(service, opened.json())
            listed = await service.client.get("/episodes", headers=_HEADERS)
            assert listed.json()["episodes"] == [{"id": "one", "task_id": "t", "answers": 1}]
            ended = await service.client.post(
                "/episodes/one/end", json={"reward": 0.5, "info": {"success": True}}, headers=_HEADERS
            )
            trajectory = Trajectory.from_dict(ended.json()["trajectory"])
            trajectory.validate()
            assert (trajectory.reward, trajectory.task_id, trajectory.seed) == (0.5, "t", 7)
            assert trajectory.num_action_tokens == 6 and trajectory.success and trajectory.terminated
            assert Trajectory.from_json(output.read_text()) == trajectory
            assert service.endpoint.num_open == 0

    run(check())


def test_an_agents_key_opens_and_ends_nothing(serve: Any, run: Any) -> None:
    async def check() -> None:
        async with serve(["hello"]) as service:
            opened = (await service.client.post("/episodes", json={}, headers=_HEADERS)).json()
            mine = {"authorization": f"Bearer {opened['api_key']}"}
            path = f"/episodes/{opened['id']}"
            for method, url in (
                ("POST", "/episodes"),
                ("POST", f"{path}/end"),
                ("DELETE", path),
                ("GET", "/episodes"),
            ):
                answer = await service.client.request(method, url, json={"reward": 1.0}, headers=mine)
                assert answer.status_code == 401 and answer.json()["error"]["code"] == "invalid_token"
            desk_key = await service.client.post(
                "/v1/chat/completions", json={"messages": []}, headers=_HEADERS
            )
            assert desk_key.status_code == 401

    run(check())


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({}, "reward"),
        ({"reward": "1"}, "reward"),
        ({"reward": True}, "reward"),
        ({"reward": 1.0, "colour": 1}, "colour"),
        ({"reward": 1.0, "info": {"failure": "x"}}, "info.failure"),
        ([], "JSON object"),
    ],
)
def test_an_end_without_a_reward_ends_nothing(serve: Any, run: Any, body: Any, named: str) -> None:
    async def check() -> None:
        async with serve(["hello"]) as service:
            await service.client.post("/episodes", json={"id": "one"}, headers=_HEADERS)
            answer = await service.client.post("/episodes/one/end", json=body, headers=_HEADERS)
            assert answer.status_code == 400 and named in answer.json()["error"]["message"]
            assert service.endpoint.num_open == 1

    run(check())


def test_a_reward_that_is_no_number_is_refused(serve: Any, run: Any) -> None:
    async def check() -> None:
        async with serve(["hello"]) as service:
            await service.client.post("/episodes", json={"id": "one"}, headers=_HEADERS)
            answer = await service.client.post(
                "/episodes/one/end", content='{"reward": NaN}', headers=_HEADERS
            )
            assert answer.status_code == 400

    run(check())


@pytest.mark.parametrize(
    "body", [{"id": "a/b"}, {"id": 3}, {"max_turns": 0}, {"max_turns": 6}, {"seed": "x"}, {"colour": 1}]
)
def test_an_opening_with_a_bad_field_opens_nothing(serve: Any, run: Any, body: Any) -> None:
    async def check() -> None:
        async with serve(["hello"]) as service:
            answer = await service.client.post("/episodes", json=body, headers=_HEADERS)
            assert answer.status_code == 400 and service.endpoint.num_open == 0

    run(check())


def test_an_id_is_in_use_until_its_episode_ends(serve: Any, run: Any) -> None:
    async def check() -> None:
        async with serve(["hello"]) as service:
            statuses = [
                (await service.client.post("/episodes", json={"id": "one"}, headers=_HEADERS)).status_code
                for _ in range(2)
            ]
            assert statuses == [201, 400]
            assert (await service.client.delete("/episodes/one", headers=_HEADERS)).json() == {
                "discarded_tokens": 0
            }
            gone = await service.client.post("/episodes/one/end", json={"reward": 1}, headers=_HEADERS)
            assert gone.status_code == 404
            again = await service.client.post("/episodes", json={"id": "one"}, headers=_HEADERS)
            assert again.status_code == 201

    run(check())


def test_a_failed_episode_is_no_sample(serve: Any, run: Any) -> None:
    async def check() -> None:
        async with serve(["hello"]) as service:
            opened = (await service.client.post("/episodes", json={"id": "one"}, headers=_HEADERS)).json()
            await service.model.close()
            answer = await service.client.post(
                f"{opened['base_url']}/chat/completions",
                content=json.dumps({"messages": [{"role": "user", "content": "hi"}]}),
                headers={"authorization": f"Bearer {opened['api_key']}"},
            )
            assert answer.status_code == 503
            ended = await service.client.post("/episodes/one/end", json={"reward": 1}, headers=_HEADERS)
            assert ended.status_code == 409

    run(check())


def test_a_token_is_one_line_of_some_length(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("one two\n")
    with pytest.raises(UsageError, match="one line with one token"):
        read_token(file)
    with pytest.raises(UsageError, match="No such file"):
        read_token(tmp_path / "none")
    with pytest.raises(UsageError, match="at least 16"):
        EpisodeDesk(None, None, "short", EpisodeSettings())  # type: ignore[arg-type]
