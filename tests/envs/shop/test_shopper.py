"""Who answers `ask[...]`: the script, a function, and a model behind a URL."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from agentenv.errors import InfrastructureError
from agentenv_envs.shop.env import ShopMultiTurnEnv, ShopPersonaEnv
from agentenv_envs.shop.records import Need, Task
from agentenv_envs.shop.shopper import ScriptedShopper


def wish(language: str = "en") -> Task:
    """A wish with four needs."""
    english = language == "en"
    return Task(
        id="t1",
        product_id="P",
        category=("kitchen", "kettle"),
        instruction="",
        request="I need a kettle.",
        attributes=(Need("material", "copper"), Need("cleaning", "wipe clean"))
        if english
        else (Need("材质", "紫铜"), Need("清洁", "一擦即净")),
        options=(Need("colour", "teal"),) if english else (Need("颜色", "湖蓝"),),
        price_cap=55.0,
        persona="",
        language=language,
    )


@pytest.mark.parametrize(
    ("question", "answer"),
    [
        ("What material should it be?", "It should be copper."),
        ("Which color?", "colour: teal, please."),
        ("Do you like copper?", "It should be copper."),
        ("How much can you spend?", "I can spend 55 at most."),
        ("Any preference for the capacity?", "I don't mind about that."),
        ("Which brand?", "I don't mind about that."),
        ("Which options do you want?", "colour: teal, please."),
        ("Tralala", "What do you mean? Ask me about the goods, an option such as the colour, or my budget."),
    ],
)
def test_the_script_tells_what_a_question_names(question: str, answer: str) -> None:
    assert ScriptedShopper(wish(), ["colour", "capacity"]).answer(question) == answer


def test_a_question_that_names_two_needs_gets_both() -> None:
    answer = ScriptedShopper(wish()).answer("Which material and which colour, and what is your budget?")
    assert {"copper", "teal", "55"} == {word for word in ("copper", "teal", "55", "wipe") if word in answer}


def test_open_questions_bring_one_need_each_until_nothing_is_left() -> None:
    shopper = ScriptedShopper(wish())
    answers = [shopper.answer("Anything else?") for _ in range(5)]
    assert len(set(answers[:4])) == 4 and answers[4] == "Nothing more that I can think of."
    assert [ScriptedShopper(wish()).answer("Anything else?") for _ in range(2)] == [answers[0]] * 2


@pytest.mark.parametrize(
    ("question", "answer"),
    [
        ("要什么颜色的？", "颜色要湖蓝。"),
        ("预算多少？", "最多花55。"),
        ("材质有要求吗", "要紫铜。"),
        ("品牌呢", "这个我无所谓。"),
    ],
)
def test_the_script_speaks_chinese(question: str, answer: str) -> None:
    assert ScriptedShopper(wish("zh")).answer(question) == answer


def test_needs_are_in_no_observation_before_they_are_asked_for() -> None:
    for language in ("en", "zh"):
        env = ShopMultiTurnEnv(products=360, language=language)
        for seed in range(20):
            first, _ = env.reset(seed=seed)
            needs = [need.value for need in (*env.task.attributes, *env.task.options)]
            assert not any(need in first for need in needs) and f"{env.task.price_cap:g}" not in first
            heard = ""
            for _ in range(len(needs) + 1):
                heard += env.step(
                    "ask[还有什么要求吗？]" if language == "zh" else "ask[What else do you want?]"
                )[0]
            assert all(need in heard for need in needs) and f"{env.task.price_cap:g}" in heard


def test_questions_cost_turns_and_are_counted() -> None:
    env = ShopMultiTurnEnv(products=360, max_turns=3)
    env.reset(seed=0)
    env.step("Ask [ What colour? ]")
    env.step("ask[anything else?]")
    *_, truncated, info = env.step("ask[]")
    assert truncated
    assert (info["metrics"]["questions"], info["metrics"]["invalid_actions"]) == (2, 1)


def test_a_persona_can_be_asked_too() -> None:
    env = ShopPersonaEnv(products=360, multi_turn=True)
    first, _ = env.reset(seed=0)
    assert env.max_turns == 40 and "ask[question" in first and env.task.persona in first
    assert env.step("ask[How much may it cost?]")[0].startswith("Shopper: I can spend")


def test_a_function_may_play_the_shopper_and_is_told_needs_and_questions() -> None:
    heard: list[Sequence[Mapping[str, str]]] = []

    def chat(messages: Sequence[Mapping[str, str]]) -> str:
        heard.append(messages)
        return f"answer\n {len(heard)}"

    env = ShopMultiTurnEnv(products=360, shopper=chat)
    env.reset(seed=0)
    assert env.step("ask[What colour?]")[0] == "Shopper: answer 1"
    env.step("ask[And the price?]")
    assert [message["role"] for message in heard[1]] == ["system", "user", "assistant", "user"]
    for need in (*env.task.attributes, *env.task.options):
        assert need.value in heard[1][0]["content"]


@pytest.mark.parametrize("fault", [OSError("gone"), "", None, 3])
def test_a_shopper_that_fails_is_infrastructure(fault: Any) -> None:
    def chat(messages: Sequence[Mapping[str, str]]) -> str:
        if isinstance(fault, Exception):
            raise fault
        result: str = fault
        return result

    env = ShopMultiTurnEnv(products=360, shopper=chat)
    env.reset(seed=0)
    with pytest.raises(InfrastructureError, match="the shopper's model"):
        env.step("ask[What colour?]")


@pytest.fixture
def model() -> Iterator[Any]:
    """An OpenAI-compatible server; `reply` and `status` say what it answers, `asked` what it was asked."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            server.asked.append((self.path, body, self.headers.get("authorization")))  # type: ignore[attr-defined]
            raw = json.dumps(server.reply).encode()  # type: ignore[attr-defined]
            self.send_response(server.status)  # type: ignore[attr-defined]
            self.send_header("content-length", str(len(raw)))
            self.send_header("location", f"http://localhost:{server.server_port}/elsewhere")
            self.end_headers()
            self.wfile.write(raw)

        def do_GET(self) -> None:
            server.asked.append((self.path, None, self.headers.get("authorization")))  # type: ignore[attr-defined]
            self.send_error(404)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server: Any = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.asked, server.status = [], 200
    server.reply = {"choices": [{"message": {"content": "Teal, please."}}]}
    server.url = f"http://127.0.0.1:{server.server_port}/v1"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_model_behind_a_url_plays_the_shopper(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGENTENV_SHOPPER_KEY", "k3y")
    env = ShopMultiTurnEnv(products=360, shopper=model.url, shopper_model="small")
    env.reset(seed=0)
    assert env.step("ask[What colour?]")[0] == "Shopper: Teal, please."
    ((path, body, key),) = model.asked
    assert (path, body["model"], key) == ("/v1/chat/completions", "small", "Bearer k3y")
    assert body["messages"][-1] == {"role": "user", "content": "What colour?"}


@pytest.mark.parametrize(
    ("status", "reply"),
    [(503, {}), (200, {"choices": []}), (200, {"choices": [{"message": {"content": None}}]})],
)
def test_a_model_that_answers_badly_is_infrastructure(model: Any, status: int, reply: Any) -> None:
    model.status, model.reply = status, reply
    env = ShopMultiTurnEnv(products=360, shopper=model.url)
    env.reset(seed=0)
    with pytest.raises(InfrastructureError):
        env.step("ask[What colour?]")


def test_a_redirection_takes_the_key_nowhere(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGENTENV_SHOPPER_KEY", "k3y")
    model.status = 302
    env = ShopMultiTurnEnv(products=360, shopper=model.url)
    env.reset(seed=0)
    with pytest.raises(InfrastructureError, match="HTTP 302"):
        env.step("ask[What colour?]")
    assert [path for path, _, _ in model.asked] == ["/v1/chat/completions"]


def test_a_model_that_is_not_there_is_infrastructure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentenv_envs.shop.chat._PAUSES_S", (0.0,))
    env = ShopMultiTurnEnv(products=360, shopper="http://127.0.0.1:9/v1")
    env.reset(seed=0)
    with pytest.raises(InfrastructureError, match=r"127\.0\.0\.1:9"):
        env.step("ask[What colour?]")
