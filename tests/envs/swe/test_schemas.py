"""Rows of each data set: what they become, and why some are refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from agentenv.errors import UsageError
from agentenv_envs.swe.data import RefusedRow, SWETask, load_tasks, parse_task
from agentenv_envs.swe.diffs import reverse_diff
from agentenv_envs.swe.schemas import SCHEMAS, schema_of
from agentenv_envs.swe.test_commands import eval_script

BUG = "diff --git a/pkg/x.py b/pkg/x.py\n--- a/pkg/x.py\n+++ b/pkg/x.py\n@@ -1 +1 @@\n-1\n+2\n"
TESTS = "diff --git a/tests/forms/test_x.py b/tests/forms/test_x.py\n--- a/x\n+++ b/x\n@@ -1 +1 @@\n-1\n+2\n"
COMMIT = "0123456789abcdef0123456789abcdef01234567"


def bench(**changes: Any) -> dict[str, Any]:
    return row_with(
        {
            "instance_id": "django__django-11099",
            "repo": "django/django",
            "base_commit": COMMIT,
            "version": "3.0",
            "problem_statement": "It is broken.",
            "patch": BUG,
            "test_patch": TESTS,
            "FAIL_TO_PASS": '["test_a (forms.tests.A)"]',
            "PASS_TO_PASS": '["A form names its fields (#1)"]',
        },
        changes,
    )


def smith(**changes: Any) -> dict[str, Any]:
    return row_with(
        {
            "instance_id": "oauthlib__oauthlib.1fd52536.combine_file__09vlzwgc",
            "repo": "swesmith/oauthlib__oauthlib.1fd52536",
            "image_name": "jyangballin/swesmith.x86_64.oauthlib_1776_oauthlib.1fd52536",
            "problem_statement": "It is broken.",
            "patch": BUG,
            "FAIL_TO_PASS": ["tests/test_x.py::test_a"],
            "PASS_TO_PASS": ["tests/test_x.py::test_b", "tests/test_other.py::test_c"],
        },
        changes,
    )


def r2e(**changes: Any) -> dict[str, Any]:
    return row_with(
        {
            "repo_name": "aiohttp",
            "docker_image": f"namanjain12/aiohttp_final:{COMMIT}",
            "commit_hash": COMMIT,
            "problem_statement": "[ISSUE]\nIt is broken.\n[/ISSUE]",
            "expected_output_json": json.dumps(
                {"\u001b[1mTestA.test_b\u001b[0m": "PASSED", "test_c - boom": "FAILED", "test_d": "SKIPPED"}
            ),
            "parsed_commit_content": json.dumps({"file_diffs": []}),
        },
        changes,
    )


def row_with(row: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in {**row, **changes}.items() if value is not ...}


def parse(row: object, source: str = "rows.jsonl") -> SWETask:
    return parse_task(row, source=source, where="line 1")


def test_a_row_of_swe_bench_is_run_by_the_command_of_its_repository() -> None:
    task = parse(bench())
    assert (task.schema, task.log_parser, task.timeout_s) == ("swe-bench", "django", 1800)
    assert task.image == "swebench/sweb.eval.x86_64.django_1776_django-11099:latest"
    assert (
        "\n./tests/runtests.py --verbosity 2 --settings=test_sqlite --parallel 1 forms.test_x\n"
        in task.eval_script
    )
    assert "export LANG=en_US.UTF-8" in task.eval_script
    assert task.test_files == ("tests/forms/test_x.py",)


@pytest.mark.parametrize(
    ("repo", "version", "command", "parser"),
    [
        ("astropy/astropy", "5.0", "pytest -rA tests/forms/test_x.py", "pytest_v2"),
        (
            "astropy/astropy",
            "1.3",
            "pytest -rA -vv -o console_output_style=classic --tb=no tests/",
            "pytest_v2",
        ),
        ("django/django", "1.9", "./tests/runtests.py --verbosity 2 forms.test_x", "django"),
        ("sympy/sympy", "1.9", "bin/test -C --verbose tests/forms/test_x.py", "sympy"),
        ("sphinx-doc/sphinx", "4.1", "tox --current-env -epy39 -v -- tests/forms/test_x.py", "pytest_v2"),
        ("mwaskom/seaborn", "0.12", "pytest --no-header -rA tests/forms/test_x.py", "seaborn"),
        ("psf/requests", "2.3", "pytest -rA tests/forms/test_x.py", "pytest_options"),
        ("getmoto/moto", "4.1", "pytest -n0 -rA tests/forms/test_x.py", "pytest"),
    ],
)
def test_each_repository_has_its_command_and_parser(
    repo: str, version: str, command: str, parser: str
) -> None:
    task = parse(bench(repo=repo, version=version))
    assert command in task.eval_script
    assert task.log_parser == parser


def test_a_row_of_version_5_brings_image_script_and_parser() -> None:
    script = "#!/bin/bash\nset -uxo pipefail\n: '>>>>> Start Test Output'\npytest -rA x.py\n: '>>>>> End Test Output'\n"
    row = bench(
        image="swebench/x:latest",
        eval_script=script,
        log_parser="parse_log_astropy",
        eval_type="pass_and_fail",
    )
    task = parse(row)
    assert (task.image, task.eval_script, task.log_parser) == ("swebench/x:latest", script, "pytest_v2")


def test_swe_gym_is_known_by_its_repositories_and_by_its_name() -> None:
    row = bench(instance_id="getmoto__moto-1", repo="getmoto/moto")
    assert parse(row).image == "xingyaoww/sweb.eval.x86_64.getmoto_s_moto-1:latest"
    assert parse(bench(), "SWE-Gym/SWE-Gym").schema == "swe-gym"


def test_mypys_tests_are_chosen_by_the_cases_of_the_test_patch() -> None:
    row = bench(repo="python/mypy", test_patch=f"{TESTS}+[case testOne]\n+[case testTwo]\n")
    assert "pytest -n0 -rA -k 'testOne or testTwo'\n" in parse(row).eval_script


@pytest.mark.parametrize("as_json", [False, True])
def test_a_row_of_swe_rebench_is_run_by_its_install_config(as_json: bool) -> None:
    config: Any = {"test_cmd": "pytest --no-header -rA", "log_parser": "parse_log_pytest", "python": "3.9"}
    row = bench(repo="some/thing", install_config=json.dumps(config) if as_json else config)
    task = parse(row)
    assert (task.schema, task.log_parser) == ("swe-rebench", "pytest")
    assert "\npytest --no-header -rA tests/forms/test_x.py\n" in task.eval_script
    assert task.image == "swerebench/sweb.eval.x86_64.django_1776_django-11099:latest"
    assert parse({**row, "docker_image": "x/y:z"}).image == "x/y:z"


def test_a_row_of_swe_rebench_2_has_its_own_folder_and_whole_commands() -> None:
    config = {"test_cmd": ["export A=1", "pytest -rA tests"], "log_parser": "parse_log_pytest"}
    task = parse(
        bench(repo="some/thing", install_config=config, language="python", image_name="swerebenchv2/x:1")
    )
    assert (task.workdir, task.image) == ("/thing", "swerebenchv2/x:1")
    assert "\ncd /thing\n" in task.eval_script
    assert "\nexport A=1\npytest -rA tests\n: " in task.eval_script


def test_a_row_of_swe_smith_has_the_bug_for_a_patch() -> None:
    task = parse(smith())
    assert (task.schema, task.log_parser, task.timeout_s) == ("swe-smith", "pytest_verbose", 120)
    assert task.bug_patch == BUG
    assert task.patch == reverse_diff(BUG)
    assert task.patch.endswith("@@ -1 +1 @@\n+1\n-2\n")
    assert task.image == "jyangballin/swesmith.x86_64.oauthlib_1776_oauthlib.1fd52536"
    assert task.repo == "oauthlib/oauthlib"
    assert task.hidden == task.test_files == ("tests/test_x.py",)
    assert task.pass_to_pass == (
        "tests/test_x.py::test_b",
    )  # the run is limited to the files of FAIL_TO_PASS
    assert "--verbose tests/test_x.py\n" in task.eval_script


@pytest.mark.parametrize(
    "name",
    ["swesmith.x86_64.oauthlib__oauthlib.1fd52536", "swesmith.x86_64.Oauthlib_1776_oauthlib.1fd52536", ...],
)
def test_older_names_of_swe_smiths_images_are_understood(name: object) -> None:
    task = parse(smith(image_name=name))
    assert task.image == "jyangballin/swesmith.x86_64.oauthlib_1776_oauthlib.1fd52536"


def test_a_row_of_r2e_gym_has_a_map_of_statuses() -> None:
    task = parse(r2e())
    assert task.instance_id == f"aiohttp__{COMMIT}"
    assert (task.schema, task.log_parser, task.timeout_s) == ("r2e-gym", "r2e", 300)
    assert task.expected == (("TestA.test_b", "PASSED"), ("test_c", "FAILED"))
    assert task.problem_statement == "It is broken."
    assert task.image == f"namanjain12/aiohttp_final:{COMMIT}"
    assert {"run_tests.sh", "/r2e_tests", "expected_test_output.json"} <= set(task.hidden)
    assert "\nbash run_tests.sh\n" in task.eval_script


def test_every_kind_of_row_has_a_reader() -> None:
    rows = [
        {"package": "x==1"},
        r2e(),
        smith(),
        bench(),
        bench(install_config={}),
        bench(repo="getmoto/moto"),
    ]
    assert sorted(schema_of(row) for row in rows) == sorted(SCHEMAS)


SCRIPT = eval_script("pytest")


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (bench(repo="nobody/knows"), "no test command is known for repo 'nobody/knows'"),
        (bench(eval_script="pytest", log_parser="pytest"), "must have one marker line before the tests"),
        (bench(eval_script=SCRIPT, log_parser="parse_log_jest"), "field 'log_parser' must be one of pytest,"),
        (bench(eval_script=SCRIPT, eval_type="fail_only"), "field 'eval_type' must be 'pass_and_fail'"),
        (bench(install_config="{"), "field 'install_config' must be an object"),
        (bench(install_config={"log_parser": "pytest"}), "field 'test_cmd' is missing"),
        (smith(problem_statement=" "), "field 'problem_statement' must not be empty"),
        (
            bench(install_config={"test_cmd": "make", "log_parser": "parse_log_cargo"}),
            "field 'log_parser' must be one of",
        ),
        (smith(FAIL_TO_PASS=["TestGo"]), "field 'FAIL_TO_PASS' must name tests of pytest"),
        (smith(repo="swesmith/python__mypy.01234567", image_name=...), "python/mypy in SWE-smith"),
        (smith(patch="what"), "field 'patch' is not a git diff"),
        (smith(image_name="x", repo="swesmith/x"), "must be swesmith."),
        (r2e(docker_image=...), "field 'docker_image' is missing"),
        (r2e(expected_output_json="[]"), "field 'expected_output_json' must be an object"),
        (r2e(expected_output_json={"a": "fine"}), "must map tests to PASSED"),
        (r2e(expected_output_json={"a": "SKIPPED"}), "must name at least one test that is not skipped"),
        (r2e(parsed_commit_content={"x": 1}), "has not the form of a parsed commit"),
        (r2e(repo_name="a/b"), "may hold letters"),
    ],
)
def test_a_row_that_can_not_work_is_refused_with_a_reason(row: dict[str, Any], reason: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse(row)
    assert reason in str(caught.value)
    assert str(caught.value).startswith("rows.jsonl: ")


def test_refused_rows_are_reported_and_the_others_loaded(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    rows = [bench(), bench(instance_id="b", patch=" "), [], r2e(), bench()]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    refused: list[RefusedRow] = []
    tasks = load_tasks(path, refused=refused)
    assert [task.schema for task in tasks] == ["swe-bench", "r2e-gym"]
    assert refused == [
        RefusedRow("b", "field 'patch' must not be empty, got ' '"),
        RefusedRow("line 3", "a row must be an object, got list"),
        RefusedRow("django__django-11099", "instance_id 'django__django-11099' is there already (line 1)"),
    ]


def test_a_file_without_a_row_that_works_is_an_error_even_where_rows_may_be_refused(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(bench(patch=...)) + "\n")
    with pytest.raises(
        UsageError, match="no row can be a task; the first: django__django-11099: field 'patch'"
    ):
        load_tasks(path, refused=[])
    path.write_text("{")
    with pytest.raises(UsageError, match="line 1: is not JSON"):
        load_tasks(path, refused=[])
