"""The program of an interpreter that keeps its variables; it runs in a sandbox, and `interpreter` talks to it.

One after the other it runs the text of `program.py` in the same scope, with what it prints in the file `.out`, and
writes the exit code to the pipe `.done`. It ends when the text ends it; a copy of it that the text forked ends with the
text, and answers nobody.
"""

import io
import linecache
import os
import sys
import traceback
from typing import Any

_FILE = "program.py"
_RESERVED = (253, 254)
"""Exit codes by which the other end tells what happened to this process."""


def main() -> None:
    """Serve until the process ends."""
    folder, own = os.getcwd(), os.getpid()
    # Opened for both: neither end waits for the other to be there.
    ask, done = (os.open(os.path.join(folder, name), os.O_RDWR) for name in (".ask", ".done"))
    scope: dict[str, Any] = {"__name__": "__main__", "__builtins__": __builtins__}
    while os.read(ask, 1):
        out = os.open(os.path.join(folder, ".out"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND)
        for descriptor in (1, 2):
            os.dup2(out, descriptor)
        os.close(out)
        # As the program before left them, they may be closed or replaced.
        sys.stdout = io.TextIOWrapper(
            io.FileIO(1, "w", closefd=False), "utf-8", "backslashreplace", write_through=True
        )
        sys.stderr = io.TextIOWrapper(
            io.FileIO(2, "w", closefd=False), "utf-8", "backslashreplace", write_through=True
        )
        code = _run(os.path.join(folder, _FILE), scope)
        if os.getpid() != own:
            os._exit(code)
        os.write(done, f"{1 if code in _RESERVED else code}\n".encode())


def _run(path: str, scope: dict[str, Any]) -> int:
    """Run the file's text; its exit code as the interpreter itself would give it."""
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read()
        linecache.cache[_FILE] = (len(text), None, text.splitlines(keepends=True), _FILE)
        exec(compile(text, _FILE, "exec"), scope)
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return (end.code or 0) & 255
        sys.stderr.write(f"{end.code}\n")
        return 1
    except BaseException as error:
        trace = error.__traceback__.tb_next if error.__traceback__ is not None else None
        traceback.print_exception(type(error), error, trace, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    main()
