"""`file_editor`: what it shows, what it edits, what it takes back, and what it refuses."""

from collections.abc import Callable

import pytest

from agentenv_envs.swe.protocols import Malformed
from agentenv_envs.swe.protocols.base import Limits
from agentenv_envs.swe.protocols.editor import FileEditor
from agentenv_envs.swe.protocols.functions import FILE_EDITOR
from agentenv_envs.swe.protocols.paths import MAX_FILE_BYTES, RefusalError
from agentenv_envs.swe.sandbox import Sandbox, SandboxSpec, open_backend

Edit = Callable[..., str]


@pytest.fixture
def edit(sandbox: Sandbox, limits: Limits) -> Edit:
    """Calls of one editor, as its text or its refusal."""
    editor = FileEditor()

    def call(command: str, path: str = "app.py", *, chars: int = limits.chars, **arguments: object) -> str:
        checked = FILE_EDITOR.check({"command": command, "path": path, **arguments})
        assert not isinstance(checked, Malformed), checked
        try:
            return editor.run(checked, sandbox, Limits(limits.timeout_s, chars))
        except RefusalError as error:
            return f"refused: {error}"

    return call


def test_view_numbers_lines_as_cat_does(edit: Edit, sandbox: Sandbox) -> None:
    assert edit("view") + "\n" == sandbox.run("cat -n app.py").output
    assert edit("view", view_range=[4, 5]) == "     4\tdef one():\n     5\t    return 1"
    assert edit("view", view_range="[8, -1]") == "     8\tdef two():\n     9\t    return 1"
    assert edit("view", view_range=[9, 500]) == "     9\t    return 1"
    assert edit("view", "/work/app.py") == edit("view", "./pkg/../app.py") == edit("view")
    assert edit("view", "empty.py") == edit("view", "empty.py", view_range=[1, -1]) == "(no lines)"


def test_a_concise_view_shows_where_things_begin(edit: Edit) -> None:
    assert edit("view", concise="True") == "     1\timport os\n     4\tdef one():\n     8\tdef two():"


def test_view_lists_a_folder_two_levels_deep_without_hidden_files(edit: Edit) -> None:
    assert edit("view", ".").split("\n") == [
        "app.py",
        "dos.txt",
        "empty.py",
        "it's here.txt",
        "pkg/",
        "pkg/data.bin",
        "pkg/deep/",
        "pkg/latin.txt",
    ]
    assert edit("view", "pkg/deep") == "er.py"


@pytest.mark.parametrize("view_range", [[0, 3], [5, 4], [10, 12], [1, -2], [-1, -1]])
def test_a_range_outside_of_the_file_is_refused(edit: Edit, view_range: list[int]) -> None:
    assert edit("view", view_range=view_range).endswith("which has the lines 1 to 9")


def test_a_long_file_is_shown_by_head_and_tail_with_a_count(edit: Edit, sandbox: Sandbox) -> None:
    sandbox.write_files({"long.py": "x = 1\n" * 5_000})
    shown = edit("view", "long.py", chars=200)
    assert shown.startswith("     1\tx = 1\n") and shown.endswith("  5000\tx = 1")
    assert (
        "[... 64799 characters left out ...]" in shown
    )  # 5,000 lines of 13, less the last break and the 200 kept
    assert len(shown) < 260


def test_create_makes_a_file_and_its_folders_and_never_overwrites(edit: Edit, sandbox: Sandbox) -> None:
    assert edit("create", "new/a b.py", file_text="x = 1\ny = 2\n") == "/work/new/a b.py is made, 2 lines."
    assert sandbox.read_file("new/a b.py") == b"x = 1\ny = 2\n"
    for path in ("app.py", "pkg", "new/a b.py"):
        assert "exists already" in edit("create", path, file_text="z")
    assert "can't be written" in edit("create", "app.py/x.py", file_text="z")
    assert "needs the parameter file_text" in edit("create", "other.py")


def test_str_replace_edits_the_one_place_and_shows_it(edit: Edit, sandbox: Sandbox) -> None:
    shown = edit("str_replace", old_str="def two():\n    return 1", new_str="def two():\n    return 2")
    assert shown.startswith("/work/app.py is edited. It reads now:\n     4\tdef one():\n")
    assert shown.endswith("     9\t    return 2")
    assert b"def one():\n    return 1\n\n\ndef two():\n    return 2\n" in sandbox.read_file("app.py")
    edit("str_replace", old_str="import os\n\n\n")
    assert sandbox.read_file("app.py").startswith(b"def one")


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("    return 1", "    return 2", "2 times in /work/app.py, at lines 5, 9"),
        ("return 3", "x", "old_str is not in /work/app.py"),
        ("return  1", "x", "white space included"),
        ("", "x", "old_str is empty"),
        ("def one", "def one", "nothing would change"),
    ],
)
def test_str_replace_refuses_what_is_not_one_place(
    edit: Edit, sandbox: Sandbox, old: str, new: str, said: str
) -> None:
    before = sandbox.read_file("app.py")
    assert said in edit("str_replace", old_str=old, new_str=new)
    assert sandbox.read_file("app.py") == before


def test_line_ends_of_a_file_are_kept_and_named(edit: Edit, sandbox: Sandbox) -> None:
    assert "end with \\r\\n" in edit("str_replace", "dos.txt", old_str="one\ntwo", new_str="x")
    edit("str_replace", "dos.txt", old_str="one", new_str="1")
    assert sandbox.read_file("dos.txt") == b"1\r\ntwo\r\n"


@pytest.mark.parametrize(
    ("before", "line", "new", "after"),
    [
        ("a\nb\n", 0, "x", "x\na\nb\n"),
        ("a\nb\n", 1, "x\ny\n", "a\nx\ny\nb\n"),
        ("a\nb\n", 2, "x", "a\nb\nx\n"),
        ("a", 1, "x", "a\nx"),
        ("", 0, "x", "x\n"),
        ("a\n", 1, "", "a\n\n"),
    ],
)
def test_insert_puts_lines_after_a_line(
    edit: Edit, sandbox: Sandbox, before: str, line: int, new: str, after: str
) -> None:
    sandbox.write_files({"t.txt": before})
    edit("insert", "t.txt", insert_line=line, new_str=new)
    assert sandbox.read_file("t.txt").decode() == after
    assert "taken back" in edit("undo_edit", "t.txt")
    assert sandbox.read_file("t.txt").decode() == before


@pytest.mark.parametrize("line", [-1, 10, 10**8])
def test_insert_refuses_a_line_that_is_not_there(edit: Edit, line: int) -> None:
    assert "app.py allows 0 to 9" in edit("insert", insert_line=line, new_str="x")


def test_edits_are_taken_back_one_by_one_down_to_the_making_of_the_file(edit: Edit, sandbox: Sandbox) -> None:
    edit("create", "new.py", file_text="a\n")
    for old, new in (("a", "b"), ("b", "a"), ("a", "b")):
        edit("str_replace", "new.py", old_str=old, new_str=new)
    edit("insert", insert_line=0, new_str="# another file")
    for left in (b"a\n", b"b\n", b"a\n"):
        assert edit("undo_edit", "new.py") == "The last edit of /work/new.py is taken back."
        assert sandbox.read_file("new.py") == left
    assert edit("undo_edit", "new.py").endswith("the file is gone.")
    assert "no edit of /work/new.py" in edit("undo_edit", "new.py")
    assert sandbox.run("ls new.py").exit_code != 0
    assert sandbox.read_file("app.py").startswith(b"# another file\n")


def test_undo_does_not_take_away_what_a_command_wrote_since(edit: Edit, sandbox: Sandbox) -> None:
    edit("insert", insert_line=0, new_str="# mine")
    sandbox.run("echo '# by a command' >>app.py")
    assert "has changed since" in edit("undo_edit")
    sandbox.run("rm app.py")
    assert "there is no file" in edit("undo_edit")


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("gone.py", "there is no file /work/gone.py"),
        ("pkg/data.bin", "is not UTF-8 text (6 bytes)"),
        ("pkg/latin.txt", "is not UTF-8 text"),
        ("fifo", "can't be read as a file"),
        ("dangling", "can't be read as a file"),
        ("", "path is empty"),
        (" ", "path is empty"),
        ("a\0b", "NUL"),
        ("x" * 300, "too long"),
        ("x/" * 2500, "too long"),
        ("/proc/self/environ", "use a shell command"),
        ("../proc/1/mem", "use a shell command"),
        ("big.txt", f"over {MAX_FILE_BYTES} bytes"),
    ],
)
def test_a_file_that_is_not_for_the_tool_is_refused_with_what_is_allowed(
    edit: Edit, sandbox: Sandbox, path: str, said: str
) -> None:
    sandbox.run("mkfifo fifo; ln -s nowhere dangling; head -c 1000001 /dev/zero | tr '\\0' x >big.txt")
    assert said in edit("view", path)
    assert said in edit("str_replace", path, old_str="a", new_str="b")


def test_a_folder_is_not_edited_and_a_file_never_grows_past_the_limit(edit: Edit, sandbox: Sandbox) -> None:
    assert "is a folder" in edit("str_replace", "pkg", old_str="a", new_str="b")
    assert "too many" in edit("create", "huge.py", file_text="x" * (MAX_FILE_BYTES + 1))
    assert sandbox.run("ls huge.py").exit_code != 0


def test_without_isolation_the_tool_stays_in_the_workdir(edit: Edit) -> None:
    for path in ("/etc/passwd", "../x", "/tmp/x"):
        assert "outside of /work" in edit("view", path)
        assert "outside of /work" in edit("create", path, file_text="x")


@pytest.mark.docker
def test_in_a_container_it_works_wherever_a_shell_does_and_keeps_modes(limits: Limits) -> None:
    backend = open_backend("docker")
    sandbox = backend.acquire(SandboxSpec(read_only=True))
    editor = FileEditor()

    def call(command: str, path: str, **arguments: object) -> str:
        return editor.run({"command": command, "path": path, **arguments}, sandbox, limits)

    try:
        sandbox.run("printf 'echo 1\n' >run.sh; chmod 755 run.sh; printf '\\0' >b; mkfifo fifo; mkdir folder")
        call("str_replace", "run.sh", old_str="1", new_str="'2 \\0 %s é'")
        assert sandbox.run("./run.sh").output == "2 \\0 %s é\n"
        call("create", "/tmp/deep/x.txt", file_text="a\n")
        assert sandbox.run("cat /tmp/deep/x.txt").output == "a\n"
        assert "x.txt" in call("view", "/tmp")
        assert call("undo_edit", "/tmp/deep/x.txt").endswith("the file is gone.")
        assert "root:" in call("view", "/etc/passwd", view_range=[1, 1])
        sandbox.run("head -c 100000000 /dev/zero >fill")  # to the last byte
        for command, path in (("create", "late.txt"), ("insert", "run.sh")):
            with pytest.raises(RefusalError, match="can't be written"):
                call(command, path, file_text="x" * 200_000, new_str="x" * 200_000, insert_line=1)
        assert sandbox.run("./run.sh; ls late.txt").output.startswith("2 \\0 %s é\nls: cannot access")
        sandbox.run("rm fill")
        for command, path, said in (
            ("create", "/etc/new.txt", "can't be written"),  # its root file system is read-only
            ("create", "folder", "exists already"),
            ("view", "b", "not UTF-8 text"),
            ("view", "fifo", "can't be read as a file"),
            ("view", "gone/x", "there is no file"),
        ):
            with pytest.raises(RefusalError, match=said):
                call(command, path, file_text="x")
    finally:
        backend.release(sandbox)
        backend.close()
