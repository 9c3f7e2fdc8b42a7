"""The viewer in a browser: list, filters, an episode, its tokens, two side by side, a live run, and hostile text."""

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("fastapi")

with contextlib.suppress(ImportError):  # the tests are skipped then
    from playwright.sync_api import expect

from agentenv.report import RunDirectory
from agentenv.report.token_records import EpisodeTokens, SegmentTokens
from agentenv.testing.browser import chromium, missing_browser, served
from agentenv.viewer.app import create_app

from .conftest import HOSTILE, episode

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(missing_browser() != "", reason=missing_browser()),
]

EPISODES = 120
PATCH = "diff --git a/app.py b/app.py\n--- a/app.py\n+++ b/app.py\n@@ -1,2 +1,2 @@\n def lamp():\n-    off\n+    on\n"


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Iterator[RunDirectory]:
    """A run that is going on, with two steps of 60 episodes."""
    run = RunDirectory.create(tmp_path_factory.mktemp("runs") / "lamps", {"name": "lamps"})
    for step in (1, 2):
        numbers = range(60 * (step - 1), 60 * step)
        run.log_trajectories("train", step, [episode(number, start_version=0) for number in numbers])
        run.log_metrics(step, {"reward": step / 10, "success": 0.5})
    yield run
    run.close()


@pytest.fixture(scope="module")
def url(run) -> Iterator[str]:
    with served(create_app(run.path)) as url:
        yield url


@pytest.fixture(scope="module")
def window(url) -> Iterator[Any]:
    """A page, for all tests: a new one takes longer than most of them."""
    with chromium() as browser:
        page = browser.new_page(viewport={"width": 1280, "height": 900})
        page.set_default_timeout(60_000)
        expect.set_options(timeout=60_000)
        yield page


@pytest.fixture
def page(window, url) -> Iterator[Any]:
    """The list as it is opened; nothing may ask, and nothing may go wrong in the console."""
    troubles: list[str] = []

    def hear(message: Any) -> None:
        if message.type in ("error", "warning"):
            troubles.append(message.text)

    def refuse(dialog: Any) -> None:
        troubles.append(f"dialog: {dialog.message}")
        dialog.dismiss()

    def fail(error: Any) -> None:
        troubles.append(f"uncaught: {error}")

    listeners = {"console": hear, "dialog": refuse, "pageerror": fail}
    for name, listener in listeners.items():
        window.on(name, listener)
    window.goto("about:blank")
    window.goto(url)
    window.wait_for_selector("table.list tbody tr")
    window.troubles = troubles
    yield window
    for name, listener in listeners.items():
        window.remove_listener(name, listener)
    assert troubles == []


def shown(page) -> list[str]:
    return [
        text.removesuffix("-0") for text in page.locator("table.list tbody td:last-child").all_inner_texts()
    ]


def until(page, text: str) -> None:
    """Wait for the line that counts the episodes."""
    page.wait_for_function(
        "text => document.querySelector('[role=status]').textContent.includes(text)", arg=text
    )


def test_the_list_has_the_newest_first_by_pages_under_the_curves_of_the_run(page):
    assert shown(page)[:2] == ["g119", "g118"]
    assert len(shown(page)) == 100
    assert "running, step 2" in page.inner_text("header")
    until(page, "120 episodes, 50.0 % solved")
    curves = page.locator("img.chart")
    assert [image.get_attribute("alt") for image in curves.all()] == ["Success", "Reward"]
    for image in curves.all():
        expect(image).to_have_js_property("complete", True)
        assert image.evaluate("image => image.naturalWidth") == 560
    page.click("text=Next")
    expect(page.locator("table.list tbody tr")).to_have_count(20)
    assert shown(page)[-1] == "g0"


def test_a_click_on_a_head_sorts_and_another_one_turns_round(page):
    first = page.locator("tbody td:nth-child(5)").first
    page.click("th button:has-text('reward')")
    page.wait_for_selector("th[aria-sort=descending]")
    expect(first).to_have_text("1")
    page.click("th button:has-text('reward')")
    page.wait_for_selector("th[aria-sort=ascending]")
    expect(first).to_have_text("0")


def test_filters_stand_in_the_address_so_that_back_undoes_them(page):
    page.select_option("select[name=outcome]", "solved")
    until(page, "60 episodes, 100.0 % solved")
    page.fill("input[name=task]", "TASK-3")
    page.press("input[name=task]", "Enter")
    until(page, "12 episodes")
    page.fill("input[name=step_min]", "2")
    page.press("input[name=step_min]", "Enter")
    until(page, "6 episodes")
    assert shown(page) == ["g118", "g108", "g98", "g88", "g78", "g68"]
    page.reload()
    until(page, "6 episodes")
    page.go_back()
    until(page, "12 episodes")
    page.click("text=Clear")
    until(page, "120 episodes")


def test_an_episode_is_a_conversation_with_the_policys_turns_apart(page):
    page.click("text=g118-0")
    page.wait_for_selector(".message")
    assert page.locator(".message.assistant pre").all_inner_texts() == [
        "press the button",
        "turn the lamp on 118",
    ]
    assert page.locator(".message.other pre").all_inner_texts() == ["The lamp is off.", "Nothing happens."]
    assert [text.split() for text in page.locator(".message.assistant .role").all_inner_texts()] == [
        ["policy,", "turn", "1", "reward", "0"],
        ["policy,", "turn", "2", "reward", "1"],
    ]
    facts = page.inner_text(".facts")
    assert "solved" in facts and "policy version at its start\n0" in facts and "staleness\n1" in facts
    page.click("text=Show tokens")
    page.wait_for_selector("text=No record of its tokens was kept.")
    page.click("text=← Episodes")
    page.wait_for_selector("table.list tbody tr")


def test_two_episodes_stand_side_by_side_ticked_in_the_list_or_of_one_task(page):
    page.locator("tbody tr").nth(0).locator("input").check()
    assert page.is_disabled("button:has-text('Side by side')")
    page.locator("tbody tr").nth(5).locator("input").check()
    page.click("button:has-text('Side by side')")
    page.wait_for_selector(".pair .whole:nth-child(2)")
    assert page.locator(".whole h2 span").all_inner_texts() == [" g119-0", " g114-0"]
    page.click(".whole:nth-child(2) h2 a")
    page.wait_for_selector("#view > .whole")
    page.select_option(
        "select[aria-label*='another episode']", label="train, step 2: solved, reward 1 (g104-0)"
    )
    page.click("button:has-text('Side by side')")
    page.wait_for_selector(".pair .whole:nth-child(2)")
    assert page.locator(".whole h2 span").all_inner_texts() == [" g114-0", " g104-0"]


def test_tokens_have_their_numbers_under_the_pointer_in_colours_and_in_a_table(run, page):
    segment = SegmentTokens(
        token_ids=[5, 6, 7, 8],
        texts=["Do", " it", "!\n", "done"],
        action_mask=[False, True, True, False],
        policy_versions=[-1, 3, 4, -1],
        rollout_logprobs=[None, -0.5, -0.25, None],
        policy_logprobs=[None, -0.75, -2.5, None],
        values=[None, 0.5, 0.625, None],
        advantages=[None, 0.25, -0.125, None],
        kept=[None, True, False, None],
    )
    run.log_tokens([EpisodeTokens("g117-0", 2, [segment])])
    page.click("text=g117-0")
    page.click("text=Show tokens")
    page.wait_for_selector(".token")
    classes = [token.get_attribute("class").split() for token in page.locator(".token").all()]
    assert classes == [["token"], ["token", "c4"], ["token", "masked", "c-2"], ["token"]]  # by advantage
    page.hover(".token >> nth=2")
    panel = page.inner_text("#inspector")
    for fact in (
        "written by policy",
        "policy version 4",
        "advantage -0.125",
        "ratio 0.1054",  # exp(-2.5 + 0.25)
        "value 0.625",
        "log-prob of the rollout -0.25",
        "log-prob in training -2.5",
        "mask masked",
    ):
        assert fact in " ".join(panel.split()), panel
    page.select_option("select[aria-label='colour by']", "values")
    assert page.locator(".token").nth(2).get_attribute("class") == "token masked c4"
    page.click("text=Table of 4 tokens")
    page.wait_for_selector(".tokens tbody tr:nth-child(4)")
    assert page.locator(".tokens tbody tr").nth(1).inner_text().split("\t")[:4] == [
        "1",
        '" it"',
        "policy",
        "0.25",
    ]


def test_a_live_run_is_followed_also_through_a_rewind(run, page):
    run.log_trajectories("train", 3, [episode(500, info={"success": True, "patch": PATCH})])
    run.log_metrics(3, {"reward": 0.3, "success": 1.0})
    page.wait_for_selector("text=g500-0")
    assert shown(page)[0] == "g500"
    assert "step 3" in page.inner_text("header")
    page.click("text=g500-0")
    page.wait_for_selector(".diff")
    assert page.locator(".diff .removed").all_inner_texts() == ["-    off\n"]
    assert page.locator(".diff .added").all_inner_texts() == ["+    on\n"]
    page.go_back()
    page.wait_for_selector("text=g500-0")
    run.rewind(2)
    page.wait_for_selector("text=g500-0", state="detached")
    until(page, "120 episodes")


def test_hostile_text_is_shown_as_text_everywhere_and_runs_nothing(run, page):
    hostile = (
        HOSTILE
        + "<script>window.ran = 1</script><img src=x onerror='window.ran = 1'><svg onload='window.ran = 1'>"
    )
    texts = [{"role": hostile, "content": hostile}, {"role": "assistant", "content": hostile}]
    names = {"episode_id": hostile, "task_id": hostile, "group_id": hostile, "end_reason": hostile}
    info = {"patch": hostile, hostile: hostile}
    run.log_trajectories("train", 2, [episode(600, **names, messages=texts, info=info)])
    columns = {name: [-0.5] for name in ("rollout_logprobs", "policy_logprobs", "values", "advantages")}
    segment = SegmentTokens(
        token_ids=[1], texts=[hostile], action_mask=[True], policy_versions=[0], kept=[True], **columns
    )
    run.log_tokens([EpisodeTokens(hostile, 2, [segment])])
    name, run.record["name"] = run.record["name"], hostile
    run.save_record()
    page.wait_for_selector("h1:has-text('onerror')")
    page.click("table.list tbody tr:first-child td:last-child a")
    page.wait_for_selector(".message.assistant")
    page.click("text=Show tokens")
    page.hover(".token")
    page.wait_for_selector("#inspector b")
    page.click("summary:has-text('Info')")
    for place in (".message.assistant pre", ".diff", ".token", ".facts", "h1", "details pre", "h2"):
        text = page.locator(place).first.text_content()
        assert "<img src=x onerror='window.ran = 1'>" in text, place
        assert "\\u{202e}gnp.exe\\u{1b}[31m" in text or place == "details pre", (
            place
        )  # JSON has escapes of its own
    assert page.locator("main img:not(.chart), main svg, main script").count() == 0
    page.goto(page.url.split("#")[0])
    page.wait_for_selector("table.list tbody tr")
    page.select_option("select[name=end_reason]", index=2)  # the rarest
    until(page, "1 episode, ")
    assert "onerror" in page.input_value("select[name=end_reason]")
    run.record["name"] = name
    run.save_record()
    expect(page.locator("h1")).to_have_text("lamps")
    assert page.evaluate("window.ran") is None


def test_no_script_can_make_html_of_text_or_load_from_elsewhere(page):
    refused = page.evaluate(
        """async () => {
            const refused = [];
            try { document.body.innerHTML = "<b>x</b>"; } catch { refused.push("html"); }
            try { await fetch("http://127.0.0.1:1/"); } catch { refused.push("fetch"); }
            try { document.createElement("script").textContent = "1"; } catch { refused.push("script"); }
            return refused;
        }"""
    )
    assert refused == ["html", "fetch", "script"]
    assert any("connect-src" in trouble for trouble in page.troubles)
    page.troubles.clear()


def test_when_the_server_is_gone_the_page_says_so_and_goes_on_when_it_is_back(page):
    page.route("**/api/**", lambda route: route.abort())
    page.wait_for_selector("text=agentenv view does not answer: is it still running?")
    page.unroute("**/api/**")
    expect(page.locator("h1")).to_have_text("lamps")
    page.troubles[:] = [trouble for trouble in page.troubles if "ERR_FAILED" not in trouble]
