"""What the SWE environment understands and how it answers."""

import pytest

from agentenv_envs.swe.protocols import Malformed, as_action, format_observation, parse_action


@pytest.mark.parametrize(
    ("action", "command"),
    [
        ("```bash\nls -a\n```", "ls -a"),
        ("I look around.\n```bash\nls\n```\nThen I go on.", "ls"),
        ("```sh\nls\n```", "ls"),
        ("```bash\n\n  submit \n```", "submit"),
        ("```bash\ncat <<'X'\na\nX\n```", "cat <<'X'\na\nX"),
    ],
)
def test_the_command_of_one_block_is_understood(action: str, command: str) -> None:
    assert parse_action(action) == command


@pytest.mark.parametrize("action", ["", "ls", "```bash\n```", "```python\nx\n```", "```bash\nls", "\x00" * 9])
def test_an_action_without_a_command_is_malformed_and_says_what_is_allowed(action: str) -> None:
    assert isinstance(parse_action(action), Malformed)


def test_two_blocks_are_malformed_because_only_one_would_run() -> None:
    outcome = parse_action(as_action("ls") + as_action("rm x"))
    assert isinstance(outcome, Malformed) and outcome.reason.startswith("2 bash blocks")


def test_observations_say_what_happened() -> None:
    assert format_observation("hi\n", 0) == "hi"
    assert format_observation("", 0) == "(no output)"
    assert format_observation("no such file\n", 2) == "no such file\n[exit code 2]"
    assert format_observation("", 1) == "[exit code 1]"
    assert format_observation("a\n", 124, timed_out=True, timeout_s=2.5) == "a\n[stopped after 2.5 s]"
