"""Options of a recipe: where a value comes from, and what a mistake says."""

import json
from dataclasses import dataclass

import pytest

from agentenv.errors import UsageError
from agentenv_trainers.recipe import RecipeArguments, parse
from agentenv_trainers.rollout_settings import setting
from agentenv_trainers.sao.config import SAOConfig


@dataclass
class Arguments(RecipeArguments):
    """Options of an imaginary recipe."""

    colour: str = setting("blue", "of the bicycle shed")


def read(*argv, **defaults):
    """Parse with these recipe defaults."""
    return parse(
        Arguments,
        SAOConfig,
        [str(item) for item in argv],
        defaults=lambda given: {"max_steps": 7, "output_dir": "runs/x", **defaults},
        description="An imaginary recipe.\n\n    python it.py\n    python it.py --smoke",
    )


@pytest.fixture
def yaml_file(tmp_path):
    """Writes a YAML file and returns its path."""

    def write(text):
        path = tmp_path / "run.yaml"
        path.write_text(text)
        return path

    return write


def test_a_field_is_taken_from_command_line_then_yaml_then_recipe_then_its_default(yaml_file):
    path = yaml_file("max_steps: 20\nlearning_rate: 1e-5\ncolour: green\n")
    parsed = read("--config", path, "--max_steps", 30, num_envs=4, learning_rate=1e-3)
    assert parsed.config.max_steps == 30
    assert parsed.config.learning_rate == 1e-5  # YAML alone would take 1e-5 for a text
    assert parsed.config.num_envs == 4
    assert parsed.config.clip_low == 0.8
    assert parsed.arguments.colour == "green"
    assert parsed.given == {"max_steps": 30, "learning_rate": 1e-5, "colour": "green"}


def test_a_value_that_equals_its_default_still_counts_as_given():
    assert read("--colour", "blue").given == {"colour": "blue"}


def test_recipe_defaults_see_what_was_given():
    parsed = parse(
        Arguments,
        SAOConfig,
        ["--model", "my/model"],
        defaults=lambda given: {"max_steps": 1 if given.get("model") == "my/model" else 2, "output_dir": "x"},
        description="",
    )
    assert parsed.config.max_steps == 1


def test_yaml_may_name_the_environment_or_set_environment_variables(yaml_file, monkeypatch):
    assert read("--config", yaml_file("env: Guess-v0\n")).arguments.env == "Guess-v0"
    monkeypatch.delenv("AGENTENV_TEST_COLOUR", raising=False)
    assert read("--config", yaml_file("env:\n  AGENTENV_TEST_COLOUR: red\n")).arguments.env is None
    import os

    assert os.environ.pop("AGENTENV_TEST_COLOUR") == "red"


def test_yaml_may_write_the_arguments_of_the_environment_as_a_mapping(yaml_file):
    parsed = read(
        "--config", yaml_file("env_kwargs:\n  levels: [1, 2]\n"), "--eval_env_kwargs", '{"split": "x"}'
    )
    assert parsed.arguments.env_options == {"levels": [1, 2]}
    assert parsed.arguments.eval_env_options == {"levels": [1, 2], "split": "x"}


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--lerning_rate", "1"], "unknown option --lerning_rate; did you mean --learning_rate?"),
        (["--learning-rte=1"], "did you mean --learning_rate?"),
        (["--learning_rat", "1"], "did you mean --learning_rate?"),  # an abbreviation is a misspelling
        (["--qqqqq", "1"], "unknown option --qqqqq; --help lists them all"),
        (["stray"], "unexpected argument 'stray'"),
        (["--max_steps", "many"], "invalid int value: 'many'"),
        (["--engine", "abacus"], "invalid choice: 'abacus'"),
        (["--temperature", "0.7"], "SAOConfig.temperature is 0.7, must be 1.0"),
        (["--top_k", "20"], "SAOConfig.top_k is 20, must be 0"),
        (["--eval_episodes", "0"], "--eval_episodes is 0, must be at least 1"),
        (["--env_kwargs", "{levels: 1}"], "is not valid JSON"),
        (["--env_kwargs", "[1]"], "must be a JSON object"),
        (["--resume"], "--resume needs the run's --output_dir"),
        (["--config", "absent.yaml"], "absent.yaml: No such file"),
    ],
)
def test_a_mistake_is_one_error_that_names_it(argv, message):
    with pytest.raises(UsageError) as error:
        read(*argv)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("lerning_rate: 1\n", "unknown option 'lerning_rate'; did you mean learning_rate?"),
        ("max_steps: many\n", "max_steps: invalid int value: 'many'"),
        ("engine: abacus\n", "engine: invalid choice: 'abacus'"),
        ("- a\n- b\n", "must hold a mapping of options, found list"),
        ("a: [1\n", "not valid YAML"),
    ],
)
def test_a_mistake_in_yaml_names_the_file_and_the_option(yaml_file, text, message):
    with pytest.raises(UsageError) as error:
        read("--config", yaml_file(text))
    assert "run.yaml" in str(error.value)
    assert message in " ".join(str(error.value).split()).replace(
        "argument --max_steps/--max-steps: ", ""
    ).replace("argument --engine: ", "")


def test_a_resumed_run_keeps_the_settings_that_its_user_gave(tmp_path):
    record = {"given": {"max_steps": 50, "colour": "red", "seed": 3}}
    (tmp_path / "run.json").write_text(json.dumps(record))
    parsed = read("--output_dir", tmp_path, "--resume", "--max_steps", 60)
    assert parsed.config.max_steps == 60
    assert parsed.config.seed == 3
    assert parsed.arguments.colour == "red"


def test_help_shows_the_recipe_and_the_fields_of_the_config(capsys):
    with pytest.raises(SystemExit) as end:
        read("--help")
    assert end.value.code == 0
    text = capsys.readouterr().out
    for expected in (
        "An imaginary recipe.\n\n    python it.py\n    python it.py --smoke\n",
        "of the bicycle shed",
        "--clip_low",
        "--learning_rate",
        "--config FILE",
    ):
        assert expected in text
