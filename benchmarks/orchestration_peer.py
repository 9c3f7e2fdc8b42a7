"""The peer of `orchestration.py`: the rollout loop of `verifiers` with a client and an environment that do nothing.

    python -m venv peer && peer/bin/pip install "verifiers==0.2.1"
    python benchmarks/orchestration.py --peer_python peer/bin/python

Runs under the peer's Python, where agentenv is not installed, and prints one line of JSON. What is measured is
`MultiTurnEnv.rollout` alone, without scoring and without the output that trainers get of it. The client gives an
answer made beforehand, without token ids, so the loop handles no tokens: all of it is in the peer's favour. Releases
from 0.4 on run every rollout as a program of its own that calls the model over HTTP; there is no loop to compare.
"""

import argparse
import asyncio
import gc
import json
import logging
import sys
import time
from typing import Any

import verifiers as vf
from datasets import Dataset
from verifiers.clients import Client
from verifiers.types import Response, ResponseMessage, UserMessage


class NullClient(Client):  # type: ignore[misc]
    """Awaits once and gives the same response."""

    def __init__(self, text: str) -> None:
        super().__init__(None)
        message = ResponseMessage(content=text, finish_reason="stop", is_truncated=False)
        self._response = Response(id="null", created=0, model="null", usage=None, message=message)

    def setup_client(self, config: Any) -> None:
        """There is no service behind it."""

    async def to_native_tool(self, tool: Any) -> Any:
        """Tools as they are."""
        return tool

    async def to_native_prompt(self, messages: Any) -> tuple[Any, dict[str, Any]]:
        """Messages as they are."""
        return messages, {}

    async def get_native_response(self, prompt: Any, *_: Any, **__: Any) -> Any:
        """The one response."""
        await asyncio.sleep(0)
        return self._response

    async def raise_from_native_response(self, response: Any) -> None:
        """Nothing is ever wrong."""

    async def from_native_response(self, response: Any) -> Any:
        """Responses as they are."""
        return response

    async def close(self) -> None:
        """Nothing to close."""


class NullEnv(vf.MultiTurnEnv):  # type: ignore[misc]
    """Awaits once per step; an episode has `info["turns"]` of them."""

    def __init__(self, observation: str, **options: Any) -> None:
        super().__init__(**options)
        self._observation = [UserMessage(content=observation)]
        self.steps = 0

    async def env_response(self, messages: Any, state: Any, **_: Any) -> Any:
        """One environment step."""
        await asyncio.sleep(0)
        self.steps += 1
        if len(state["trajectory"]) >= state["info"]["turns"]:
            state["final_env_response"] = self._observation
        return self._observation


async def measure(env: NullEnv, client: NullClient, turns: list[int]) -> dict[str, float]:
    """One episode per entry of `turns`, all at once."""
    prompt = [{"role": "user", "content": "Begin."}]
    inputs = [
        {"prompt": prompt, "example_id": number, "info": {"turns": count}}
        for number, count in enumerate(turns)
    ]
    env.steps = 0
    gc.collect()
    wall, cpu = time.perf_counter(), time.process_time()
    states = await asyncio.gather(*(env.rollout(item, client, "null") for item in inputs))
    figures = {"cpu_s": time.process_time() - cpu, "wall_s": time.perf_counter() - wall, "steps": env.steps}
    failed = [state["error"] for state in states if state["error"] is not None]
    if failed or env.steps != sum(turns):
        raise RuntimeError(f"{env.steps} of {sum(turns)} steps were played, first error: {failed[:1]}")
    return figures


def main() -> int:
    """Measure once, print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=json.loads, required=True, help="JSON list, one entry per episode")
    parser.add_argument("--action", required=True)
    parser.add_argument("--observation", required=True)
    args = parser.parse_args()
    logging.disable(logging.WARNING)
    dataset = Dataset.from_list([{"question": "Begin.", "answer": ""}])
    # A deadline for the whole rollout: the loop has none for a single step.
    env = NullEnv(args.observation, dataset=dataset, timeout_seconds=3600.0)
    figures = asyncio.run(measure(env, NullClient(args.action), args.turns))
    print(json.dumps({"peer": f"verifiers {vf.__version__} MultiTurnEnv.rollout", **figures}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
