"""What goes to stderr: text or JSON, with progress or without."""

import json
import logging
import sys
import warnings

import pytest

from agentenv import cli
from agentenv.console.output import complain, line_for_signal, stderr_as, stderr_options
from agentenv.report import Progress


def _objects(text: str) -> list[dict[str, object]]:
    return [json.loads(line) for line in text.splitlines()]


def test_with_json_every_line_is_an_object_whoever_wrote_it(capsys: pytest.CaptureFixture[str]) -> None:
    library = logging.getLogger("test_output.library")
    own = logging.StreamHandler()  # bound to stderr before, as transformers' is
    library.addHandler(own)
    library.addHandler(type(logging.lastResort)(logging.CRITICAL))  # follows stderr by itself
    library.propagate = False
    try:
        with stderr_as(log_format="json"):
            logging.getLogger("mine").warning("of %s", "logging")
            logging.getLogger("mine").info("too quiet")
            with warnings.catch_warnings():
                warnings.simplefilter("always")
                warnings.warn("of warnings", UserWarning, stacklevel=1)
            library.error("of a library")
            sys.stderr.write("half")
            sys.stderr.write(" a line\r\x1b[31mbar\n\n")
            Progress().note("of progress")
            try:
                raise ValueError("inner")
            except ValueError:
                logging.getLogger("mine").exception("with a trace")
            sys.stderr.write("no line feed")
    finally:
        library.removeHandler(own)
    found = _objects(capsys.readouterr().err)
    assert all({"time", "level", "logger", "message"} <= set(one) for one in found)
    said = [(one["level"], one["logger"], one["message"]) for one in found]
    assert said[0] == ("WARNING", "mine", "of logging")
    assert said[1][:2] == ("WARNING", "py.warnings") and "of warnings" in str(said[1][2])
    assert said[2:] == [
        ("INFO", "stderr", "of a library"),
        ("INFO", "stderr", "half a line"),
        ("INFO", "stderr", "\x1b[31mbar"),
        ("INFO", "agentenv.progress", "of progress"),
        ("ERROR", "mine", "with a trace"),
        ("INFO", "stderr", "no line feed"),
    ]
    assert "ValueError: inner" in str(found[6]["exception"])


def test_stderr_and_logging_are_as_before_afterwards() -> None:
    stream, handlers = sys.stderr, list(logging.getLogger().handlers)
    with pytest.raises(RuntimeError), stderr_as(quiet=True, log_format="json"):
        raise RuntimeError
    assert sys.stderr is stream and logging.getLogger().handlers == handlers


def test_progress_is_one_object_with_its_numbers_and_quiet_leaves_it_out(
    capsys: pytest.CaptureFixture[str],
) -> None:
    command = ["eval", "Echo-v0", "--policy", "oracle", "--episodes", "3"]
    assert cli.main([*command, "--log-format", "json"]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("success  1.000") and "{" not in out
    last = _objects(err)[-1]
    assert last["logger"] == "agentenv.progress"
    assert (last["stage"], last["unit"], last["done"], last["total"]) == ("evaluation", "episode", 3, 3)
    assert last["values"]["success"] == "1.00"  # type: ignore[index]
    for quiet in ([*command, "--quiet"], ["--quiet", *command]):
        assert cli.main(quiet) == 0
        again, err = capsys.readouterr()
        assert err == "" and again == out


def test_an_error_is_an_object_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--log-format", "json", "info", "Ecko-v0"]) == 2
    (error,) = _objects(capsys.readouterr().err)
    assert (error["level"], error["logger"]) == ("ERROR", "agentenv")
    assert error["message"] == "unknown environment 'Ecko-v0'; did you mean 'Echo-v0'?"
    with pytest.raises(SystemExit):
        cli.main(["info", "--log-format", "json"])
    assert "the following arguments are required: id" in str(_objects(capsys.readouterr().err)[-1]["message"])


def test_text_shows_control_characters_and_keeps_to_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with stderr_as():
        complain("a model said\n\x1b[2J", "agentenv")
    assert capsys.readouterr().err == "agentenv: error: a model said \\u{1b}[2J\n"


def test_what_a_signal_handler_writes_follows_the_format() -> None:
    assert line_for_signal("ending") == b"\nending\n"
    with stderr_as(log_format="json"):
        assert json.loads(line_for_signal("ending"))["message"] == "ending"


@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        ([], (False, "text")),
        (["eval", "--quiet"], (True, "text")),
        (["--log_format=json", "eval"], (False, "json")),
        (["--log-format", "xml"], (False, "text")),
        (["--log-format"], (False, "text")),
        (["--quie", "--log-forma", "json"], (False, "text")),
    ],
)
def test_the_options_are_found_before_the_command_line_is_parsed(
    arguments: list[str], found: tuple[bool, str]
) -> None:
    assert stderr_options(arguments) == found
