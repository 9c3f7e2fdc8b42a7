"""The command `agentenv doctor`: what this machine has of what environments and training need, and what to do.

Invariants:
- Every check ends or is given up: requests have deadlines, checks run side by side, and after `DEADLINE_S` those that
  have no answer are reported as such.
- Looking changes nothing: no image is pulled or built, and the one container that is started is removed.
- FAIL is for what real sandboxes can't do without; what only some runs need is a `warn`.
- Exit code 1 where a check fails, else 0.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import platform
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from agentenv.errors import UsageError

__all__ = ["Check", "add_commands", "run_checks"]

DEADLINE_S = 8.0
PROGRAM_S = 7.0
"""Deadline of a program that a check runs; it ends before the checks do, so that none is left."""
_GIB = 1 << 30
RUN_LOW_BYTES = 10 * _GIB
"""Below this a folder of runs fills soon: a checkpoint with the state of AdamW has 12 bytes per parameter."""
FULL_BYTES = _GIB


@dataclass(frozen=True)
class Check:
    """One line of the doctor.

    Attributes:
        name: of what was looked at.
        status: "ok"; "warn": some runs lack something; "FAIL": what is required does not work.
        found: what there is.
        advice: what to do; "" where nothing is to be done.
    """

    name: str
    status: Literal["ok", "warn", "FAIL"]
    found: str
    advice: str = ""


@dataclass(frozen=True)
class Group:
    """Checks that run one after the other, beside other groups.

    Attributes:
        names: of the checks that `look` yields.
        look: yields them.
        required: whether one without an answer is a failure.
    """

    names: tuple[str, ...]
    look: Callable[[], Iterator[Check]]
    required: bool = False


def add_commands(subparsers: Any) -> None:
    """Add `doctor`.

    Args:
        subparsers: what `argparse.ArgumentParser.add_subparsers` returned.
    """
    parser = subparsers.add_parser(
        "doctor",
        description="Look at Docker, disk, GPU and libraries; each line is ok, warn or FAIL, and says what to do. "
        "Exits with 1 where something required fails.",
    )
    parser.add_argument("--json", action="store_true", help="a JSON array of name, status, found and advice")
    parser.add_argument(
        "--runs", metavar="DIR", type=Path, default=Path("runs"), help="where runs go (default: %(default)s)"
    )
    parser.set_defaults(run=_run)


def run_checks(groups: Sequence[Group], deadline_s: float = DEADLINE_S) -> list[Check]:
    """The checks of all groups, in their order; one that is not there after `deadline_s` seconds says so."""
    found: list[list[Check]] = [[] for _ in groups]

    def look(number: int) -> None:
        group = groups[number]
        try:
            for check in group.look():
                found[number].append(check)
        except Exception as error:  # of any library: one check that breaks must not hide the others
            done = {check.name for check in found[number]}
            name = next(name for name in group.names if name not in done)
            found[number].append(
                Check(name, _missing(group), f"the check broke: {type(error).__name__}: {error}")
            )

    threads = [
        threading.Thread(target=look, args=(number,), name=f"doctor-{groups[number].names[0]}", daemon=True)
        for number in range(len(groups))
    ]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + deadline_s
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    checks: list[Check] = []
    for group, thread, seen in zip(groups, threads, found, strict=True):
        done = {check.name: check for check in list(seen)}
        why = f"no answer within {deadline_s:.0f} s" if thread.is_alive() else "not looked at"
        checks += [done.get(name) or Check(name, _missing(group), why) for name in group.names]
    return checks


def _missing(group: Group) -> Literal["warn", "FAIL"]:
    return "FAIL" if group.required else "warn"


def _run(args: argparse.Namespace) -> int:
    from .doctor_docker import docker_group

    if args.runs.exists() and not args.runs.is_dir():
        raise UsageError(f"--runs {args.runs}: is not a folder")
    checks = run_checks(
        [
            Group(("python",), _python, required=True),
            Group(("torch", "trl", "transformers"), _libraries),
            docker_group(),
            Group(("run folder",), lambda: _run_folder(args.runs), required=True),
            Group(("gpu",), _gpu),
            Group(("vllm",), _vllm),
        ]
    )
    if args.json:
        sys.stdout.write(json.dumps([asdict(check) for check in checks], indent=2) + "\n")
    else:
        sys.stdout.write(_text(checks))
    sys.stdout.flush()
    return 1 if any(check.status == "FAIL" for check in checks) else 0


def _text(checks: Sequence[Check]) -> str:
    width = max(len(check.name) for check in checks)
    lines = []
    for check in checks:
        lines.append(f"{check.status:<4}  {check.name:<{width}}  {' '.join(check.found.split())}")
        if check.advice:
            lines.append(f"      {'':<{width}}  -> {check.advice}")
    return "\n".join(lines) + "\n"


def _python() -> Iterator[Check]:
    yield Check("python", "ok", f"{platform.python_version()} ({sys.executable})")


def _libraries() -> Iterator[Check]:
    for name in ("torch", "trl", "transformers"):
        yield _library(name, "agentenv-rl", "train")


def _library(name: str, asker: str, extra: str) -> Check:
    """Whether a library is there, in the range that a distribution asks for; nothing is imported."""
    try:
        version = metadata.version(name)
    except metadata.PackageNotFoundError:
        return Check(
            name,
            "warn",
            "not installed: no training" if extra == "train" else "not installed",
            f"pip install 'agentenv-rl[{extra}]'",
        )
    wanted = _range(name, asker)
    if wanted is not None and not _within(version, wanted):
        return Check(name, "warn", f"{version}, {asker} needs {wanted}", f"pip install '{name}{wanted}'")
    return Check(name, "ok", f"{version}" + (f" ({asker} needs {wanted})" if wanted else ""))


def _range(name: str, asker: str) -> str | None:
    """The range of versions that an installed distribution asks for, extras included; None where it has none."""
    try:
        from packaging.requirements import Requirement

        for text in metadata.requires(asker) or ():
            requirement = Requirement(text)
            if requirement.name.lower() == name and str(requirement.specifier):
                return str(requirement.specifier)
    except (ImportError, metadata.PackageNotFoundError):
        pass
    return None


def _within(version: str, wanted: str) -> bool:
    from packaging.specifiers import SpecifierSet
    from packaging.version import Version

    # Builds such as 2.9.1+cpu and development versions are of their release.
    return SpecifierSet(wanted).contains(Version(version).base_version, prereleases=True)


def _run_folder(folder: Path) -> Iterator[Check]:
    yield free_space("run folder", folder, RUN_LOW_BYTES, "checkpoints fill it; name another by --output_dir")


def free_space(name: str, folder: Path, low_bytes: int, advice: str) -> Check:
    """How much is free where a folder lies, or will lie."""
    folder = folder.absolute()
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    free = shutil.disk_usage(existing).free
    found = f"{free / _GIB:.1f} GiB free at {folder}"
    if free < FULL_BYTES:
        return Check(name, "FAIL", found, advice)
    return Check(name, "warn", found, advice) if free < low_bytes else Check(name, "ok", found)


def _gpu() -> Iterator[Check]:
    cards = _program(["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader"])
    if cards is None:
        yield Check("gpu", "warn", "none (no nvidia-smi answers): training runs on processors")
        return
    shown = "; ".join(cards.split("\n"))
    if importlib.util.find_spec("torch") is None:
        yield Check("gpu", "warn", f"{shown}; torch is not installed", "pip install 'agentenv-rl[train]'")
        return
    seen = _program(
        [sys.executable, "-c", "import torch; print(torch.cuda.is_available(), torch.version.cuda)"]
    )
    available, _, cuda = (seen or "False None").partition(" ")
    if available == "True":
        yield Check("gpu", "ok", f"{shown}; torch for CUDA {cuda}")
    elif seen is None:
        yield Check("gpu", "warn", f"{shown}; torch did not answer within {PROGRAM_S:.0f} s")
    else:
        yield Check("gpu", "warn", f"{shown}; torch (CUDA {cuda}) does not see it", "install torch for CUDA")


def _vllm() -> Iterator[Check]:
    check = _library("vllm", "trl", "vllm")
    if check.found == "not installed":
        yield Check("vllm", "warn", "not installed: policies are sampled by transformers", check.advice)
        return
    if (
        check.status == "ok"
        and _program([sys.executable, "-c", "import vllm; print(vllm.__version__)"]) is None
    ):
        yield Check(
            "vllm",
            "warn",
            f"{check.found}; it can't be imported within {PROGRAM_S:.0f} s",
            'see what `python -c "import vllm"` says',
        )
        return
    yield check


def _program(command: list[str]) -> str | None:
    """What a program prints; None where it is missing, fails, or takes over `PROGRAM_S`."""
    try:
        done = subprocess.run(
            command,
            check=False,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            errors="replace",
            timeout=PROGRAM_S,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None
