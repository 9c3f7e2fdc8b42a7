"""The model card: what a run was, and nothing that its texts could do to a page."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from agentenv.errors import UsageError
from agentenv.report import RunDirectory
from agentenv.report.model_card import write_model_card

HOSTILE = "a|b <script>alert(1)</script> [x](javascript:alert(2)) `c`\n# heading \x1b[31m\u202e"


def make_run(path: Path, **changes: Any) -> Path:
    """A finished run of SAO, with a model."""
    settings = {"model": "Qwen/Qwen3-0.6B", "learning_rate": 1e-5, "seed": 3, **changes.pop("settings", {})}
    record = {
        "name": "swe_sao",
        "env": "SWE-v0",
        "algorithm": "SAO",
        "eval_tasks": "Held-out families.",
        "settings": settings,
        "given": {"model": "Qwen/Qwen3-0.6B", "env_kwargs": '{"a": 1}'},
        "versions": {"torch": "2.13.0"},
    }
    summary = {
        "status": "finished",
        "before": {"success": 0.25, "interval": [0.2, 0.3], "episodes": 256, "reward": 0.25},
        "after": {
            "success": 0.75,
            "interval": [0.7, 0.8],
            "episodes": 255,
            "reward": 0.75,
            "families": {"bugs": 0.5, HOSTILE: 1.0},
        },
        "sandbox": "docker",
        "seconds": 3720.0,
        "steps": 2,
        "episodes": {"consumed": 64},
    }
    run = RunDirectory.create(path, {**record, **changes.pop("record", {})})
    for step in (1, 2):
        run.log_metrics(step, {"success": 0.3 * step})
    run.write_summary({**summary, **changes})
    run.close()
    run.model_path.mkdir()
    (run.model_path / "config.json").write_text("{}")
    return path


def test_the_card_tells_environment_algorithm_curve_evaluation_and_sandbox(tmp_path: Path) -> None:
    folder = write_model_card(make_run(tmp_path / "run"))
    card = (folder / "README.md").read_text()
    _, front, body = card.split("---\n", 2)
    assert yaml.safe_load(front) == {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "base_model": "Qwen/Qwen3-0.6B",
        "tags": ["agentenv", "reinforcement-learning", "sao", "SWE-v0"],
    }
    for line in (
        "# SWE\\-v0 by SAO",
        "![Success by training step](curve.svg)",
        "Held\\-out families.",
        "| before | 0.250 | 0.200 to 0.300 | 256 | 0.250 |",
        "| after | 0.750 | 0.700 to 0.800 | 255 | 0.750 |",
        "| bugs | 0.500 |",
        "| sandbox of the agent's commands | docker |",
        "| episodes | 64 |",
        "| time | 1h02m |",
        "| version of torch | 2.13.0 |",
        """    python recipes/swe_sao.py --model Qwen/Qwen3-0.6B --env_kwargs '{"a": 1}'""",
    ):
        assert line in body.splitlines(), line
    assert "trained from Qwen/Qwen3\\-0.6B by [SAO](https://arxiv.org/abs/2607.07508)" in body
    assert "**" not in body
    curve = (folder / "curve.svg").read_text()
    assert curve.startswith("<svg") and "evaluated after training: 75%" in curve


def test_hostile_names_are_shown_and_end_no_cell(tmp_path: Path) -> None:
    card = (write_model_card(make_run(tmp_path / "run")) / "README.md").read_text()
    (row,) = (line for line in card.splitlines() if "alert" in line)
    assert row.startswith(
        r"| a\|b \<script\>alert\(1\)\</script\> \[x\]\(javascript:alert\(2\)\) \`c\` \# heading"
    )
    assert "\x1b" not in card and "\u202e" not in card and row.endswith("| 1.000 |")


@pytest.mark.parametrize(
    ("changes", "warning"),
    [
        ({"settings": {"control": "shuffled_rewards"}}, "A control"),
        ({"settings": {"smoke": True}}, "its numbers mean nothing"),
        ({"status": "interrupted"}, "The run is not complete: interrupted."),
        ({"sandbox": "local-unisolated"}, "without isolation"),
    ],
)
def test_what_takes_the_numbers_their_worth_stands_before_them(
    tmp_path: Path, changes: dict[str, Any], warning: str
) -> None:
    card = (write_model_card(make_run(tmp_path / "run", **changes)) / "README.md").read_text()
    assert card.index("> **") < card.index(warning) < card.index("## Evaluation")


def test_a_run_that_tells_little_has_a_card(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path / "run", {"name": "old"})
    run.close()
    run.model_path.mkdir()
    (run.model_path / "config.json").write_text("{}")
    card = (write_model_card(run.path) / "README.md").read_text()
    assert "The run was not evaluated." in card and "curve.svg" not in card
    assert "a small policy that ships with agentenv" in card


def test_a_run_without_a_model_is_refused(tmp_path: Path) -> None:
    RunDirectory.create(tmp_path / "run", {"name": "swe_sao"}).close()
    with pytest.raises(UsageError, match="no model there"):
        write_model_card(tmp_path / "run")
