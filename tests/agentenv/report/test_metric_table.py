"""docs/metrics.md is made of metrics.toml, and a logged name is found there."""

from pathlib import Path

import pytest

from agentenv.report.metric_table import fill_page, find_metric, metric_table


def test_the_page_on_metrics_is_what_the_table_makes_of_it(repository: Path) -> None:
    page = (repository / "docs" / "metrics.md").read_text(encoding="utf-8")
    assert fill_page(page) == page
    assert all(f"\n## {section}\n" in page for section in metric_table())
    assert fill_page(page.replace("near 0: no exploration is left", "fine")) == page


@pytest.mark.parametrize(
    ("name", "row"),
    [
        ("masked_high", "masked_low"),
        ("staleness/3", "staleness/N"),
        ("discarded/surplus", "discarded"),
        ("discarded_tokens/surplus", "discarded_tokens/REASON"),
    ],
)
def test_a_logged_name_is_found_by_itself_or_by_its_kind(name: str, row: str) -> None:
    found = find_metric(name)
    assert found is not None and found.names[0] == row


@pytest.mark.parametrize("name", ["nothing", "nothing/3", "staleness"])
def test_a_name_that_is_not_explained_is_not_found(name: str) -> None:
    assert find_metric(name) is None


def test_no_name_is_explained_twice() -> None:
    names = [name for rows in metric_table().values() for metric in rows for name in metric.names]
    assert len(names) == len(set(names))
