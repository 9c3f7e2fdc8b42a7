"""Runs a task's tests inside the sandbox; copied there as one file, never imported by the library.

    python pytest_runner.py CONFIG.json

The agent's code runs in this process as soon as a test imports it. What is done against a package that
makes its tests pass without being right:

- the configuration, with the run's secret, is deleted before anything else is imported; the record that
  the secret seals is written after pytest has returned, so a process that ends itself early leaves
  none; and right after it the process ends, so that nothing registered for its exit changes the results;
- the record names the tests that failed, so that no other process can make them pass in the files;
- it tells which functions of pytest and unittest were replaced, and which tests did not come from their file;
- what lies in the repository comes last on the path, and pytest is imported before any of it;
- in the tests' own files, operands of ==, != and `in` are checked: a value that equals everything fails the
  test;
- byte code of tests is neither read nor written.

Written for Python 3.6 and later, and for pytest 5 and later: published images hold old ones.
"""

import ast
import builtins
import hmac
import importlib
import importlib.util
import io
import json
import os
import sys
import types
from typing import Any

GUARD = "_agentenv_honest"
PRELOADED = (
    "_pytest.assertion.rewrite",
    "_pytest.junitxml",
    "xml.etree.ElementTree",
    "difflib",
    "unittest.mock",
)
EQUALITY_ASSERTS = (
    "assertEqual",
    "assertEquals",
    "assertNotEqual",
    "assertIn",
    "assertNotIn",
    "assertCountEqual",
    "assertItemsEqual",
    "assertListEqual",
    "assertTupleEqual",
    "assertSetEqual",
    "assertDictEqual",
    "assertSequenceEqual",
    "assertMultiLineEqual",
    "assertAlmostEqual",
)
PLAIN_TYPES = (str, bytes, int, float, complex, bool, type(None), type)
CONTAINERS = (list, tuple, set, frozenset, dict)
MAX_ITEMS = 5000


class Nothing:
    """Equal to nothing but itself."""


class Same:
    """A function; equal while it is the same one, with the same code."""

    def __init__(self, function: Any) -> None:
        self.function = function
        self.code = function.__code__ if isinstance(function, types.FunctionType) else None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and self.function is other.function and self.code is other.code

    __hash__ = None  # type: ignore[assignment]


class Honesty:
    """Passes values through and refuses those that compare equal to everything.

    `unittest.mock.ANY` is let through where a test file names it.
    """

    def __init__(self, allow_any: bool) -> None:
        nothing = Nothing()
        word = os.urandom(12).hex()
        number = int.from_bytes(os.urandom(6), "big") + 10**6
        self.probes: Any = (
            nothing,
            word,
            word.encode(),
            number,
            number + 0.5,
            [nothing],
            (nothing,),
            {nothing},
            {word: nothing},
        )
        self.allow_any = allow_any
        self.modules: dict[str, list[Any]] = {}

    def ran(self, path: str) -> None:
        """Note the module that calls as the one that a file of tests has become."""
        names = sys._getframe(1).f_globals
        self.modules.setdefault(path, []).append((names, tests_of(names)))

    def __call__(self, value: Any) -> Any:
        """The value itself."""
        if self.dishonest(value):
            raise AssertionError("a value of type " + type(value).__name__ + " compares equal to everything")
        return value

    def dishonest(self, value: Any) -> bool:
        """Whether the value, or something in it, compares equal to everything."""
        waiting = [value]
        for _ in range(MAX_ITEMS):
            if not waiting:
                return False
            item = waiting.pop()
            kind = type(item)
            if kind in PLAIN_TYPES:
                continue
            if self.allow_any and kind.__module__ == "unittest.mock" and kind.__name__ == "_ANY":
                continue
            equality: Any = kind.__eq__
            own_equality = kind not in CONTAINERS and equality is not object.__eq__
            if own_equality and any(self.equal(item, probe) for probe in self.probes):
                return True
            # Read by the base class: a subclass's own iteration could hide items.
            base: Any
            for base in (list, tuple, set, frozenset):
                if isinstance(item, base):
                    waiting += base.__iter__(item)
            if isinstance(item, dict):
                waiting += dict.values(item)
                waiting += dict.keys(item)
        return False

    @staticmethod
    def equal(value: Any, probe: Any) -> bool:
        """Whether a comparison says that two things are equal; an exception does not say so."""
        try:
            return bool(value == probe)
        except Exception:
            return False


class Guard(ast.NodeTransformer):
    """Wraps operands of equality in a call of the honesty check."""

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        """Wrap what is compared."""
        self.generic_visit(node)
        if any(isinstance(operator, (ast.Eq, ast.NotEq, ast.In, ast.NotIn)) for operator in node.ops):
            node.left = self.wrapped(node.left)
            node.comparators = [self.wrapped(item) for item in node.comparators]
        return node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        """Wrap the first two arguments of unittest's assertions of equality."""
        self.generic_visit(node)
        if isinstance(node.func, ast.Attribute) and node.func.attr in EQUALITY_ASSERTS:
            node.args = [
                a if isinstance(a, ast.Starred) else self.wrapped(a) for a in node.args[:2]
            ] + node.args[2:]
        return node

    @staticmethod
    def wrapped(node: ast.expr) -> ast.expr:
        """A call of the honesty check on an expression."""
        call = ast.Call(func=ast.Name(id=GUARD, ctx=ast.Load()), args=[node], keywords=[])
        ast.copy_location(call, node)
        ast.copy_location(call.func, node)
        return call


class Reporter:
    """Plug-in that notes what tests report, and what pytest is like before code of the repository runs."""

    def __init__(self, files: "set[str]", honesty: Honesty) -> None:
        self.files, self.honesty = files, honesty
        self.reported: dict[str, None] = {}
        self.failed: dict[str, None] = {}
        self.functions: dict[str, Any] = {}
        self.plugins: list[Any] = []
        self.workdir = os.path.realpath(os.getcwd())
        self.changes: list[str] = []

    def pytest_load_initial_conftests(self, early_config: Any) -> None:
        """Note pytest's functions; installed plug-ins, which may replace some, are loaded by now."""
        self.functions = functions_of_the_runner()
        self.plugins = list(early_config.pluginmanager.get_plugins())

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Note the test of a report."""
        self.reported[report.nodeid] = None
        if report.outcome == "failed":
            self.failed[report.nodeid] = None

    def pytest_sessionfinish(self, session: Any) -> None:
        """Note what was put in the place of pytest's functions and of the tests' files."""
        # Later pytest itself undoes what its plug-ins have replaced.
        now = functions_of_the_runner()
        changed = {name for name, function in self.functions.items() if now.get(name) != function}
        changed |= {n for n in now.keys() - self.functions.keys() if n.partition(":")[0] in self.functions}
        for item in getattr(session, "items", ()):
            name = item.nodeid.partition("::")[0]
            path = os.path.realpath(os.path.join(str(session.config.rootdir), name))
            module = getattr(item, "module", None)
            if path not in self.files or module is None:
                continue
            ran = [tests for names, tests in self.honesty.modules.get(path, ()) if names is vars(module)]
            if not ran or ran[-1] != tests_of(vars(module)):
                changed.add(name)
        self.changes = sorted(changed | self.new_plugins(session.config))

    def new_plugins(self, config: Any) -> "set[str]":
        """Plug-ins that code of the repository has registered, other than conftest.py and what that names."""
        named: set[str] = set()
        for conftest in filter(is_conftest, config.pluginmanager.get_plugins()):
            names = getattr(conftest, "pytest_plugins", ())
            named.update([names] if isinstance(names, str) else names)
        found = set()
        for plugin in config.pluginmanager.get_plugins():
            owner = plugin if isinstance(plugin, type) else type(plugin)
            name = plugin.__name__ if isinstance(plugin, types.ModuleType) else owner.__module__
            path = os.path.realpath(getattr(sys.modules.get(name), "__file__", None) or "/")
            inside = (
                path.startswith(os.path.join(self.workdir, "")) and os.path.basename(path) != "conftest.py"
            )
            if inside and name not in named and not any(plugin is one for one in self.plugins):
                found.add("plug-in " + owner.__name__)
        return found


def is_conftest(module: Any) -> bool:
    """Whether something is the module of a conftest.py."""
    return os.path.basename(getattr(module, "__file__", None) or "") == "conftest.py"


def tests_of(names: "dict[str, Any]") -> "dict[str, Any]":
    """The tests among a module's names, with their code."""
    found: dict[str, Any] = {}
    for name, value in list(names.items()):
        if isinstance(value, types.FunctionType) and name.startswith("test"):
            found[name] = Same(value)
        elif isinstance(value, type) and value.__module__ == names.get("__name__"):
            members = list(vars(value).items())
            found.update((f"{name}:{key}", Same(member)) for key, member in members if key.startswith("test"))
    return found


def functions_of_the_runner() -> "dict[str, Any]":
    """Functions and classes of pytest and unittest by "module.name" and "module.class:name", with their code."""
    found: dict[str, Any] = {}
    for name, module in list(sys.modules.items()):
        # Not unittest.mock: pytest-mock replaces functions of it.
        if name.partition(".")[0] not in ("_pytest", "pytest", "pluggy") and name != "unittest.case":
            continue
        for key, value in list(vars(module).items()):
            if not callable(value):
                continue
            found[f"{name}.{key}"] = Same(value)
            if isinstance(value, type) and value.__module__ == name:
                for part, member in list(vars(value).items()):
                    if callable(member) or isinstance(member, (classmethod, staticmethod, property)):
                        found[f"{name}.{key}:{part}"] = Same(member)
    return found


def guard_files(files: "set[str]") -> Honesty:
    """Let pytest compile these files with the honesty check in place, which is returned."""
    rewrite: Any = importlib.import_module("_pytest.assertion.rewrite")
    original = rewrite.rewrite_asserts
    sources = []
    for name in files:
        if os.path.isfile(name):
            with open(name, "rb") as file:
                sources.append(file.read())
    honesty = Honesty(allow_any=any(b"ANY" in source for source in sources))
    setattr(builtins, GUARD, honesty)

    def rewrite_asserts(tree: Any, *args: Any, **kwargs: Any) -> None:
        names = [
            str(a)
            for a in list(args) + list(kwargs.values())
            if isinstance(a, str) or hasattr(a, "__fspath__")
        ]
        paths = [path for path in map(os.path.realpath, names) if path in files]
        if paths:
            Guard().visit(tree)
            tree.body += ast.parse(f"{GUARD}.ran({paths[0]!r})").body
            ast.fix_missing_locations(tree)
        original(tree, *args, **kwargs)

    rewrite.rewrite_asserts = rewrite_asserts
    rewrite._read_pyc = lambda *args, **kwargs: None
    return honesty


def main() -> int:
    """Run what the configuration says; pytest's return code."""
    with open(sys.argv[1], encoding="utf-8") as file:
        config: dict[str, Any] = json.load(file)
    os.unlink(sys.argv[1])
    workdir, here = os.getcwd(), os.path.dirname(os.path.abspath(__file__))
    paths = [path for path in map(os.path.abspath, filter(None, sys.path)) if path != here]
    inside = [path for path in paths if os.path.join(path, "").startswith(os.path.join(workdir, ""))]
    sys.path[:] = [path for path in paths if path not in inside] + inside
    sys.argv[:] = ["pytest"]
    sys.dont_write_bytecode = True
    pytest: Any = importlib.import_module("pytest")
    for name in PRELOADED:
        importlib.import_module(name)
    # Tests may change the working directory.
    record_path = os.path.abspath(config["record"])
    files = {os.path.realpath(name) for name in config["files"]}
    reporter = Reporter(files, guard_files(files))
    arguments = ["-p", "no:cacheprovider", "-p", "no:randomly", "--rootdir", workdir, "--assert=rewrite"]
    arguments += ["--continue-on-collection-errors", "--maxfail=0", "--tb=short", "-q", "-rfE"]
    arguments += ["-o", "junit_family=xunit2", "-o", "junit_logging=no", "--junitxml", config["junit"]]
    if importlib.util.find_spec("xdist") and not os.environ.get("PYTEST_DISABLE_PLUGIN_AUTOLOAD"):
        arguments += ["-n", "0"]  # the checks above hold in this process alone
    arguments += config["arguments"]
    code = int(pytest.main(arguments + config["files"], plugins=[reporter]))
    reported, failures = list(reporter.reported), list(reporter.failed)
    record = {"exit_code": code, "reported": reported, "failures": failures, "changes": reporter.changes}
    body = json.dumps([code, reported, failures, reporter.changes])
    record["seal"] = hmac.new(config["token"].encode(), body.encode(), "sha256").hexdigest()
    with open(record_path + ".new", "w", encoding="utf-8") as file:
        json.dump(record, file)
    os.rename(record_path + ".new", record_path)
    return code


if __name__ == "__main__":
    # Taken before any of the agent's code runs, which may put its own in their place.
    leave, flush, streams = os._exit, io.TextIOWrapper.flush, (sys.stdout, sys.stderr)
    exit_code = main()
    for stream in streams:
        flush(stream)  # type: ignore[arg-type]
    leave(exit_code)
