"""What the markers `docker`, `vllm` and `browser`, and AGENTENV_REQUIRE_DOCKER and the like, do to a run."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

_UNREACHABLE = "unix:///nonexistent/agentenv-test.sock"


def _pytest(
    folder: Path, repository: Path, test: str, *, require: str, options: tuple[str, ...] = ()
) -> tuple[int, str]:
    """Run one test file under the repository's conftest, with a Docker address at which nothing answers."""
    (folder / "conftest.py").write_text((repository / "tests" / "conftest.py").read_text())
    (folder / "pytest.ini").write_text(
        "[pytest]\nmarkers =\n docker: an engine\n vllm: vLLM\n browser: a browser\n"
    )
    (folder / "test_it.py").write_text(test)
    environment = {k: v for k, v in os.environ.items() if not k.startswith("AGENTENV_REQUIRE_")}
    environment |= {"DOCKER_HOST": _UNREACHABLE} | ({f"AGENTENV_REQUIRE_{require}": "1"} if require else {})
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-rs", "-p", "no:cacheprovider", *options, str(folder)],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return done.returncode, done.stdout


_MARKED = """
import pytest

@pytest.mark.docker
def test_marked():
    {body}

def test_plain():
    pass
"""


def test_without_an_engine_docker_tests_are_skipped_and_say_why(tmp_path: Path, repository: Path) -> None:
    code, out = _pytest(tmp_path, repository, _MARKED.format(body="assert False"), require="")
    assert code == 0, out
    assert "1 passed, 1 skipped" in out
    assert "Docker engine not available" in out


@pytest.mark.parametrize("body", ["assert False", "pytest.skip('not today')"])
def test_where_docker_is_required_a_docker_test_that_fails_or_is_skipped_fails_the_run(
    tmp_path: Path, repository: Path, body: str
) -> None:
    code, out = _pytest(tmp_path, repository, _MARKED.format(body=body), require="DOCKER")
    assert code == 1, out
    assert "1 failed, 1 passed" in out


@pytest.mark.parametrize("options", [(), ("-n", "2")])
def test_where_docker_is_required_a_module_that_is_skipped_whole_fails_the_run(
    tmp_path: Path, repository: Path, options: tuple[str, ...]
) -> None:
    whole = "import pytest\npytest.importorskip('no_such_module')\n" + _MARKED.format(body="pass")
    passing = tmp_path / "test_other.py"
    passing.write_text(_MARKED.format(body="pass"))
    code, out = _pytest(tmp_path, repository, whole, require="DOCKER", options=options)
    assert code == 1, out
    assert "skipped as a whole, but has docker tests: test_it.py" in out


def test_where_docker_is_required_a_run_without_docker_tests_fails(tmp_path: Path, repository: Path) -> None:
    code, out = _pytest(tmp_path, repository, "def test_plain():\n    pass\n", require="DOCKER")
    assert code == 1, out
    assert "docker tests passed: 0" in out


@pytest.mark.parametrize("options", [(), ("-n", "2")])
def test_where_docker_is_required_and_its_tests_pass_so_does_the_run(
    tmp_path: Path, repository: Path, options: tuple[str, ...]
) -> None:
    code, out = _pytest(tmp_path, repository, _MARKED.format(body="pass"), require="DOCKER", options=options)
    assert code == 0, out
    assert "docker tests passed: 1" in out


def test_an_input_that_lies_outside_the_checkout_may_be_missing(tmp_path: Path, repository: Path) -> None:
    other = _MARKED.format(body="pass").replace("test_marked", "test_marked_too")
    test = _MARKED.format(body="pytest.skip('no ../shared/data')") + other
    code, out = _pytest(tmp_path, repository, test, require="DOCKER")
    assert code == 0, out
    assert "2 passed, 1 skipped" in out


@pytest.mark.parametrize(
    ("require", "code", "outcome"),
    [("", 0, "2 skipped"), ("VLLM", 1, "1 failed"), ("BROWSER", 1, "1 failed")],
)
def test_where_vllm_or_a_browser_is_required_a_test_of_it_that_is_skipped_fails_the_run(
    tmp_path: Path, repository: Path, require: str, code: int, outcome: str
) -> None:
    skipped = "def test_{0}():\n    pytest.skip('not installed')\n"
    tests = "".join(f"@pytest.mark.{name}\n{skipped.format(name)}" for name in ("vllm", "browser"))
    exit_code, out = _pytest(tmp_path, repository, f"import pytest\n{tests}", require=require)
    assert exit_code == code and outcome in out, out
