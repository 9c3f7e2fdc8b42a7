"""The viewer over HTTP: what it answers, to whom, and that nothing of a request becomes a path."""

import json
import os

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("httpx")

from starlette.testclient import TestClient

from agentenv.report.token_records import EpisodeTokens, SegmentTokens, TokenWriter
from agentenv.viewer.app import create_app

from .conftest import HOSTILE, episode


def client_of(path) -> TestClient:
    return TestClient(create_app(path), base_url="http://127.0.0.1:8000")


def ids(client, **parameters):
    answer = client.get("/api/episodes", params=parameters)
    assert answer.status_code == 200, answer.text
    return [row["episode_id"].removesuffix("-0") for row in answer.json()["rows"]]


@pytest.fixture
def run(make_run):
    return make_run(12)


@pytest.fixture
def client(run):
    return client_of(run.path)


def test_the_state_of_a_run_that_is_being_written(run, client):
    state = client.get("/api/run").json()
    assert (state["name"], state["state"], state["step"], state["max_steps"]) == ("lamps", "running", 3, 10)
    assert (state["episodes"], state["unreadable"], state["read_share"]) == (12, 0, 1.0)
    assert state["facets"]["outcome"] == {"solved": 6, "not solved": 6}
    assert state["warnings"] == []
    run.write_summary({"status": "failed", "error": HOSTILE})
    state = client.get("/api/run").json()
    assert state["state"] == "failed"
    assert "\\u{202e}gnp.exe\\u{1b}[31m" in state["warnings"][0]


def test_the_mark_changes_when_the_list_does(run, client):
    marks = [client.get("/api/run").json()["mark"] for _ in range(2)]
    run.log_trajectories("train", 4, [episode(20)])
    marks.append(client.get("/api/run").json()["mark"])
    run.rewind(3)
    marks.append(client.get("/api/run").json()["mark"])
    assert marks[0] == marks[1]
    assert len(set(marks)) == 3


def test_the_newest_come_first_by_pages(client):
    assert ids(client, size=5) == ["g11", "g10", "g9", "g8", "g7"]
    assert ids(client, size=5, page=3) == ["g1", "g0"]
    assert ids(client, size=5, page=99) == ["g1", "g0"]
    assert ids(client, size=2, order="ascending") == ["g0", "g1"]


@pytest.mark.parametrize(
    ("filters", "expected"),
    [
        ({"task": "TASK-3"}, ["g8", "g3"]),
        ({"outcome": "solved", "step_min": 3}, ["g10", "g8"]),
        ({"reward_min": 0.5, "reward_max": 1, "step_max": 1}, ["g2", "g0"]),
        ({"start_version_min": 1}, ["g11", "g10", "g9", "g8"]),
        ({"staleness_max": 0}, ["g3", "g2", "g1", "g0"]),
        ({"phase": "after"}, []),
        ({"end_reason": "max_turns"}, []),
        ({"end_reason": "terminated", "phase": "train", "task": "task-4"}, ["g9", "g4"]),
    ],
)
def test_filters_leave_what_passes_all_of_them(client, filters, expected):
    assert ids(client, **filters) == expected


def test_a_sorted_list_has_those_without_a_value_last(run, client):
    run.log_trajectories("after", 3, [episode(30)])
    assert ids(client, sort="staleness", size=2) == ["g11", "g10"]
    assert ids(client, sort="staleness", size=50)[-1] == "g30"
    assert ids(client, sort="staleness", order="ascending", size=50)[-1] == "g30"
    assert ids(client, sort="task_id", order="ascending", size=3) == ["g0", "g5", "g10"]


@pytest.mark.parametrize(
    "parameters",
    [{"sort": "__class__"}, {"page": 0}, {"size": 10_000}, {"reward_min": "nan"}, {"order": "up"}],
)
def test_what_is_not_allowed_is_refused_and_named(client, parameters):
    answer = client.get("/api/episodes", params=parameters)
    assert answer.status_code == 422
    assert next(iter(parameters)) in answer.json()["error"]


def test_an_episode_has_its_turns_with_rewards_and_the_others_of_its_task(client):
    found = client.get("/api/episode", params={"phase": "train", "step": 2, "episode_id": "g6-0"}).json()
    actions = [message for message in found["messages"] if message["action"]]
    assert [(item["turn"], item["reward"]) for item in actions] == [(1, 0.0), (2, 1.0)]
    assert [other["episode_id"] for other in found["others"]] == ["g11-0", "g1-0"]
    assert found["patch"] is None


def test_an_episode_is_found_before_the_index_is_whole(run, monkeypatch):
    monkeypatch.setattr("agentenv.viewer.app.INDEX_BUDGET_S", -1.0)  # one part of the file at a time
    monkeypatch.setattr("agentenv.viewer.followed_file._PART_BYTES", 1000)
    client = client_of(run.path)
    assert client.get("/api/run").json()["read_share"] < 0.5
    answer = client.get("/api/episode", params={"phase": "train", "step": 3, "episode_id": "g11-0"})
    assert answer.json()["row"]["episode_id"] == "g11-0"


def test_an_episode_that_is_not_there_is_one_clear_error(client):
    answer = client.get("/api/episode", params={"phase": "train", "step": 9, "episode_id": "../run.json"})
    assert answer.status_code == 404
    assert "no such episode" in answer.json()["error"]


def test_hostile_texts_have_nothing_hidden_and_stay_json(make_run):
    run = make_run(0)
    texts = [{"role": HOSTILE, "content": HOSTILE}, {"content": ["a", HOSTILE]}, HOSTILE, 5]
    run.log_trajectories(
        "train",
        1,
        [episode(0, episode_id=HOSTILE, messages=texts, info={"patch": HOSTILE, "a": float("nan")})],
    )
    client = client_of(run.path)
    answer = client.get("/api/episode", params={"phase": "train", "step": 1, "episode_id": HOSTILE})
    shown = json.loads(answer.text, parse_constant=pytest.fail)
    assert answer.headers["content-type"] == "application/json"
    assert "\\u{202e}gnp.exe\\u{1b}[31m" in shown["patch"]
    del shown["row"]["key"]  # names the episode, and is not shown
    assert not {"\u202e", "\x1b"}.intersection(json.dumps(shown, ensure_ascii=False))
    assert len(shown["messages"]) == 4


def test_what_is_nested_deeply_costs_no_more_than_itself(run, client):
    line = {"phase": "train", "step": 1, "terminated": True}
    depths = (
        500,
        *range(900, 1010, 10),
        100_000,
    )  # json reads less than the interpreter's limit, and writes less yet
    for depth in depths:
        nested = "[" * depth + "]" * depth
        head = json.dumps(line | {"episode_id": f"deep {depth}"})[:-1]
        with run.trajectories_path.open("a") as out:
            out.write(head + f', "info": {{"a": {nested}}}, "messages": [{{"content": {nested}}}]}}\n')
        (run.path / "run.json").write_text(f'{{"name": {nested}, "format": {nested}}}')
        assert client.get("/api/run").status_code == 200
    assert client.get("/api/run").json()["episodes"] == 12 + len(depths)
    for depth in depths:
        answer = client.get("/api/episode", params={**line, "episode_id": f"deep {depth}"})
        assert answer.status_code == (200 if depth == 500 else 404) or 900 <= depth <= 1000


def test_the_tokens_of_an_episode_are_those_that_training_recorded(run, client):
    numbers = {"rollout_logprobs": [None, -0.5], "policy_logprobs": [None, -0.25], "values": [None, 0.5]}
    segment = SegmentTokens(
        token_ids=[1, 2], texts=["a", "\u202eb"], action_mask=[False, True], policy_versions=[-1, 0],
        advantages=[None, 0.25], kept=[None, False], **numbers,
    )  # fmt: skip
    TokenWriter(run.path).append([EpisodeTokens("g5-0", 2, [segment])])
    found = client.get("/api/tokens", params={"phase": "train", "step": 2, "episode_id": "g5-0"}).json()
    (shown,) = found["segments"]
    assert shown["texts"] == ["a", "\\u{202e}b"]
    assert shown["ratios"] == [None, 1.28403]  # exp(-0.25 + 0.5)
    assert shown["kept"] == [None, False]
    none = client.get("/api/tokens", params={"phase": "train", "step": 2, "episode_id": "g4-0"}).json()
    assert none == {"missing": "No record of its tokens was kept."}


@pytest.mark.parametrize("damage", ["records.bin", "index.jsonl"])
def test_damaged_records_of_tokens_are_said_to_be(run, client, damage):
    (run.path / "tokens").mkdir()
    (run.path / "tokens" / "records.bin").write_bytes(b"agentenv tokens 1\nxxx")
    entry = {"episode_id": "g5-0", "phase": "train", "step": 2, "offset": 18, "bytes": 3, "crc": 1}
    if damage == "index.jsonl":
        del entry["offset"]
    (run.path / "tokens" / "index.jsonl").write_text(json.dumps(entry) + "\n")
    found = client.get("/api/tokens", params={"phase": "train", "step": 2, "episode_id": "g5-0"})
    assert "can't be read" in found.json()["missing"]


@pytest.mark.parametrize("host", ["127.0.0.1:8000", "localhost:8000", "localhost"])
def test_this_machine_is_answered(client, host):
    assert client.get("/api/run", headers={"host": host}).status_code == 200


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8000", "127.0.0.1.evil.example", "", "a b"])
def test_a_foreign_name_for_this_machine_reads_nothing(client, host):
    for path in ("/", "/api/run", "/api/episodes"):
        answer = client.get(path, headers={"host": host})
        assert answer.status_code == 400
        assert "lamps" not in answer.text


@pytest.mark.parametrize("path", ["/", "/main.js", "/api/run", "/api/chart/1.svg", "/nothing"])
def test_every_answer_forbids_what_the_page_does_not_need(client, path):
    headers = client.get(path).headers
    policy = headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'")
    assert "require-trusted-types-for 'script'; trusted-types 'none'" in policy
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["cross-origin-resource-policy"] == "same-origin"


@pytest.mark.parametrize(
    "path",
    [
        "/run.json",
        "/..%2frun.json",
        "/%2e%2e/run.json",
        "//etc/passwd",
        "/static/main.js",
        "/api/chart/..%2f..%2frun.json",
        "/api/chart/x.svg",
        "/api/chart/999.svg",
    ],
)
def test_no_other_file_is_served(client, path):
    assert client.get(path).status_code == 404


@pytest.mark.parametrize("method", ["post", "put", "delete", "patch"])
def test_nothing_can_be_changed(client, method):
    assert getattr(client, method)("/api/run").status_code == 405


def test_a_curve_is_an_svg_of_the_runs_metrics(client):
    chart = client.get("/api/run").json()["charts"][1]
    assert chart["title"] == "Reward"
    answer = client.get(f"/api/chart/{chart['number']}.svg")
    assert answer.headers["content-type"] == "image/svg+xml"
    assert "<path" in answer.text


def test_a_directory_of_another_version_or_without_its_files_is_shown_as_far_as_it_goes(make_run):
    run = make_run(4)
    run.record["format"] = 0
    run.save_record()
    assert "layout version 0" in client_of(run.path).get("/api/run").json()["warnings"][0]
    for name in ("run.json", "metrics.jsonl", "trajectories.jsonl"):
        (run.path / name).unlink()
        os.mkfifo(run.path / name)  # no file, and one that would block whoever opens it
    client = client_of(run.path)
    state = client.get("/api/run").json()
    assert (state["episodes"], state["charts"]) == (0, [])
    assert "run.json: there is no such file" in state["warnings"][0]
    assert ids(client) == []


def test_metrics_that_are_no_numbers_draw_nothing(make_run):
    run = make_run(4)
    with run.metrics_path.open("a") as out:
        out.write(
            '{"step": 2, "reward": "<b>", "success": NaN}\nnot json\n{"step": {}}\n{"step": 3, "reward": 1e999}\n'
        )
    client = client_of(run.path)
    assert client.get("/api/run").json()["step"] == 3
    svg = client.get("/api/chart/1.svg").text
    assert "<b>" not in svg and "nan" not in svg.lower() and "inf" not in svg.lower()
