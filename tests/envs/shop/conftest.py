"""Fixtures of the shop's tests; all of them need the extra [shop] and are skipped without it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agentenv_envs.shop.env import ShopEnv, ShopSingleTurnEnv
from agentenv_envs.shop.policies import Oracle

Play = Callable[..., dict[str, Any]]
Record = Callable[..., dict[str, Any]]


@pytest.fixture(autouse=True)
def _libraries() -> None:
    pytest.importorskip("bm25s")
    pytest.importorskip("rapidfuzz")


@pytest.fixture
def play() -> Play:
    """Plays an episode by a policy, by default the oracle; `info` of its last step, with "reward" and "steps"."""

    def episode(env: ShopEnv, *, seed: int = 0, policy: Any = None) -> dict[str, Any]:
        policy = policy or Oracle(env, 0)
        observation, info = env.reset(seed=seed)
        policy.begin(observation, info)
        steps = 0
        while True:
            observation, reward, terminated, truncated, info = env.step(policy.act(observation))
            steps += 1
            if terminated or truncated:
                return {**info, "reward": reward, "steps": steps, "truncated": truncated, "text": observation}

    return episode


@pytest.fixture
def env() -> ShopEnv:
    """The plainest one."""
    return ShopSingleTurnEnv(products=360)


def official_record(number: int, **changes: Any) -> dict[str, Any]:
    """A product in the official schema, with invented content."""
    record: dict[str, Any] = {
        "asin": f"70{number:04d}",
        "title": f"云朵牌陶瓷马克杯 {number}号 雾面釉",
        "shop_name": "云朵杂货",
        "category": "家居›厨房›马克杯",
        "attribute": ["陶瓷", "雾面釉", f"刻字{number}甲"],
        "pricing": ["39.90", "59.90"],
        "customization_options": {
            "颜色": [{"value": "雾蓝色", "price": None}, {"value": "砂黄色", "price": None}],
            "容量": [{"value": "三百毫升", "price": 39.9}, {"value": "半升装", "price": "¥59.90"}],
        },
        "tag": "eval" if number % 3 == 0 else "train",
        "instructions": [
            {
                "instruction": f"想要一个雾面釉的马克杯，刻字{number}甲，砂黄色，半升装，预算70以内",
                "instruction_simple": "想要一个马克杯",
                "attributes": ["雾面釉", f"刻字{number}甲"],
                "options": ["砂黄色", "半升装"],
            }
        ],
        "user_persona": {"职业": "护士", "偏好": ["雾面釉", f"刻字{number}甲"]} if number % 2 else None,
        "reason_key": ["偏好"],
    }
    record.update(changes)
    return record


@pytest.fixture
def record() -> Record:
    """Makes a product of a number, in the official schema and with invented content; arguments replace its fields."""
    return official_record


@pytest.fixture
def official(tmp_path: Path) -> Callable[..., Path]:
    """Writes an official file of records as JSON lines, or as what `name` says."""

    def write(records: list[dict[str, Any]] | None = None, name: str = "items.jsonl") -> Path:
        records = [official_record(number) for number in range(12)] if records is None else records
        path = tmp_path / name
        path.write_text(
            "\n".join(json.dumps(record, ensure_ascii=False) for record in records), encoding="utf-8"
        )
        return path

    return write
