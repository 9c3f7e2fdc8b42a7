"""What a run is made of is found by name, or its absence is told in one line."""

import textwrap

import pytest

from agentenv.errors import UnknownEnvironmentError, UsageError
from agentenv_trainers.recipe import find_environment, load_policy

ENVIRONMENT = """
import agentenv

class {name}(agentenv.BaseEnv):
    def __init__(self, limit=3):
        self.limit = limit

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return "count", {{}}

    def step(self, action):
        return "", 1.0, True, False, {{}}
"""


@pytest.fixture
def write(tmp_path):
    """Writes a module and returns its path."""

    def write(name, *parts):
        path = tmp_path / name
        path.write_text("\n".join(textwrap.dedent(part) for part in parts))
        return path

    return write


def test_a_registered_id_is_found():
    env = find_environment("Echo-v0")()
    assert type(env).__name__ == "EchoEnv"
    env.close()


def test_an_unknown_id_suggests_the_closest():
    with pytest.raises(UnknownEnvironmentError, match="did you mean 'Echo-v0'"):
        find_environment("Ecco-v0")


def test_a_class_is_found_in_a_module():
    env = find_environment("agentenv.testing:EchoEnv")()
    assert type(env).__name__ == "EchoEnv"


def test_a_file_that_defines_one_environment_needs_no_registration(write):
    path = write("alone.py", ENVIRONMENT.format(name="Alone"))
    assert find_environment(str(path), {"limit": 5})().limit == 5


def test_a_file_that_registers_one_environment_is_run_once(write, caplog):
    path = write(
        "once.py",
        ENVIRONMENT.format(name="Once"),
        ENVIRONMENT.format(name="Other"),
        "agentenv.register('Once-v0', Once)",
    )
    assert type(find_environment(str(path))()).__name__ == "Once"
    assert type(find_environment(str(path))()).__name__ == "Once"
    assert "registered again" not in caplog.text


def test_a_file_with_two_environments_wants_one_named(write):
    path = write("two.py", ENVIRONMENT.format(name="One"), ENVIRONMENT.format(name="Two"))
    with pytest.raises(UsageError, match=r"found One, Two; name one"):
        find_environment(str(path))
    assert type(find_environment(f"{path}:Two")()).__name__ == "Two"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("absent.py", "--env absent.py: no such file"),
        ("agentenv.testing:Nothing", "agentenv.testing has no 'Nothing'"),
        ("agentenv_absent:Env", "No module named 'agentenv_absent'"),
        ("agentenv.testing:__all__", "is a list, must be a class or function"),
    ],
)
def test_what_is_not_there_is_named(name, message):
    with pytest.raises(UsageError, match=message):
        find_environment(name)


def test_an_error_in_the_users_file_is_told_with_its_kind(write):
    path = write("broken.py", "import agentenv\n1 / 0\n")
    with pytest.raises(UsageError, match="ZeroDivisionError while importing it: division by zero"):
        find_environment(str(path))


def test_an_argument_that_the_environment_does_not_take_is_found_before_the_run(write):
    path = write("argument.py", ENVIRONMENT.format(name="Argument"))
    with pytest.raises(UsageError, match="limitt"):
        find_environment(str(path), {"limitt": 5})
    with pytest.raises(UsageError, match="takes no argument 'limitt'"):
        find_environment("Echo-v0", {"limitt": 5})


def test_a_folder_without_a_model_is_refused(tmp_path):
    with pytest.raises(UsageError, match="that folder holds no model"):
        load_policy(str(tmp_path), embedded=tmp_path)


def test_a_path_that_is_not_there_is_not_looked_up_on_the_hub(tmp_path):
    with pytest.raises(UsageError, match="no such folder"):
        load_policy(str(tmp_path / "absent"), embedded=tmp_path)


def test_a_broken_config_is_refused_in_one_line(tmp_path):
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UsageError) as error:
        load_policy(str(tmp_path), embedded=tmp_path)
    assert "\n" not in str(error.value)


def test_a_missing_embedded_policy_says_so(tmp_path):
    with pytest.raises(UsageError, match="--model embedded: the embedded policy is not installed"):
        load_policy("embedded", embedded=tmp_path / "absent")
