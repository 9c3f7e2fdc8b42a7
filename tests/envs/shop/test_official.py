"""Official files, in all three forms, sound and broken; their content is invented."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agentenv.errors import UsageError
from agentenv_envs.shop.catalogue import CatalogueSpec, load_catalogue
from agentenv_envs.shop.env import ShopMultiTurnEnv, ShopPersonaEnv, ShopSingleTurnEnv
from agentenv_envs.shop.official import read_catalogue
from agentenv_envs.shop.reward import score

Write = Callable[..., Path]
Play = Callable[..., dict[str, Any]]
Record = Callable[..., dict[str, Any]]


def test_the_three_forms_hold_the_same_products_and_wishes(tmp_path: Path, record: Record) -> None:
    records = [record(number) for number in range(9)]
    array = json.dumps(records, ensure_ascii=False, indent=1)
    (tmp_path / "items.json").write_text(array, encoding="utf-8")
    (tmp_path / "items.json.gz").write_bytes(gzip.compress(array.encode()))
    lines = "\n".join(json.dumps(record) for record in records)
    (tmp_path / "items.jsonl").write_text(f"\ufeff{lines}\n\n", encoding="utf-8")
    (tmp_path / "items.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    first = read_catalogue(tmp_path / "items.json")
    assert len(first[0]) == 9 and len(first[1]["eval"]) == 3 and len(first[1]["train"]) == 6
    for name in ("items.json.gz", "items.jsonl", "items.jsonl.gz"):
        assert read_catalogue(tmp_path / name) == first


def test_a_record_is_read_as_it_stands(official: Write, record: Record) -> None:
    products, tasks = read_catalogue(official([record(1)]))
    (product,) = products
    assert product.category == ("家居", "厨房", "马克杯") and product.leaf == "马克杯"
    assert (product.price, product.price_high) == (39.9, 59.9)
    assert product.options[1].values == ("三百毫升", "半升装") and product.options[1].prices == (39.9, 59.9)
    (task,) = tasks["train"]
    assert task.price_cap == 70.0 and task.instruction.endswith("预算70以内")
    assert task.request == "想要一个马克杯" and task.persona == "职业: 护士; 偏好: 雾面釉, 刻字1甲"


def test_a_wish_without_a_budget_gets_one_that_its_product_keeps_and_says_it(
    official: Write, record: Record
) -> None:
    made = record(1)
    made["instructions"][0]["instruction"] = "Get a mug, 半升装"
    ((product,), tasks) = read_catalogue(official([made]))
    (task,) = tasks["train"]
    # 59.9 for the half litre, and a tenth, up to the next 5.
    assert task.price_cap == 70.0 and task.instruction == "Get a mug, 半升装（价格不超过70）"
    assert score(task, product, ["砂黄色", "半升装"], 59.9).success == 1.0


@pytest.mark.parametrize(
    ("pricing", "low", "high"),
    [(12, 12.0, 12.0), ("¥1,299.00", 1299.0, 1299.0), ("$10.5$20", 10.5, 20.0), (["8", 9.5], 8.0, 9.5)],
)
def test_prices_come_as_numbers_texts_and_lists(
    official: Write, pricing: Any, low: float, high: float, record: Record
) -> None:
    ((product,), _) = read_catalogue(official([record(1, pricing=pricing)]))
    assert (product.price, product.price_high) == (low, high)


def test_options_may_be_called_instruction_options_and_name_their_axis(
    official: Write, record: Record
) -> None:
    made = record(1)
    wish = made["instructions"][0]
    wish["instruction_options"] = {"颜色": wish.pop("options")[0]}
    _, tasks = read_catalogue(official([made]))
    ((need,),) = [task.options for task in tasks["train"]]
    assert (need.axis, need.value) == ("颜色", "砂黄色")


def renamed(old: str, new: str) -> Callable[[Record], dict[str, Any]]:
    def make(record: Record) -> dict[str, Any]:
        made = record(4)
        made[new] = made.pop(old)
        return made

    return make


def wish_without(field: str) -> Callable[[Record], dict[str, Any]]:
    def make(record: Record) -> dict[str, Any]:
        made = record(4)
        del made["instructions"][0][field]
        return made

    return make


def changed(number: int = 1, **fields: Any) -> Callable[[Record], dict[str, Any]]:
    return lambda record: record(number, **fields)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (renamed("asin", "id"), r"line 2: the field 'asin' is missing; there are 'title',"),
        (renamed("shop_name", "shopname"), r"line 2: unknown field 'shopname'; did you mean 'shop_name'\?"),
        (renamed("customization_options", "options"), r"the field 'customization_options' is missing"),
        (wish_without("attributes"), r"instructions\[0\]: the field 'attributes' is missing"),
        (wish_without("options"), r"instructions\[0\] has neither options nor instruction_options"),
        (changed(1, tag="test"), r"line 2: tag must be one of train, eval, got 'test'"),
        (changed(1, title=" "), r"title must be a text that is not empty"),
        (changed(1, pricing=0), r"pricing must be above 0 and finite, got 0"),
        (changed(1, pricing=True), r"pricing must be a number"),
        (changed(1, attribute="陶瓷"), r"attribute must be a list of texts, got a text"),
        (changed(1, customization_options=[]), r"customization_options must be an object of lists"),
        (changed(1, customization_options={"颜色": [{"value": ""}]}), r"\['颜色'\]: value must be"),
        (changed(0), r"line 2: asin '700000' is that of line 1 already"),
        (changed(1, pricing="", customization_options={}), r"pricing holds no number"),
    ],
)
def test_a_broken_record_is_refused_by_line_and_field(
    official: Write, record: Record, make: Callable[[Record], dict[str, Any]], message: str
) -> None:
    path = official([record(0), make(record)])
    with pytest.raises(UsageError, match=message) as caught:
        read_catalogue(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("items.csv", b"asin,title", "unknown kind of file; allowed: .json, "),
        ("items.json", b"[\n\n{oops}]", "line 3, column 2: no JSON"),
        ("items.json", b'{"asin": 1}', "line 1: a JSON array of products is needed"),
        ("items.json", b"\n ", "line 2: a JSON array of products is needed"),
        ("items.json", b"[", "line 1, column 2: no JSON"),
        ("items.json", b"[3 4]", "record 0"),
        ("items.json", b'[{"asin": 1},]', "the field 'title' is missing"),
        ("items.json", b"[]", "it holds no product"),
        ("items.json", b"[3]", r"line 1 \(record 0\): an object is needed, not a number"),
        ("items.jsonl", b'\n{"asin": 1', "line 2, column"),
        ("items.jsonl", b'{"asin": 1} 2', "line 1: no JSON: something stands after the object"),
        ("items.json", b'[\n"\xff"]', "line 2: not UTF-8"),
        ("items.jsonl", b"\n1" + b"1" * 5000, "line 2: JSON that can't be read"),
        ("items.jsonl", b"\xff\xfe", "line 1: not UTF-8"),
        ("items.json", b"[" * 200_000, "JSON that can't be read"),
        ("items.json", b'[\n{"title": "\\ud83d"}]', "line 2: JSON that can't be read: .*surrogates"),
        ("items.json.gz", b"not gzip at all", "damaged gzip"),
        ("items.json.gz", gzip.compress(b"[1, 2]" * 999, mtime=0)[:-20], "damaged gzip"),
    ],
)
def test_a_damaged_file_is_refused_by_name_and_place(
    tmp_path: Path, name: str, content: bytes, message: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UsageError, match=message) as caught:
        ShopSingleTurnEnv(data=str(tmp_path / name))
    assert str(tmp_path / name) in str(caught.value)


def test_an_absent_file_says_where_it_comes_from(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="which its authors publish"):
        ShopSingleTurnEnv(data=str(tmp_path / "absent.json"))
    with pytest.raises(UsageError, match="Is a directory"):
        ShopSingleTurnEnv(data=str(tmp_path))


def test_each_seed_below_the_number_of_wishes_brings_another_one(official: Write) -> None:
    env = ShopSingleTurnEnv(data=str(official()), split="eval")
    ids = [env.reset(seed=seed)[1]["task_id"] for seed in range(8)]
    assert len(set(ids[:4])) == 4 and ids[4:] == ids[:4]


@pytest.mark.parametrize("kind", [ShopSingleTurnEnv, ShopMultiTurnEnv, ShopPersonaEnv])
def test_the_oracle_buys_what_each_official_wish_asks_for(kind: Any, official: Write, play: Play) -> None:
    env = kind(data=str(official()), split="train")
    assert [play(env, seed=seed)["success"] for seed in range(8)] == [True] * 8


def test_persona_mode_takes_only_wishes_that_have_one(official: Write, record: Record) -> None:
    env = ShopPersonaEnv(data=str(official()), split="train")
    for seed in range(8):
        assert "职业: 护士" in env.reset(seed=seed)[0]
    plain = official([record(number, user_persona=None) for number in range(3)])
    with pytest.raises(UsageError, match="no wish whose tag is 'train' and that has a user_persona"):
        ShopPersonaEnv(data=str(plain), split="train")


def test_a_split_that_the_file_lacks_is_refused_with_those_there_are(official: Write, record: Record) -> None:
    with pytest.raises(UsageError, match=r"split of items\.jsonl must be one of train, eval, got 'heldout'"):
        ShopSingleTurnEnv(data=str(official()), split="heldout")
    only = official([record(1)])
    with pytest.raises(UsageError, match="no wish whose tag is 'eval'"):
        ShopSingleTurnEnv(data=str(only), split="eval")


def test_two_files_of_the_same_content_are_one_catalogue(official: Write, record: Record) -> None:
    one, other = official(name="one.jsonl"), official(name="other.jsonl")
    assert load_catalogue(CatalogueSpec(data=str(one))) is load_catalogue(CatalogueSpec(data=str(other)))
    one.write_text(json.dumps(record(5)), encoding="utf-8")
    assert len(load_catalogue(CatalogueSpec(data=str(one))).products) == 1


@pytest.mark.parametrize(
    ("ending", "message"),
    [
        ("", r"line 4: no JSON: ',' or '\]' is missing after line 3 \(record 1\)"),
        (",", "line 4, column 1: no JSON"),
        (",]", "line 3: no JSON: a record is missing after ','"),
        ("] x", "line 3: no JSON: something stands after the array"),
        (",{]", "line 3, column"),
    ],
)
def test_an_array_that_ends_badly_is_refused_by_line(
    tmp_path: Path, record: Record, ending: str, message: str
) -> None:
    rows = ",\n".join(json.dumps(record(number)) for number in range(2))
    (tmp_path / "items.json").write_text(f"[\n{rows}{ending}\n", encoding="utf-8")
    with pytest.raises(UsageError, match=message):
        read_catalogue(tmp_path / "items.json")


def test_a_broken_record_of_an_array_is_refused_by_line_and_number(tmp_path: Path, record: Record) -> None:
    rows = [json.dumps(record(number), indent=1) for number in range(2)]
    rows.append(json.dumps(record(2, tag="x"), indent=1))
    text = "[" + ",\n".join(rows) + "]"
    (tmp_path / "items.json").write_text(text, encoding="utf-8")
    line = 1 + text.count("\n", 0, text.index(rows[2]))
    with pytest.raises(
        UsageError, match=rf"items\.json: line {line} \(record 2\): tag must be one of train, eval"
    ):
        read_catalogue(tmp_path / "items.json")


def test_a_value_of_two_axes_or_of_a_control_is_told_apart_by_its_axis(
    official: Write, record: Record, play: Play
) -> None:
    options = {"外": [{"value": "红"}, {"value": "details"}], "内": [{"value": "蓝"}, {"value": "红"}]}
    made = record(1, customization_options=options, pricing=10)
    made["instructions"][0]["options"] = {"外": "details", "内": "红"}
    env = ShopSingleTurnEnv(data=str(official([made])))
    env.reset(seed=0)
    env.step("search[云朵牌陶瓷马克杯]")
    env.step("click[700001]")
    assert env.session.buttons()[:4] == ["红", "外: details", "蓝", "内: 红"]
    assert len(env.session.buttons()) == len(set(env.session.buttons()))
    env.step("click[红]")
    env.step("click[ 内:  红 ]")
    assert env.session.chosen == {"外": "红", "内": "红"}
    assert "家居 > 厨房" in env.step("click[details]")[0]
    env.step("click[back to product]")
    env.step("click[外: details]")
    assert env.session.chosen == {"外": "details", "内": "红"}
    assert play(env)["success"]


def test_a_product_that_is_called_like_the_button_is_opened_and_not_bought(
    official: Write, record: Record
) -> None:
    env = ShopSingleTurnEnv(data=str(official([record(1, title="Buy now"), record(2, asin="BUY NOW")])))
    env.reset(seed=0)
    env.step("search[buy 2号]")
    for _ in range(2):
        text, _, terminated, _, info = env.step("click[buy now]")
        assert terminated == text.startswith("Bought")
    assert terminated and "bought" in info


def test_half_a_character_may_have_its_other_half(official: Write, record: Record) -> None:
    path = official([record(1)])
    path.write_text(json.dumps(record(1, title="杯 \U0001f600")))  # as two escapes
    env = ShopSingleTurnEnv(data=str(path))
    assert env.catalogue.products[0].title == "杯 \U0001f600"


def test_a_stated_budget_below_the_price_is_not_taken(official: Write, record: Record) -> None:
    made = record(1)
    made["instructions"][0]["instruction"] = "Get a mug, 半升装, budget 20"
    _, tasks = read_catalogue(official([made]))
    assert tasks["train"][0].price_cap == 70.0
    assert tasks["train"][0].instruction.endswith("（价格不超过70）")
