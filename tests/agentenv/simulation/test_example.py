"""The example of docs/simulation.md runs and says what the page says."""

import re
from pathlib import Path

PAGE = Path(__file__).parents[3] / "docs" / "simulation.md"


def test_the_pages_example_prints_what_the_page_says(capsys):
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    exec(compile(code, str(PAGE), "exec"), {})
    expected = [line.split("  # ", 1)[1] for line in code.splitlines() if "  # " in line]
    assert expected
    assert capsys.readouterr().out.split() == " ".join(expected).split()


def test_every_exported_name_has_a_docstring():
    from agentenv import simulation

    for name in simulation.__all__:
        assert getattr(simulation, name).__doc__, name
