"""Settings and fixtures of all tests.

- Tests marked `docker` are skipped where no engine answers. With AGENTENV_REQUIRE_DOCKER=1 a docker test that
  is skipped fails, unless what it lacks is an input from ../shared; so does a run without any, and one in
  which a whole module of docker tests was skipped.
- Nothing here may import torch before the number of its threads is set.
"""

import importlib.util
import os
import signal
import sys
from collections.abc import Callable, Generator
from functools import cache
from pathlib import Path
from types import ModuleType

# Set before any test module imports torch or a client of the hub.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest

# A shell's background job ignores interrupts, which tests send.
signal.signal(signal.SIGINT, signal.default_int_handler)

_REPOSITORY = Path(__file__).resolve().parent.parent
_REQUIRE_DOCKER = os.environ.get("AGENTENV_REQUIRE_DOCKER") == "1"
_SKIP_REASON = "Docker engine not available"
_SHARED = "../shared"
_docker_tests_run = pytest.StashKey[int]()
_docker_modules_skipped = pytest.StashKey[list[str]]()


@pytest.fixture(scope="session")
def repository() -> Path:
    """The checkout that the tests stand in."""
    return _REPOSITORY


@pytest.fixture(scope="session")
def load_program(repository: Path) -> Callable[[str], ModuleType]:
    """A recipe or benchmark, which is not installed, imported from its file, such as ``benchmarks/gae.py``."""

    def load(path: str) -> ModuleType:
        name = path.removesuffix(".py").replace("/", "_")
        spec = importlib.util.spec_from_file_location(name, repository / path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
        return module

    return load


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Real inputs that may lie beside the checkout; tests that need them skip where they are absent."""
    folder = _REPOSITORY.parent / "shared" / "data"
    if not folder.is_dir():
        pytest.skip(f"no {_SHARED}/data beside the checkout")
    return folder


@cache
def _engine_answers() -> bool:
    try:
        import docker
    except ImportError:
        return False
    try:
        client = docker.from_env(timeout=10)
        try:
            return bool(client.ping())
        finally:
            client.close()
    except Exception:
        return False


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_docker_tests_run] = 0
    config.stash[_docker_modules_skipped] = []


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    if report.skipped and "mark.docker" in collector.path.read_text(encoding="utf-8"):
        collector.config.stash[_docker_modules_skipped].append(report.nodeid)
    return report


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    marked = [item for item in items if item.get_closest_marker("docker")]
    if marked and not _REQUIRE_DOCKER and not _engine_answers():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason=_SKIP_REASON))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if item.get_closest_marker("docker"):
        if report.when == "call" and report.passed:
            item.config.stash[_docker_tests_run] += 1
        if report.skipped and _REQUIRE_DOCKER and _SHARED not in str(report.longrepr):
            report.outcome = "failed"
            report.longrepr = (
                f"AGENTENV_REQUIRE_DOCKER=1, but this docker test was skipped: {report.longrepr}"
            )
    return report


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    config = session.config
    if not _REQUIRE_DOCKER or config.option.collectonly or exitstatus != pytest.ExitCode.OK:
        return
    if config.stash[_docker_tests_run] == 0 or config.stash[_docker_modules_skipped]:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if _REQUIRE_DOCKER:
        passed = config.stash[_docker_tests_run]
        terminalreporter.write_line(f"docker tests passed: {passed} (at least 1 required)")
        for module in config.stash[_docker_modules_skipped]:
            terminalreporter.write_line(f"skipped as a whole, but has docker tests: {module}")
