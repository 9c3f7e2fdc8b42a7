"""An endpoint that really listens, over a scripted model; and a tokenizer with a template that takes tools."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from types import ModuleType
from typing import Any

import pytest

from agentenv.agents.endpoint import AgentEndpoint, EpisodeSettings, OpenEpisode
from agentenv.inference import LLMProxy, SamplingParams
from agentenv.listening import listen
from agentenv.testing import ByteTokenizer, ScriptedModel

pytest.importorskip("fastapi")
httpx = pytest.importorskip("httpx")

from agentenv.agents.desk import EpisodeDesk  # noqa: E402
from agentenv.agents.server import AgentServer  # noqa: E402

TOKEN = "a-token-of-the-desk"
USER = {"role": "user", "content": "hi"}


class Service:
    """A served endpoint and a client."""

    def __init__(
        self, endpoint: AgentEndpoint, model: ScriptedModel, server: AgentServer, client: Any
    ) -> None:
        self.endpoint, self.model, self.server, self.client = endpoint, model, server, client

    def open(self, **settings: Any) -> OpenEpisode:
        return self.endpoint.open(EpisodeSettings(**{"sampling": SamplingParams(max_tokens=64), **settings}))

    async def ask(self, episode: OpenEpisode, messages: Any = None, **fields: Any) -> Any:
        """The answer to a chat request, as httpx has it."""
        body = {"model": "policy", "messages": messages or [USER], **fields}
        return await self.post(episode, json.dumps(body))

    async def post(self, episode: OpenEpisode, content: Any, path: str = "") -> Any:
        return await self.client.post(
            path or f"/episodes/{episode.id}/v1/chat/completions",
            content=content,
            headers={"authorization": f"Bearer {episode.api_key}"},
        )


@contextlib.asynccontextmanager
async def serving(
    responses: Any, *, tokenizer: Any = None, output: Any = None, **model_options: Any
) -> AsyncIterator[Service]:
    """An endpoint at a free port of this machine."""
    tokenizer = tokenizer or ByteTokenizer()
    model = ScriptedModel(responses, tokenizer=tokenizer, **model_options)
    proxy = LLMProxy([model])
    endpoint = AgentEndpoint(proxy, tokenizer)
    desk = EpisodeDesk(endpoint, proxy, TOKEN, EpisodeSettings(max_turns=5), output=output)
    server = AgentServer(endpoint, listen("127.0.0.1", 0), desk)
    await server.start()
    try:
        async with httpx.AsyncClient(base_url=server.url, timeout=30.0, trust_env=False) as client:
            yield Service(endpoint, model, server, client)
    finally:
        await server.stop()
        await proxy.close()


@pytest.fixture
def until() -> Callable[[Callable[[], bool]], Awaitable[None]]:
    """Waits for a condition."""

    async def wait(condition: Callable[[], bool]) -> None:
        while not condition():  # noqa: ASYNC110 - what changes it tells nobody
            await asyncio.sleep(0.01)

    return wait


@pytest.fixture
def serve() -> Callable[..., Any]:
    """See :func:`serving`."""
    return serving


@pytest.fixture
def run() -> Callable[[Awaitable[Any]], Any]:
    """Runs a coroutine within a deadline."""

    def run_within(coroutine: Any) -> Any:
        return asyncio.run(asyncio.wait_for(coroutine, 60.0))

    return run_within


@pytest.fixture(scope="session")
def qwen_tokenizer(load_program: Callable[[str], ModuleType]) -> Any:
    """Bytes as tokens, with the chat template of Qwen3."""
    pytest.importorskip("transformers")
    pytest.importorskip("trl.chat_template_utils")
    return load_program("benchmarks/byte_level.py").qwen3_tokenizer()
