"""`agentenv list` and `agentenv info`."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import agentenv
from agentenv import built_in, cli
from agentenv.built_in import BUILT_IN


def test_list_describes_each_environment_and_names_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        built_in.importlib.util,
        "find_spec",
        lambda module: None if module in ("bm25s", "docker") else object(),
    )
    assert cli.main(["list"]) == 0
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    assert set(BUILT_IN) <= set(lines)
    assert lines["KeyDoor-v0"].endswith("fetch a key on a grid, then open the door")
    assert lines["ALFWorld-v0"].endswith("extra alfworld: installed")
    assert lines["ShopSimulator-Persona-v0"].endswith("  pip install 'agentenv-rl[shop]'")
    assert lines["SWE-v0"].endswith(
        "pip install 'agentenv-rl[docker]'; without it embedded tasks without isolation"
    )


def test_the_json_list_has_full_ids(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["list", "--json"]) == 0
    assert {f"agentenv/{name}" for name in BUILT_IN} <= set(json.loads(capsys.readouterr().out))


def test_info_shows_what_make_takes(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["info", "Echo-v0", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["id"] == "agentenv/Echo-v0"
    assert shown["entry_point"] == "agentenv.testing:EchoEnv"
    assert "max_turns: int = 3" in shown["arguments"] and shown["max_turns"] == 3
    assert sorted(shown["policies"]) == ["oracle", "random"]
    assert shown["first_observation"] == agentenv.make("Echo-v0").reset(seed=0)[0]


def test_info_tells_a_person_how_to_use_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["info", "SWE-v0"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "SWE-v0: repair a bug in a repository, in a sandbox"
    assert "turns     at most 50" in lines and "try it    agentenv play SWE-v0" in lines
    assert "  protocol = 'bash'" in lines
    # Its first reset starts a sandbox: too slow to be an example.
    assert not any(line.startswith("first observation") for line in lines)


def test_info_of_an_environment_of_the_users_own(capsys: pytest.CaptureFixture[str]) -> None:
    class Own(agentenv.BaseEnv):
        """Bell \x07."""

        worker = "inline"

        def __init__(self, needed: int, level: int = 1) -> None:
            pass

    agentenv.register("OwnInfo-v0", Own, kwargs={"level": 2})
    assert cli.main(["info", "OwnInfo-v0"]) == 0
    out = capsys.readouterr().out
    assert "  needed (must be given)\n  level = 2\n" in out and "Bell \\u{7}." in out


@pytest.mark.parametrize("name", sorted(BUILT_IN))
def test_the_page_of_an_environment_is_there(name: str, repository: Path) -> None:
    assert (repository / BUILT_IN[name].docs).is_file()


def test_list_and_help_import_no_environment_and_no_command() -> None:
    """Half a second of one core's time is the bar; what would break it is one of these imports."""
    program = (
        "import sys\n"
        "from agentenv.cli import main\n"
        "assert main(['list']) == 0\n"
        "loaded = {name.partition('.')[0] for name in sys.modules} & {'agentenv_envs', 'torch', 'rich', 'fastapi'}\n"
        "loaded |= {name for name in sys.modules if name.startswith(('agentenv.rollout', 'agentenv.evaluation'))}\n"
        "sys.exit(str(sorted(loaded)) if loaded else 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
