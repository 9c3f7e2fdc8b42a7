"""Runs in a sandbox: what they report, and that they leave the repository as it was."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from agentenv.errors import SandboxError
from agentenv_envs.swe.package_folder import PackageFolder
from agentenv_envs.swe.sandbox import SandboxSpec
from agentenv_envs.swe.sandbox.local_backend import LocalBackend
from agentenv_envs.swe.synth.bench import Bench, Job
from agentenv_envs.swe.synth.release import Release
from agentenv_envs.swe.synth.survey import survey_of

TEST_FILE = "tests/test_shop.py"


@pytest.fixture
def bench(installed_shop: Path) -> Iterator[Bench]:
    folder = PackageFolder(installed_shop)
    backend = LocalBackend()
    spec = SandboxSpec(
        workdir="/testbed", memory_mb=4096, environment=folder.variables(Release("shop==1.0", (), ".").task())
    )
    sandbox = backend.acquire(spec)
    assert sandbox.run(f"cp -a {folder.repository}/. .").exit_code == 0
    yield Bench(sandbox)
    assert sandbox.run("git status --porcelain --ignored").output == ""
    backend.close()


def test_a_survey_names_stable_tests_and_what_they_call(bench: Bench) -> None:
    survey = survey_of(bench)
    names = [i.partition("::")[2] for i in survey.tests]
    assert names == [
        "TestSpin::test_end",
        "test_a_discount_is_never_more_than_the_total",
        "test_nothing",
        "test_total_of_prices[prices0-0]",
        "test_total_of_prices[prices1-3]",
    ]
    assert survey.test_files == (TEST_FILE,)
    assert list(survey.sources) == ["shop.py"]
    total, spin = 4, 12
    lines = survey.sources["shop.py"].split("\n")
    assert lines[total - 1].startswith("def total")
    assert lines[spin - 1].startswith("def spin")
    assert survey.covering[("shop.py", spin)] == (f"{TEST_FILE}::TestSpin::test_end",)
    assert len(survey.covering[("shop.py", total)]) == 3
    assert survey.calls[f"{TEST_FILE}::TestSpin::test_end"] == ("shop.spin",)


def test_jobs_see_their_edit_and_report_what_failed(bench: Bench) -> None:
    good, bad = bench.read("shop.py"), "def total(prices, discount=0):\n    return 7\n"
    assert good is not None
    ids = [f"{TEST_FILE}::test_total_of_prices"]
    endless = "while True:\n    pass\n"
    results = bench.screen(
        [
            Job("bad", ids, 20.0, "shop.py", bad),
            Job("endless", ids, 1.0, "shop.py", endless),
            Job("gone", ids, 20.0, "shop.py", "import os\nos._exit(0)\n"),
            Job("good", ids, 20.0, "shop.py", good),
        ]
    )
    assert set(results["bad"].outcomes.values()) == {"failed"}
    failure = results["bad"].failures[f"{TEST_FILE}::test_total_of_prices[prices0-0]"]
    assert failure["compare"] == {"op": "==", "left": "7", "right": "0"}
    assert failure["parameters"] == {"prices": "[]", "wanted": "0"}
    assert results["endless"].exit_code is None
    assert results["gone"].exit_code is None
    assert set(results["good"].outcomes.values()) == {"passed"}


def test_a_full_run_has_the_graders_statuses(bench: Bench) -> None:
    broken = bench.full_run([TEST_FILE], timeout_s=60.0, changes={"shop.py": "def spin(n):\n    return n\n"})
    assert broken is not None
    assert broken[f"{TEST_FILE}::TestSpin::test_end"] == "passed"
    assert broken[f"{TEST_FILE}::test_total_of_prices[prices0-0]"] == "failed"
    assert bench.full_run([TEST_FILE], timeout_s=0.01) is None


def test_a_python_that_can_not_run_the_tests_is_an_error(bench: Bench, installed_shop: Path) -> None:
    (installed_shop / "environment/bin/python").write_text("#!/bin/sh\necho no python here; exit 1\n")
    with pytest.raises(SandboxError, match="no python here"):
        bench.screen([Job("x", (), 5.0)])
