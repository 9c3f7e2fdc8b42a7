"""The part of Docker's command line that agent programs use, for one sandbox that is there already.

    run ...                                            prints the name of the sandbox
    exec [-i] [-t] [-w DIR] [-e NAME=VALUE] NAME ARGV  runs ARGV in it; stdout and stderr together, and its exit code
    stop, kill, rm, pull ...                           nothing: the sandbox is not the agent's to remove

A program that calls `docker` is given this in its place (mini-swe-agent: `environment.executable`). It needs nothing
but Python's standard library; the door it knocks at is named by AGENTENV_SANDBOX_DOOR.
"""

import json
import os
import socket
import sys

DOOR = "AGENTENV_SANDBOX_DOOR"
NAME = "agentenv-sandbox"
EXIT_USAGE = 125
"""What Docker itself ends with where it could not run a command."""


def main(argv: list[str]) -> int:
    """One command; returns its exit code."""
    verb = argv[0] if argv else ""
    if verb == "run":
        sys.stdout.write(NAME + "\n")
        return 0
    if verb in ("stop", "kill", "rm", "pull"):
        return 0
    if verb != "exec":
        return _refuse(f"{verb!r} is not supported: run, exec, stop, kill, rm and pull are")
    workdir, variables, rest = None, {}, argv[1:]
    while rest and rest[0].startswith("-"):
        option = rest.pop(0)
        if option in ("-i", "-t", "-it", "--interactive", "--tty"):
            continue
        if option not in ("-w", "--workdir", "-e", "--env") or not rest:
            return _refuse(f"exec {option}: -i, -t, -w DIR and -e NAME=VALUE are supported")
        value = rest.pop(0)
        if option in ("-w", "--workdir"):
            workdir = value
        else:
            name, separator, text = value.partition("=")
            variables[name] = text if separator else os.environ.get(name, "")
    if len(rest) < 2:
        return _refuse("exec: the name of the container and a command are needed")
    answer = _ask({"argv": rest[1:], "workdir": workdir, "env": variables})
    sys.stdout.write(answer["output"])
    sys.stdout.flush()
    return int(answer["exit_code"])


def _ask(request: dict[str, object]) -> dict[str, str]:
    path = os.environ.get(DOOR, "")
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as door:
            door.connect(path)
            door.sendall(json.dumps(request).encode() + b"\n")
            data = b"".join(iter(lambda: door.recv(1 << 16), b""))
        answer: dict[str, str] = json.loads(data)
    except (OSError, ValueError) as error:
        raise SystemExit(_refuse(f"the sandbox behind {DOOR}={path} does not answer: {error}")) from None
    return answer


def _refuse(message: str) -> int:
    sys.stderr.write(f"container_cli: {message}\n")
    return EXIT_USAGE


if __name__ == "__main__":
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="replace")  # type: ignore[union-attr]
    sys.exit(main(sys.argv[1:]))
