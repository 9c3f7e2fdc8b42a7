"""`search`: literal text in a file, in a folder, and what it refuses."""

import pytest

from agentenv_envs.swe.protocols.base import Limits
from agentenv_envs.swe.protocols.paths import RefusalError
from agentenv_envs.swe.protocols.search import search
from agentenv_envs.swe.sandbox import Sandbox


def test_a_folder_gives_files_with_their_number_of_lines_and_no_hidden_or_binary_ones(
    sandbox: Sandbox, limits: Limits
) -> None:
    found = search({"search_term": "one"}, sandbox, limits)
    assert found.split("\n") == [
        "./app.py (1)",
        "./dos.txt (1)",
        "./it's here.txt (2)",
        "./pkg/deep/er.py (1)",
    ]
    assert search({"search_term": "one", "path": "pkg"}, sandbox, limits) == "./pkg/deep/er.py (1)"


def test_a_file_gives_its_lines_with_numbers(sandbox: Sandbox, limits: Limits) -> None:
    assert (
        search({"search_term": "one", "path": "/work/it's here.txt"}, sandbox, limits) == "1:one\n2:one more"
    )


@pytest.mark.parametrize("term", ["[a-z]*", "$(touch x)", "'", "-r", "\\", "\ufffd"])
def test_the_text_is_taken_literally(sandbox: Sandbox, limits: Limits, term: str) -> None:
    sandbox.write_files({"odd.py": f"# {term}\n"})
    assert search({"search_term": term}, sandbox, limits) == "./odd.py (1)"
    assert search({"search_term": term, "path": "odd.py"}, sandbox, limits) == f"1:# {term}"
    assert sandbox.run("ls x").exit_code != 0


def test_much_that_is_found_is_cut(sandbox: Sandbox) -> None:
    sandbox.write_files({"long.py": "needle\n" * 3_000})
    found = search({"search_term": "needle", "path": "long.py"}, sandbox, Limits(20.0, 200))
    assert found.startswith("1:needle\n") and found.endswith("3000:needle") and "bytes left out" in found


@pytest.mark.parametrize(
    ("term", "path", "said"),
    [
        ("", ".", "within one line"),
        ("a\nb", ".", "within one line"),
        ("a\0", ".", "one line"),
        ("a", "no", "no file"),
    ],
)
def test_what_can_not_be_searched_is_refused(
    sandbox: Sandbox, limits: Limits, term: str, path: str, said: str
) -> None:
    with pytest.raises(RefusalError, match=said):
        search({"search_term": term, "path": path}, sandbox, limits)
