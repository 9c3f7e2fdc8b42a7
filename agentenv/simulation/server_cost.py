"""What a turn costs the process that asks a vLLM server for it: the production's client, in real time.

The server is another process that answers at once with what vLLM's ``/v1/completions`` answers: ids, log-probs and the
texts that go with them. All is real but the sampling: a prompt is written as JSON and sent, an answer is read.

Invariant: CPU time is that of the client's event loop; the server's is not in it.
"""

from __future__ import annotations

import asyncio
import json
import math
import multiprocessing
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection

from agentenv.errors import ModelError
from agentenv.inference.protocol import SamplingParams

FIRST_PROMPT, REPLY, OBSERVATION = 1_000, 360, 300
"""Tokens of the first prompt, and of a turn."""
_VOCABULARY = 150_000
_STARTS_WITHIN_S = 60.0


@dataclass(frozen=True)
class ServerCost:
    """CPU seconds of the client's loop."""

    turn_s: float
    """A turn of an episode, mean over its turns."""
    look_s: float
    """Asking a server whether it lives, which an engine does every second."""
    wall_s: float


def measure(*, episodes: int, turns: int, at_once: int = 64, seed: int = 0) -> ServerCost:
    """Play turns of episodes whose prompts grow, ``at_once`` of them side by side.

    Raises:
        MissingExtraError: aiohttp is not installed.
        ModelError: the server did not start.
    """
    began = time.perf_counter()
    with _server() as port:
        turn_s, look_s = asyncio.run(_measure(port, episodes, turns, at_once, random.Random(seed)))
    return ServerCost(turn_s, look_s, time.perf_counter() - began)


async def _measure(
    port: int, episodes: int, turns: int, at_once: int, rng: random.Random
) -> tuple[float, float]:
    # Here, since it loads what engines need, which would be in the memory of every run.
    from agentenv.inference.vllm.json_http import JsonHttp
    from agentenv.inference.vllm.server import ServerBackend

    backend = ServerBackend(JsonHttp(f"http://127.0.0.1:{port}"), model="m", max_length=1 << 20)
    ids = [rng.randrange(_VOCABULARY) for _ in range(FIRST_PROMPT + turns * (REPLY + OBSERVATION))]
    prompts = [ids[: FIRST_PROMPT + turn * (REPLY + OBSERVATION)] for turn in range(turns)]
    sampling = SamplingParams(max_tokens=4096)
    left = iter(range(episodes))

    async def ask() -> None:
        for episode in left:
            for turn, prompt in enumerate(prompts):
                await backend.complete(f"{episode}/{turn}", prompt, sampling, episode)

    async def look() -> None:
        for _ in left:
            await backend.is_alive()

    try:
        await backend.complete("first", prompts[0], sampling, 0)
        before = time.thread_time()
        await asyncio.gather(*(ask() for _ in range(at_once)))
        turn_s = (time.thread_time() - before) / (episodes * turns)
        left = iter(range(episodes))
        before = time.thread_time()
        await asyncio.gather(*(look() for _ in range(at_once)))
        return turn_s, (time.thread_time() - before) / episodes
    finally:
        await backend.close()


def _answer() -> bytes:
    """A completion as vLLM gives it with ``logprobs`` 0 and ``return_token_ids``."""
    rng = random.Random(0)
    ids = [rng.randrange(_VOCABULARY) for _ in range(REPLY)]
    logprobs = [math.log(1.0 - rng.random()) for _ in ids]
    names = [f"token_id:{token}" for token in ids]
    choice = {
        "index": 0,
        "text": "word " * REPLY,
        "logprobs": {
            "text_offset": [5 * place for place in range(REPLY)],
            "token_logprobs": logprobs,
            "tokens": names,
            "top_logprobs": [{name: value} for name, value in zip(names, logprobs, strict=True)],
        },
        "finish_reason": "stop",
        "stop_reason": None,
        "token_ids": ids,
        "prompt_logprobs": None,
        "prompt_token_ids": None,
    }
    return json.dumps(
        {"id": "cmpl-0", "object": "text_completion", "model": "m", "choices": [choice]}
    ).encode()


@contextmanager
def _server() -> Iterator[int]:
    """A server; yields its port."""
    context = multiprocessing.get_context("spawn")
    ours, its = context.Pipe()
    process = context.Process(target=_serve, args=(its,), daemon=True)
    process.start()
    try:
        if not ours.poll(_STARTS_WITHIN_S):
            raise ModelError(f"the server to measure with did not start within {_STARTS_WITHIN_S:g} s")
        yield ours.recv()
    finally:
        ours.close()
        process.terminate()
        process.join()


def _serve(pipe: Connection) -> None:
    asyncio.run(_answer_all(pipe))


async def _answer_all(pipe: Connection) -> None:
    completion = _answer()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).lower()
                length = next(
                    (line for line in head.split(b"\r\n") if line.startswith(b"content-length:")), b":0"
                )
                await reader.readexactly(int(length.partition(b":")[2]))
                body = completion if head.startswith(b"post") else b""
                writer.write(
                    b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
                    % len(body)
                )
                writer.write(body)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    pipe.send(server.sockets[0].getsockname()[1])
    async with server:
        await server.serve_forever()
