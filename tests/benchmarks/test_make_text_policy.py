"""The policies of the text environments: what they are taught, what ships, and a run of the script at a tiny size."""

from __future__ import annotations

import functools
import importlib
import json
import random
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import agentenv
from agentenv.evaluation import success_rate
from agentenv_envs.text.key_door import ACTIONS

FOLDERS = {"pair": "policy", "all": "policy_all"}


@pytest.fixture(scope="module")
def script(repository: Path) -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(repository / "benchmarks"))
        yield importlib.import_module("make_text_policy")


@pytest.fixture(params=["pair", "all"])
def course(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def folder(repository: Path, course: str) -> Path:
    return repository / "envs" / "agentenv_envs" / "text" / FOLDERS[course]


def test_the_tokenizer_that_ships_is_the_one_that_the_script_makes(
    script: ModuleType, course: str, folder: Path
) -> None:
    ships = AutoTokenizer.from_pretrained(folder)
    assert ships.get_vocab() == script.build_tokenizer(script.COURSES[course].lessons).get_vocab()


def test_texts_come_back_from_their_tokens_and_episodes_are_short(
    script: ModuleType, course: str, folder: Path
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert (
        tokenizer.decode(tokenizer.encode("Straße: 1743!\n", add_special_tokens=False)) == "Straße: 1743!\n"
    )
    rng = random.Random(0)
    longest = {"KeyDoor-v0": 0, "StyledReply-v0": 0, "GuessNumber-v0": 0, "ToolArithmetic-v0": 0}
    for name, seed in ((name, seed) for name in script.COURSES[course].lessons for seed in range(40)):
        env: Any = agentenv.make(name)
        observation, _ = env.reset(seed=seed)
        length, ended = 0, False
        while not ended:
            action = env.demonstrate(0.6, rng)
            said = tokenizer.encode(action, add_special_tokens=False)
            heard = tokenizer.encode(observation, add_special_tokens=False)
            assert tokenizer.decode(said) == action and tokenizer.decode(heard) == observation
            # A tool with two numbers, each of at most two tokens but for results of five digits.
            assert len(said) <= (6 if name == "ToolArithmetic-v0" else 4)
            length += len(said) + len(heard) + 4
            observation, _, terminated, truncated, _ = env.step(action)
            ended = terminated or truncated
        longest[name] = max(longest[name], length)
    assert longest["KeyDoor-v0"] < 150
    assert max(longest.values()) == longest["KeyDoor-v0"]


def test_while_it_learns_to_read_mistakes_are_shown_but_not_imitated(script: ModuleType) -> None:
    lessons = {"KeyDoor-v0": script.Lesson(share=1.0, rows=1, reading=0.0, mediocre=0.0)}
    tokenizer = script.build_tokenizer(lessons)
    ids, weights = script.Episodes(tokenizer, lessons, "reading", seed=0).episode("KeyDoor-v0")
    assert len(ids) == len(weights) > 80 and set(weights) == {0.0}
    ids, weights = script.Episodes(tokenizer, lessons, "mediocre", seed=0).episode("KeyDoor-v0")
    # Twelve mistakes of one token and its end.
    assert weights.count(1.0) == 24
    imitated = [token for token, weight in zip(ids, weights, strict=True) if weight]
    assert {tokenizer.decode([token]) for token in imitated[0::2]} <= set(ACTIONS)
    assert set(imitated[1::2]) == {tokenizer.eos_token_id}


def test_demonstrations_are_of_training_tasks(script: ModuleType, course: str) -> None:
    lessons = script.COURSES[course].lessons
    episodes = script.Episodes(script.build_tokenizer(lessons), lessons, "reading", seed=0)
    assert {env.split for env in episodes.envs.values()} == {"train"}
    assert sum(lesson.share for lesson in lessons.values()) == pytest.approx(1.0)


def test_a_policy_has_the_success_that_its_folder_says(script: ModuleType, course: str, folder: Path) -> None:
    made = json.loads((folder / "made.json").read_text())
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert sum(p.numel() for p in model.parameters()) == made["parameters"] < 150_000
    tokenizer = AutoTokenizer.from_pretrained(folder)
    for name, said in made["heldout"]["mediocre"].items():
        assert said["episodes"] == 512 and said["failed"] == 0
        if name == "StyledReply-v0":
            assert 0.6 <= said["quality"] <= 0.8
            assert all(0.2 <= said[f"style_{style}"] <= 0.5 for style in ("plain", "polite", "loud"))
        else:
            assert 0.15 <= said["success"] <= 0.35
        played = success_rate(script.play(model, tokenizer, name, episodes=128), confidence=0.999)
        assert played.low <= said["success"] <= played.high


def test_the_right_action_has_a_real_probability_in_every_state(course: str, folder: Path) -> None:
    """What reinforcement learning is to raise must be there: on the way of the oracle, and where a mistake led."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    rng = random.Random(0)
    probabilities = []
    for seed in range(12):
        env: Any = agentenv.make("KeyDoor-v0", split="heldout")
        text, _ = env.reset(seed=seed)
        messages, ended = [{"role": "user", "content": text}], False
        while not ended:
            prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
            ids = tokenizer.encode(prompt, add_special_tokens=False, return_tensors="pt")
            with torch.no_grad():
                shares = model(ids).logits[0, -1].softmax(-1)
            right = [tokenizer.encode(a, add_special_tokens=False)[0] for a in env.solutions()]
            probabilities.append(shares[right].sum().item())
            action = env.demonstrate(0.8, rng)
            text, _, terminated, truncated, _ = env.step(action)
            messages += [{"role": "assistant", "content": action}, {"role": "user", "content": text}]
            ended = terminated or truncated
    assert len(probabilities) > 80
    assert min(probabilities) > 0.05
    assert 0.5 < sum(probabilities) / len(probabilities) < 0.8


def test_a_tiny_run_writes_a_policy_and_how_it_was_made(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = {
        "course": "all",
        "reading_steps": 3,
        "mediocre_steps": 2,
        "batch_size": 2,
        "evaluation_episodes": 4,
    }
    arguments = [str(part) for name, value in sizes.items() for part in (f"--{name}", value)]
    monkeypatch.setattr("sys.argv", ["make_text_policy.py", "--output_dir", str(tmp_path), *arguments])
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
    with torch.random.fork_rng():
        script.main()
    assert "held-out tasks after mediocre" in capsys.readouterr().out
    made = json.loads((tmp_path / "made.json").read_text())
    assert made["arguments"] == {**made["arguments"], **sizes, "seed": 0, "hidden_size": 64}
    assert made["heldout"].keys() == {"reading", "mediocre"}
    assert made["heldout"]["reading"].keys() == script.COURSES["all"].lessons.keys()
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert sum(p.numel() for p in model.parameters()) == made["parameters"]


def test_the_same_seed_trains_the_same_policy(script: ModuleType) -> None:
    def weights(seed: int) -> torch.Tensor:
        lessons = script.COURSES["pair"].lessons
        tokenizer = script.build_tokenizer(lessons)
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            model = script.build_model(tokenizer, 16, 1)
        demonstrations = script.Episodes(tokenizer, lessons, "reading", seed=seed)
        train = functools.partial(script.train, model, demonstrations, lr=1e-3, muon_lr=1e-3)
        train(steps=3, batch_size=2)
        return torch.cat([p.detach().flatten() for p in model.parameters()])

    assert torch.equal(weights(1), weights(1))
    assert not torch.equal(weights(1), weights(2))
