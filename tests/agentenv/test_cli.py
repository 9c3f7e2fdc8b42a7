"""The console script."""

import subprocess
import sys
from importlib import metadata

import pytest

import agentenv
from agentenv import cli
from agentenv.console.table import COMMANDS, Command
from agentenv.errors import UsageError


class _Plugin:
    """An entry point whose function is given."""

    value = "plugin:add_commands"

    def __init__(self, name, load):  # type: ignore[no-untyped-def]
        self.name = name
        self.load = load


def _plug(monkeypatch: pytest.MonkeyPatch, *plugins: _Plugin) -> None:
    monkeypatch.setattr(
        metadata, "entry_points", lambda *, group: plugins if group == "agentenv.commands" else ()
    )


def _greet_command(run):  # type: ignore[no-untyped-def]
    def add_commands(subparsers):  # type: ignore[no-untyped-def]
        parser = subparsers.add_parser("greet")
        parser.add_argument("name")
        parser.set_defaults(run=run)

    return lambda: add_commands


def test_a_usage_error_is_one_line_on_stderr_and_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["info", "Ecko-v0"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err == "agentenv: error: unknown environment 'Ecko-v0'; did you mean 'Echo-v0'?\n"


def test_a_package_adds_commands_whose_exit_code_is_passed_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(args):  # type: ignore[no-untyped-def]
        print("hello", args.name)  # noqa: T201
        return 3

    _plug(monkeypatch, _Plugin("greet", _greet_command(run)))
    assert cli.main(["greet", "world"]) == 3
    assert capsys.readouterr().out == "hello world\n"


def test_an_error_of_several_lines_becomes_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(args):  # type: ignore[no-untyped-def]
        raise UsageError("first\n  second")

    _plug(monkeypatch, _Plugin("greet", _greet_command(run)))
    assert cli.main(["greet", "world"]) == 2
    assert capsys.readouterr().err == "agentenv: error: first second\n"


def test_an_interrupt_has_the_exit_code_of_the_signal(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(args):  # type: ignore[no-untyped-def]
        raise KeyboardInterrupt

    _plug(monkeypatch, _Plugin("greet", _greet_command(run)))
    assert cli.main(["greet", "world"]) == 130


def test_a_broken_package_costs_only_its_own_commands(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken():  # type: ignore[no-untyped-def]
        raise ImportError("no module named gone")

    _plug(monkeypatch, _Plugin("broken", broken), _Plugin("greet", _greet_command(lambda args: 0)))
    assert cli.main(["greet", "world"]) == 0
    assert "commands of 'broken' (plugin:add_commands) are left out: no module named gone" in caplog.text


def test_no_command_and_a_command_without_what_it_needs_exit_with_2() -> None:
    for arguments in ([], ["info"]):
        with pytest.raises(SystemExit) as caught:
            cli.main(arguments)
        assert caught.value.code == 2


def test_a_mistake_in_the_options_is_one_line_with_the_next_step(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, said in (
        (
            ["info"],
            "agentenv info: error: the following arguments are required: id; agentenv info --help lists",
        ),
        (["list", "--jsn"], "agentenv: error: unrecognized arguments: --jsn; did you mean --json?\n"),
        (
            ["eval", "Echo-v0", "--policy", "x", "--episodes", "ten"],
            "argument --episodes: invalid whole number value",
        ),
    ):
        with pytest.raises(SystemExit) as caught:
            cli.main(arguments)
        out, err = capsys.readouterr()
        assert (caught.value.code, out, err.count("\n")) == (2, "", 1)
        assert said in err


def test_an_unknown_command_is_told_what_it_may_have_meant(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _plug(monkeypatch, _Plugin("greet", _greet_command(lambda args: 0)))
    for typed, meant in (("lst", "'list'"), ("gret", "'greet'"), ("x9", "`agentenv --help` lists them")):
        assert cli.main([typed]) == 2
        out, err = capsys.readouterr()
        assert (
            out == "" and err.startswith(f"agentenv: error: there is no command {typed!r}; ") and meant in err
        )


def test_help_names_every_command_by_group_and_imports_none_of_them(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _plug(monkeypatch, _Plugin("greet", _greet_command(lambda args: 0)), _Plugin("list", None))
    monkeypatch.setattr(Command, "load", None)
    with pytest.raises(SystemExit) as caught:
        cli.main(["--help"])
    assert caught.value.code == 0
    lines = capsys.readouterr().out.splitlines()
    for title, group in COMMANDS.items():
        first = lines.index(f"{title}:") + 1
        assert [line.split()[0] for line in lines[first : first + len(group)]] == [
            found.name for found in group
        ]
    assert lines[lines.index("of installed packages:") + 1].split() == ["greet"]


@pytest.mark.parametrize(
    "known", [found for group in COMMANDS.values() for found in group], ids=lambda c: c.name
)
def test_a_built_in_command_is_what_the_table_says(
    known: Command, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its function adds a parser of its name alone, with a description, and no package is asked."""
    monkeypatch.setattr(cli, "_add_plugins", None)
    with pytest.raises(SystemExit) as caught:
        cli.main([known.name, "--help"])
    assert caught.value.code == 0
    usage, *rest = capsys.readouterr().out.split("\n\n")
    assert usage.startswith(f"usage: agentenv {known.name} ") and not rest[0].startswith("positional")


def test_names_of_built_in_commands_are_unique() -> None:
    names = [found.name for group in COMMANDS.values() for found in group]
    assert len(names) == len(set(names))


def test_a_reader_that_goes_away_is_no_error() -> None:
    done = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {sys.executable} -m agentenv.cli list | true"],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_the_console_script_is_installed() -> None:
    scripts = metadata.entry_points(group="console_scripts")
    assert [script.value for script in scripts if script.name == "agentenv"] == ["agentenv.cli:main"]
    done = subprocess.run(
        [sys.executable, "-m", "agentenv.cli", "--version"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout == f"agentenv {agentenv.__version__}\n"


def test_the_module_is_the_command_line() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "agentenv", "info", "Nowhere-v0"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert done.stderr.startswith("agentenv: error:")
