r"""MathPython-v0: a problem, several turns with Python in a sandbox, and a final answer.

Invariants:
- the seed of `reset` chooses the problem; reward is 1 for the right final answer in `\boxed{}`, else 0;
- every program runs in a sandbox of this episode: in a new interpreter, which keeps no variable of the one before, or
  with `keep_state` in one that keeps them; files in its folder are kept until the episode ends;
- the sandbox knows neither problem nor answer; it is taken for the first program and given back at the end;
- a sandbox that broke is a SandboxError (infrastructure), never a reward and never an observation;
- the programs of a turn share `tool_timeout_s` and `output_chars`.
"""

import time
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from agentenv.errors import UsageError
from agentenv_envs.swe.protocols import Malformed
from agentenv_envs.swe.sandbox import Sandbox, SandboxBackend, SandboxSpec, open_backend
from agentenv_envs.swe.sandbox.base import BASE_IMAGE

from .arguments import check_number, check_text, check_whole
from .env import MathTaskEnv
from .interpreter import FreshInterpreter, Interpreter, LastingInterpreter
from .speech import Answer, Speech, open_speech

__all__ = ["MathPythonEnv"]

_WORKDIR = "/work"
LAST_TURN = r"[one turn is left: write the final answer in \boxed{}]"


class MathPythonEnv(MathTaskEnv):
    """Problems with a Python tool; see `MathTaskEnv` for the arguments that say which problems.

    Args:
        protocol: "block" (```python blocks) or "tools" (function calls in JSON).
        keep_state: whether variables are kept from one program of an episode to the next.
        sandbox: "docker", "local-unisolated" or "auto" (Docker where an engine answers).
        sandbox_url: take the sandboxes from a service (docs/sandbox-service.md).
        image: image of the sandbox, with python3; by default the one that is built, with the standard library only.
        max_turns: turns after which the episode is truncated, the one with the final answer included.
        tool_timeout_s: seconds that the programs of one turn may take.
        output_chars: bytes of what they print that come back, half from the head and half from the tail.
        memory_mb: MiB of the sandbox.

    Raises:
        UsageError: a bad argument, protocol or data set, or no engine where Docker was asked for.
        MissingExtraError: a data set without what reads it or grades its answers.
    """

    policies: ClassVar[Mapping[str, str]] = {
        "oracle": "agentenv_envs.math_reasoning.policies:Oracle",
        "random": "agentenv_envs.math_reasoning.policies:RandomPython",
        "scripted": "agentenv_envs.math_reasoning.policies:Scripted",
    }

    def __init__(
        self,
        *,
        split: str | None = None,
        levels: Sequence[int] = (0, 1, 2),
        families: Sequence[str] | None = None,
        dataset: str | None = None,
        dataset_config: str | None = None,
        fields: Mapping[str, str] | None = None,
        heldout_share: float = 0.0,
        instruction: str | None = None,
        protocol: str = "block",
        keep_state: bool = False,
        sandbox: str = "auto",
        sandbox_url: str | None = None,
        image: str = BASE_IMAGE,
        max_turns: int = 8,
        tool_timeout_s: float = 10.0,
        output_chars: int = 2_000,
        memory_mb: int = 512,
    ) -> None:
        check_whole("max_turns", max_turns, 1, 10_000)
        check_number("tool_timeout_s", tool_timeout_s, 0.0, 86_400.0)
        check_whole("output_chars", output_chars, 1, 10_000_000)
        check_whole("memory_mb", memory_mb, 16, 1 << 20)
        check_text("image", image)
        if not isinstance(keep_state, bool):
            raise UsageError(f"keep_state is {keep_state!r}; it has to be true or false")
        self.speech: Speech = open_speech(protocol, keep_state=keep_state)
        self.keep_state = keep_state
        super().__init__(
            split=split,
            levels=levels,
            families=families,
            dataset=dataset,
            dataset_config=dataset_config,
            fields=fields,
            heldout_share=heldout_share,
            instruction=self.speech.instruction if instruction is None else instruction,
        )
        self.max_turns: int = max_turns
        self.tool_timeout_s = tool_timeout_s
        self.output_chars = output_chars
        self._spec = SandboxSpec(
            image=image,
            workdir=_WORKDIR,
            read_only=True,
            memory_mb=memory_mb,
            environment={"PYTHONDONTWRITEBYTECODE": "1"},
        )
        self._sandbox: Sandbox | None = None
        self._interpreter: Interpreter | None = None
        self._calls = self._failed_calls = 0
        self._backend: SandboxBackend | None = open_backend(sandbox, url=sandbox_url)
        if image != BASE_IMAGE and self._backend.kind == "local-unisolated":
            self.close()
            raise UsageError(f"image={image!r}: sandboxes of kind 'local-unisolated' have no images")

    @property
    def tools(self) -> Sequence[dict[str, Any]]:
        """JSON schemas for chat templates that take `tools`; empty with protocol "block"."""
        return self.speech.tools

    @property
    def sandbox_kind(self) -> str:
        """ "docker" or "local-unisolated".

        Raises:
            RuntimeError: the environment is closed.
        """
        return self._open_backend.kind

    @property
    def _open_backend(self) -> SandboxBackend:
        if self._backend is None:
            raise RuntimeError("the environment is closed")
        return self._backend

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        observation, info = super().reset(seed=seed, options=options)
        self._calls = self._failed_calls = 0
        return observation, {**info, "sandbox": self.sandbox_kind}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Run a turn's programs, or grade the final answer.

        Raises:
            RuntimeError: called before `reset` or after the end.
            SandboxError: the sandbox failed.
            RewardError: the answer could not be graded.
        """
        _ = self.task
        self._turn += 1
        asked = self.speech.read(action)
        if isinstance(asked, Answer):
            return self._finish(asked.text)
        malformed = isinstance(asked, Malformed)
        if isinstance(asked, Malformed):
            self._invalid += 1
            observation = self.speech.tell([f"Not understood: {asked.reason}"])
        else:
            try:
                observation = self.speech.tell(self._run(asked.codes))
            except BaseException:
                self._leave()
                raise
        info: dict[str, Any] = {"malformed": malformed}
        left = self.max_turns - self._turn
        if left <= 0:
            self._leave()
            info |= self._outcome(False, {"answered": 0.0, "verifier_stopped": 0.0})
            return observation, 0.0, False, True, info
        if left == 1:
            observation = f"{observation}\n{LAST_TURN}"
        return observation, 0.0, False, False, info

    def _run(self, codes: Sequence[str]) -> list[str]:
        """What each program printed, and how it ended where that was not well."""
        if self._sandbox is None:
            self._sandbox = self._open_backend.acquire(self._spec)
        if self._interpreter is None:
            kind = LastingInterpreter if self.keep_state else FreshInterpreter
            self._interpreter = kind(self._sandbox)
        started = time.monotonic()
        half_bytes = max(self.output_chars // (2 * len(codes)), 1)
        outputs: list[str] = []
        for code in codes:
            spent = time.monotonic() - started if outputs else 0.0
            left_s = round(self.tool_timeout_s - spent, 3)
            if left_s <= 0:
                outputs.append("[not run: the time is over]")
                continue
            output, well = self._interpreter.run(code, timeout_s=left_s, half_bytes=half_bytes)
            self._calls += 1
            self._failed_calls += not well
            outputs.append(output)
        return outputs

    def _outcome(self, success: bool, metrics: Mapping[str, float]) -> dict[str, Any]:
        own = {"tool_calls": float(self._calls), "failed_tool_calls": float(self._failed_calls)}
        return super()._outcome(success, {**metrics, **own})

    def _leave(self) -> None:
        super()._leave()
        sandbox, self._sandbox, self._interpreter = self._sandbox, None, None
        if sandbox is not None and self._backend is not None:
            self._backend.release(sandbox)

    def close(self) -> None:
        super().close()
        backend, self._backend = self._backend, None
        if backend is not None:
            backend.close()
