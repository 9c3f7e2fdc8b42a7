"""How long until `agentenv view` shows a large run, and an episode of it?

    python benchmarks/viewer.py --json viewer.json --check

Makes a run directory as training writes it: episodes of a software-engineering agent, turns of a command and its
output, most short and some as long as `SWE-v0` lets them be, 32 episodes of a training step; and token records of
one long episode. Then, in Chromium (which runs already, as a user's browser does):

- open: from the start of the command to the list on the screen with all episodes counted. Of it, `serve` is until the
  first page is served, `load` is what the browser takes from there; `open_cpu` is the processor time of the command.
- episode: from the click to the conversation on the screen, over episodes chosen at random and the longest.
- filter: from a filter's change to the list on the screen.
- tokens: from the click to the tokens of the long episode on the screen.
- index: processor time for all episodes' places and fields, in this process.

Each command is a new process; the file lies in the page cache. A figure is the median of the repeats, unless it says
otherwise.
"""

import argparse
import json
import os
import platform
import random
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from agentenv.errors import UsageError
from agentenv.report import RunDirectory
from agentenv.report.bars import Bar, print_bars
from agentenv.report.token_records import EpisodeTokens, SegmentTokens
from agentenv.testing.browser import chromium
from agentenv.trajectory import Trajectory
from agentenv.viewer.episode_index import EpisodeIndex

OPEN_S = 2.0
"""Bar of the time until the list is there."""
EPISODE_S = 0.3
"""Bar of the time until an episode is there."""
FILTER_S = 1.0
TOKENS_S = 1.0
BATCH = 32
"""Episodes of a training step."""
MAX_OUTPUT = 8_000
"""Characters of a command's output."""
LONG_TOKENS = 8_192
"""Tokens of the episode that has records."""
TRIED = 8
"""Episodes that are opened, besides two of the longest."""
TASKS = 500


def make_episode(number: int, generator: random.Random) -> Trajectory:
    """An episode of 3 to 40 turns; the median output is 400 characters, one in thirty is cut at MAX_OUTPUT."""
    turns = generator.randint(3, 40)
    solved = generator.random() < 0.4
    messages = [{"role": "user", "content": _text(generator, 1_500)}]
    for _ in range(turns):
        messages.append({"role": "assistant", "content": _text(generator, generator.randint(40, 300))})
        length = min(MAX_OUTPUT, int(generator.lognormvariate(6.0, 1.6)))
        messages.append({"role": "user", "content": _text(generator, length)})
    step = number // BATCH + 1
    return Trajectory(
        prompt_ids=[1] * 400,
        completion_ids=[1] * 10,
        rollout_logprobs=[-0.5] * 10,
        action_mask=[True] * 10,
        policy_versions=[0] * 10,
        reward=float(solved),
        terminated=solved or generator.random() < 0.5,
        truncated=False,
        end_reason="terminated",
        episode_id=f"g{number}-0",
        task_id=f"project__project-{number % TASKS}",
        group_id=f"g{number}",
        seed=generator.getrandbits(31),
        start_version=max(0, step - 1 - generator.randint(0, 2)),
        turns=turns,
        duration_s=generator.uniform(5, 600),
        messages=messages,
        info={
            "success": solved,
            "rewards": [0.0] * turns,
            "patch": _text(generator, 900),
            "family": "project",
        },
    )


def _text(generator: random.Random, length: int) -> str:
    """Lines as code and logs have them, quotation marks and backslashes included."""
    start = generator.randrange(len(_SOURCE) - length)
    return _SOURCE[start : start + length]


_SOURCE = "".join(
    f'    if value_{n} == "text {n}" and path != \'C:\\\\{n}\':\n        return [{n}, "é", None]  # line {n}\n'
    for n in range(2_000)
)


def make_run(path: Path, episodes: int) -> RunDirectory:
    """The run directory; its lock is held until it is closed, as while training goes on."""
    generator = random.Random(0)
    run = RunDirectory.create(path, {"name": "benchmark", "settings": {"max_steps": episodes // BATCH}})
    for start in range(0, episodes, BATCH):
        numbers = range(start, min(start + BATCH, episodes))
        run.log_trajectories("train", start // BATCH + 1, [make_episode(n, generator) for n in numbers])
    for step in range(1, episodes // BATCH + 1):
        names = ("reward", "success", "entropy", "staleness_mean", "episodes_per_s")
        run.log_metrics(step, {name: generator.random() for name in names})
    numbers = {
        name: [-generator.random() for _ in range(LONG_TOKENS)] for name in ("rollout_logprobs", "advantages")
    }
    segment = SegmentTokens(
        token_ids=list(range(LONG_TOKENS)),
        texts=[f" word{n % 97}" for n in range(LONG_TOKENS)],
        action_mask=[n % 400 > 300 for n in range(LONG_TOKENS)],
        policy_versions=[3] * LONG_TOKENS,
        policy_logprobs=numbers["rollout_logprobs"],
        values=numbers["advantages"],
        kept=[True] * LONG_TOKENS,
        **numbers,
    )
    run.log_tokens([EpisodeTokens(f"g{episodes - 1}-0", (episodes - 1) // BATCH + 1, [segment])])
    return run


@contextmanager
def viewing(run: Path) -> Iterator[tuple[str, float]]:
    """The command, with its address and when it was started."""
    started = time.perf_counter()
    command = [sys.executable, "-m", "agentenv", "view", str(run), "--no-browser"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            line = process.stderr.readline()
            address = re.search(r"http://\S+", line)
            if address is None:
                raise RuntimeError(f"agentenv view did not start: {line}")
            yield address[0], started
        finally:
            process.terminate()
            process.wait(20)


class Stopwatch:
    """Seconds by name."""

    def __init__(self) -> None:
        self.found: dict[str, list[float]] = {}

    def note(self, name: str, seconds: float) -> None:
        """One more measurement."""
        self.found.setdefault(name, []).append(seconds)

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Measure what is done within."""
        began = time.perf_counter()
        yield
        self.note(name, time.perf_counter() - began)


def measure(run: Path, episodes: int, repeats: int) -> dict[str, float]:
    """All figures, in seconds unless the name says otherwise."""
    watch = Stopwatch()
    with chromium() as browser:
        page = browser.new_page(viewport={"width": 1280, "height": 900})
        for _ in range(repeats):
            before = _children_cpu_s()
            with viewing(run) as (url, started):
                page.request.get(url)
                watch.note("serve", time.perf_counter() - started)
                with watch.timed("load"):
                    page.goto(url)
                    _await_status(page, f"{episodes:,} episodes")
                watch.note("open", time.perf_counter() - started)
                page.goto("about:blank")
            watch.note("open_cpu", _children_cpu_s() - before)
        with viewing(run) as (url, _):
            _browse(page, url, episodes, watch)
    for _ in range(repeats):
        began = time.process_time()
        EpisodeIndex(run / "trajectories.jsonl").refresh()
        watch.note("index_us_per_episode", (time.process_time() - began) / episodes * 1e6)
    figures = {name: statistics.median(values) for name, values in watch.found.items()}
    figures["open_greatest"] = max(watch.found["open"])
    figures["episode_greatest"] = max(watch.found["episode"])
    return figures


def _children_cpu_s() -> float:
    """Processor time of the processes that were started here and have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _browse(page: Any, url: str, episodes: int, watch: Stopwatch) -> None:
    generator = random.Random(1)
    pages = [f"page={generator.randint(1, max(1, episodes // 200))}" for _ in range(TRIED)]
    for query in [*pages, "sort=turns", "sort=turns"]:  # those with the most turns are the longest
        page.goto(f"{url}/#/?{query}")
        _await_status(page, f"{episodes:,} episodes")
        link = page.locator("table.list tbody tr td:last-child a").nth(generator.randrange(min(20, episodes)))
        name = link.inner_text()
        with watch.timed("episode"):
            link.click()
            page.wait_for_selector(f".whole h2:has-text('{name}')")
    page.goto(f"{url}/#/")
    _await_status(page, f"{episodes:,} episodes")
    with watch.timed("filter"):
        page.select_option("select[name=outcome]", "solved")
        _await_status(page, "100.0 % solved")
    page.goto(f"{url}/#/?task=project__project-{(episodes - 1) % TASKS}")
    page.click(f"text=g{episodes - 1}-0")
    with watch.timed("tokens"):
        page.click("text=Show tokens")
        page.wait_for_selector(f".token >> nth={LONG_TOKENS - 1}")


def _await_status(page: Any, text: str) -> None:
    from playwright.sync_api import expect

    expect(page.get_by_role("status")).to_contain_text(text, timeout=60_000)


def bars_of(figures: dict[str, float]) -> list[Bar]:
    """The figures with their bars."""
    return [
        Bar("open: command to list", figures["open"], "<=", OPEN_S, "s"),
        Bar("episode", figures["episode"], "<=", EPISODE_S, "s"),
        Bar("episode, the slowest", figures["episode_greatest"], "<=", EPISODE_S, "s"),
        Bar("filter", figures["filter"], "<=", FILTER_S, "s"),
        Bar(f"{LONG_TOKENS:,} tokens", figures["tokens"], "<=", TOKENS_S, "s"),
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Make the run and measure; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--json", type=Path, help="write figures and bars to this file")
    parser.add_argument("--check", action="store_true", help="exit with 1 where a bar is missed")
    parser.add_argument("--episodes", type=_at_least_one, default=20_000)
    parser.add_argument("--repeats", type=_at_least_one, default=3, help="starts of the command")
    options = parser.parse_args(argv)
    try:
        with tempfile.TemporaryDirectory() as folder:
            run = make_run(Path(folder) / "run", options.episodes)
            try:
                size = run.trajectories_path.stat().st_size
                figures = measure(run.path, options.episodes, options.repeats)
            finally:
                run.close()
    except UsageError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    assumed = {
        "episodes": options.episodes,
        "megabytes": round(size / 1e6),
        "bytes of an episode": round(size / options.episodes),
        "repeats": options.repeats,
        "load of the machine": round(os.getloadavg()[0], 1),
        "processors": os.cpu_count(),
        "python": platform.python_version(),
    }
    print("assumed: " + ", ".join(f"{name} {value}" for name, value in assumed.items()))
    for name, value in figures.items():
        print(f"{name:<22} {value:8.3f}")
    bars = bars_of(figures)
    held = print_bars(bars)
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        written = {"assumed": assumed, "figures": figures, "bars": [bar.as_dict() for bar in bars]}
        options.json.write_text(json.dumps(written, indent=1) + "\n")
    return int(options.check and not held)


def _at_least_one(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"is {value}, must be at least 1")
    return value


if __name__ == "__main__":
    raise SystemExit(main())
