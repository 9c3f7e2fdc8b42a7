"""New files of a patch that Python would import in the place of an installed module.

A `hypothesis.py` at the root of a repository, where pytest begins its path, can turn every test that imports hypothesis
into one that does nothing; a `random.py` does the same to those that import random. No fix needs such a file, and
agents that leave a `test.py` behind mean no harm: what they add there is left out of what is graded.

Runs inside the sandbox as one file, before any code of the patch: `python -I shadows.py LISTING TEST_FILE...` prints,
each ended by a NUL character, those of the paths in LISTING that are such files. For Python 3.6 and later.
"""

import importlib.machinery
import os
import sys


def main(listing: str, test_files: "list[str]") -> None:
    """Print the paths."""
    work = os.path.join(os.path.realpath(os.getcwd()), "")
    with open(listing, "rb") as file:
        paths = [os.fsdecode(raw) for raw in file.read().split(b"\0") if raw]
    roots = {"", "src"} | {import_root(os.path.dirname(name)) for name in test_files}
    outside = []
    for entry in sys.path:
        real = os.path.join(os.path.realpath(entry or "."), "")
        if real.startswith(work):
            roots.add(real[len(work) :].rstrip(os.sep))
        else:
            outside.append(entry)
    for path in paths:
        folder, _, name = path.rpartition("/")
        if name == "__init__.py":
            folder, _, name = folder.rpartition("/")
        if folder in roots and is_installed(name.partition(".")[0], outside):
            sys.stdout.buffer.write(os.fsencode(path) + b"\0")


def import_root(folder: str) -> str:
    """The folder that pytest puts on the path for a test file in `folder`: the first one that is no package."""
    while folder and os.path.isfile(os.path.join(folder, "__init__.py")):
        folder = os.path.dirname(folder)
    return folder


def is_installed(name: str, path: "list[str]") -> bool:
    """Whether `import name` finds something that is built in or lies on this path."""
    if name in sys.builtin_module_names:
        return True
    spec = importlib.machinery.PathFinder.find_spec(name, path)
    return spec is not None and spec.loader is not None


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
