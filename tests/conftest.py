"""Settings and fixtures of all tests.

- Tests marked `docker` are skipped where no engine answers. With AGENTENV_REQUIRE_DOCKER=1 a docker test that
  is skipped fails, unless what it lacks is an input from ../shared; so does a run without any, and one in
  which a whole module of docker tests was skipped. With AGENTENV_REQUIRE_VLLM=1 one marked `vllm` that is skipped
  fails, with AGENTENV_REQUIRE_BROWSER=1 one marked `browser`, with AGENTENV_REQUIRE_INTEROP=1 one marked `interop`,
  with AGENTENV_REQUIRE_RAY=1 one marked `ray`.
- Nothing here may import torch before the number of its threads is set.
"""

import gc
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
_REQUIRED = [
    (marker, variable)
    for marker, variable in (
        ("vllm", "AGENTENV_REQUIRE_VLLM"),
        ("browser", "AGENTENV_REQUIRE_BROWSER"),
        ("interop", "AGENTENV_REQUIRE_INTEROP"),
        ("ray", "AGENTENV_REQUIRE_RAY"),
    )
    if os.environ.get(variable) == "1"
]
_SKIP_REASON = "Docker engine not available"
_SHARED = "../shared"


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


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    marked = [item for item in items if item.get_closest_marker("docker")]
    if marked and not _REQUIRE_DOCKER and not _engine_answers():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason=_SKIP_REASON))
    if importlib.util.find_spec("ray") is None:
        for item in items:
            if item.get_closest_marker("ray"):
                item.add_marker(pytest.mark.skip(reason="Ray is not installed"))
    # Files with long tests come first: with several processes, none is then left alone with one in the end.
    long = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in long)


def pytest_collection_finish() -> None:
    # What collection made stays to the end. Unless it is frozen, each full garbage collection walks through all of it:
    # a second each, with the modules and tests of this suite.
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    marked = item.get_closest_marker("docker")
    if _REQUIRE_DOCKER and marked and report.skipped and _SHARED not in str(report.longrepr):
        report.outcome = "failed"
        report.longrepr = f"AGENTENV_REQUIRE_DOCKER=1, but this docker test was skipped: {report.longrepr}"
    for marker, variable in _REQUIRED:
        if item.get_closest_marker(marker) and report.skipped:
            report.outcome = "failed"
            report.longrepr = f"{variable}=1, but this test was skipped: {report.longrepr}"
    return report


class _DockerTests:
    """Counts docker tests from their reports, which are here also when processes of pytest-xdist ran them."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self.passed = 0
        self.modules_skipped: set[str] = set()

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        path = self._root / report.nodeid.split("::")[0]
        if report.skipped and path.is_file() and "mark.docker" in path.read_text(encoding="utf-8"):
            self.modules_skipped.add(report.nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" and report.passed and "docker" in report.keywords:
            self.passed += 1

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        if session.config.option.collectonly or exitstatus != pytest.ExitCode.OK:
            return
        if not self.passed or self.modules_skipped:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        terminalreporter.write_line(f"docker tests passed: {self.passed} (at least 1 required)")
        for module in sorted(self.modules_skipped):
            terminalreporter.write_line(f"skipped as a whole, but has docker tests: {module}")


def pytest_configure(config: pytest.Config) -> None:
    if _REQUIRE_DOCKER and not hasattr(config, "workerinput"):  # which a process of pytest-xdist has
        config.pluginmanager.register(_DockerTests(config.rootpath))
