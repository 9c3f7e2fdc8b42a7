"""Episodes of agent programs over an LLMProxy: who may ask, within which budget, and what was said. Without HTTP.

Invariants:

* A request is served for the episode whose key it carries, and for no other; an episode that is closed has no key.
* A request ends by its episode's deadline; when its client goes away or the episode is closed it is aborted.
* An episode whose turn was aborted from outside, ran out of time or met a dead engine has failed: its ``failure`` says
  why, and it answers nothing any more. That is no sample.
* What goes over a budget is refused and told apart from a failure: ``exhausted`` names the budget.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import itertools
import logging
import re
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field

from agentenv.agents.chat_request import ChatRequest, RefusedRequestError
from agentenv.agents.episode_record import EpisodeRecord, Place
from agentenv.conversation import Tokenizer, end_of_turn_ids
from agentenv.errors import AgentEnvError, EnvError, EpisodeTimeoutError, UsageError
from agentenv.inference.protocol import GenerationRequest, SamplingParams
from agentenv.inference.proxy import LLMProxy
from agentenv.inference.tool_calls import Answer, ToolFormat
from agentenv.trace import Track

__all__ = ["AgentEndpoint", "Completion", "EpisodeSettings", "OpenEpisode"]

logger = logging.getLogger(__name__)

_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_CHARS_PER_TOKEN = 64
"""A history with more characters than this for each token of the context is not even encoded."""
_MAX_CONCURRENT = 16
"""Requests of one episode at a time."""


@dataclass(frozen=True)
class EpisodeSettings:
    """How an episode is sampled, and what it may use."""

    sampling: SamplingParams = field(default_factory=SamplingParams)
    """Of every turn; ``max_tokens`` is the most that a request may ask for."""
    max_turns: int | None = None
    """Answers; None: no limit."""
    max_context: int = 32_768
    """Tokens of a prompt and its answer together."""
    generate_timeout_s: float = 600.0
    """One answer."""
    deadline: float | None = None
    """Of the event loop's clock, for all answers; None: no deadline."""
    seed: int | None = None
    """Of the sampling; None: the engine's own."""
    affinity: str = ""
    """See :class:`~agentenv.inference.protocol.GenerationRequest`."""


@dataclass(frozen=True)
class Completion:
    """An answer of the policy."""

    answer: Answer
    finish_reason: str
    """stop, length or tool_calls."""
    prompt_tokens: int
    completion_tokens: int


class OpenEpisode:
    """An episode that is open; made by :meth:`AgentEndpoint.open`."""

    def __init__(
        self, episode_id: str, api_key: str, settings: EpisodeSettings, record: EpisodeRecord
    ) -> None:
        self.id, self.api_key, self.settings, self.record = episode_id, api_key, settings, record
        self.failure: AgentEnvError | None = None
        """Why it is no sample; None: it is one."""
        self.exhausted: str | None = None
        """The budget that the latest request went over: max_turns, max_tokens; None: none."""
        self.is_closed = False
        self.requests = 0
        self.aborted_tokens = 0
        """Sampled for turns that were aborted."""
        self.on_failure: Callable[[], None] | None = None
        """Called once when it fails."""
        self.in_flight: dict[str, asyncio.Task[Completion]] = {}
        self.engine_ids: set[str] = set()
        self.track: Track | None = None
        """Where a trace has its turns, as one span where several are sampled at once; None: nowhere."""
        self.sampling = 0
        """Turns being sampled."""
        self.sampling_since = 0.0

    def fail(self, error: AgentEnvError) -> None:
        """It is no sample."""
        if self.failure is None:
            self.failure = error
            if self.on_failure is not None:
                self.on_failure()


class AgentEndpoint:
    """Open episodes and their requests. All methods are called in the event loop of the engines.

    Args:
        proxy: the engines; the caller closes them.
        tokenizer: with a chat template.
        model: name that requests may give, and that is listed.

    Raises:
        UsageError: the tokenizer has no chat template.
    """

    def __init__(self, proxy: LLMProxy, tokenizer: Tokenizer, *, model: str = "policy") -> None:
        self.model = model
        self._proxy = proxy
        self._tokenizer = tokenizer
        self._stop_ids = end_of_turn_ids(tokenizer)
        self._tools = ToolFormat(tokenizer)
        self._by_key: dict[str, OpenEpisode] = {}
        self._by_id: dict[str, OpenEpisode] = {}
        self._numbers = itertools.count()

    @property
    def num_open(self) -> int:
        """Open episodes."""
        return len(self._by_id)

    def open(self, settings: EpisodeSettings, episode_id: str | None = None) -> OpenEpisode:
        """Begin an episode.

        Raises:
            UsageError: the id is in use, or no id.
        """
        name = f"episode-{next(self._numbers)}" if episode_id is None else episode_id
        if not _ID.fullmatch(name):
            raise UsageError(
                f"episode id {name[:200]!r}: letters, digits, '.', '_' and '-' are allowed, 128 at most"
            )
        if name in self._by_id:
            raise UsageError(f"episode id {name!r} is in use")
        limit = self._proxy.max_length
        if limit is not None and limit < settings.max_context:
            settings = dataclasses.replace(settings, max_context=limit)
        stops = tuple(dict.fromkeys((*settings.sampling.stop_token_ids, *self._stop_ids)))
        settings = dataclasses.replace(
            settings, sampling=dataclasses.replace(settings.sampling, stop_token_ids=stops)
        )
        episode = OpenEpisode(
            name, f"sk-{secrets.token_hex(24)}", settings, EpisodeRecord(self._tokenizer, stops)
        )
        self._by_id[name] = self._by_key[_hashed(episode.api_key)] = episode
        return episode

    def episode(self, api_key: str, episode_id: str | None = None) -> OpenEpisode:
        """The open episode of a key.

        Args:
            api_key: as the request has it.
            episode_id: that the request's path names; None: it names none.

        Raises:
            RefusedRequestError: there is none.
        """
        found = self._by_key.get(_hashed(api_key))
        if found is None:
            raise RefusedRequestError(401, "no open episode has this API key", code="invalid_api_key")
        if episode_id is not None and found.id != episode_id:
            raise RefusedRequestError(
                404, "the API key is not that of this episode", code="episode_not_found"
            )
        return found

    def find(self, episode_id: str) -> OpenEpisode:
        """The open episode of an id, for who runs episodes.

        Raises:
            RefusedRequestError: there is none.
        """
        if (found := self._by_id.get(episode_id)) is None:
            raise RefusedRequestError(404, f"no open episode {episode_id[:128]!r}", code="episode_not_found")
        return found

    async def complete(self, episode: OpenEpisode, request: ChatRequest) -> Completion:
        """Answer a request.

        Raises:
            RefusedRequestError: it cannot be answered.
            asyncio.CancelledError: as cancelled; the turn is aborted and leaves nothing.
        """
        task = self.begin(episode, request)
        try:
            return await task
        except asyncio.CancelledError:
            task.cancel()
            if episode.is_closed and not _is_cancelled():
                raise _over(episode) from None
            raise

    def begin(self, episode: OpenEpisode, request: ChatRequest) -> asyncio.Task[Completion]:
        """As :meth:`complete`, in a task; what is wrong with the request itself is raised here."""
        self._check(episode, request)
        sampling, place = self._prepare(episode, request)
        number, episode.requests = episode.requests, episode.requests + 1
        request_id = f"{episode.id}/{number}"
        task = asyncio.create_task(
            self._complete(episode, request, place, sampling, request_id, number), name=request_id
        )
        episode.in_flight[request_id] = task

        def ended(done: asyncio.Task[Completion]) -> None:
            episode.in_flight.pop(request_id, None)
            episode.record.give_up(place)  # where it was cancelled before it began
            if not done.cancelled():
                done.exception()  # whoever waited has gone

        task.add_done_callback(ended)
        return task

    async def abort_turns(self, episode: OpenEpisode) -> bool:
        """Have the turns that are being sampled return their partial tokens; the episode fails.

        Returns:
            whether there was one.
        """
        names = list(episode.in_flight)
        await asyncio.gather(*(self._proxy.abort(name) for name in names))
        return bool(names)

    async def close(self, episode: OpenEpisode) -> None:
        """End an episode: its key is worth nothing any more, and its turns are aborted. Idempotent."""
        if episode.is_closed:
            return
        episode.is_closed = True
        self._by_id.pop(episode.id, None)
        self._by_key.pop(_hashed(episode.api_key), None)
        tasks = list(episode.in_flight.values())
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=10.0)
        for name in episode.engine_ids:
            await self._proxy.release(name)

    def _check(self, episode: OpenEpisode, request: ChatRequest) -> None:
        settings = episode.settings
        if episode.is_closed or episode.failure is not None:
            raise _over(episode)
        if (
            settings.max_turns is not None
            and episode.record.answers + len(episode.in_flight) >= settings.max_turns
        ):
            episode.exhausted = "max_turns"
            raise RefusedRequestError(
                403, f"the episode's {settings.max_turns} answers are used up", code="max_turns"
            )
        if len(episode.in_flight) >= _MAX_CONCURRENT:
            raise RefusedRequestError(
                429, f"the episode has {_MAX_CONCURRENT} requests in flight", code="too_many_requests"
            )
        if sum(message.length for message in request.messages) > settings.max_context * _CHARS_PER_TOKEN:
            raise self._too_long(episode, "many more")

    def _prepare(self, episode: OpenEpisode, request: ChatRequest) -> tuple[SamplingParams, Place]:
        """What to sample with, and where the turn belongs."""
        settings = episode.settings
        try:
            if request.tools:
                self._tools.check()
            stops = self._stop_token_ids(request)
            place = episode.record.place(request)
        except UsageError as error:
            raise RefusedRequestError(400, str(error), code="invalid_value") from error
        room = settings.max_context - len(place.prompt_ids)
        if room < 1:
            episode.record.give_up(place)
            raise self._too_long(episode, str(len(place.prompt_ids)))
        wanted = min(settings.sampling.max_tokens, request.max_tokens or settings.sampling.max_tokens, room)
        sampling = dataclasses.replace(
            settings.sampling,
            max_tokens=wanted,
            stop_token_ids=tuple(dict.fromkeys((*settings.sampling.stop_token_ids, *stops))),
        )
        return sampling, place

    def _too_long(self, episode: OpenEpisode, number: str) -> RefusedRequestError:
        episode.exhausted = "max_tokens"
        return RefusedRequestError(
            400,
            f"This model's maximum context length is {episode.settings.max_context} tokens. However, your messages "
            f"resulted in {number} tokens.",
            code="context_length_exceeded",
            param="messages",
        )

    def _stop_token_ids(self, request: ChatRequest) -> list[int]:
        """Engines stop at tokens: a text that is one can be stopped at."""
        ids = []
        for text in request.stop:
            encoded = list(self._tokenizer.encode(text, add_special_tokens=False))
            if len(encoded) != 1:
                raise UsageError(
                    f"stop={text[:100]!r}: takes {len(encoded)} tokens of this model, and only a text of one token can "
                    "be stopped at"
                )
            ids.append(int(encoded[0]))
        return ids

    async def _complete(
        self,
        episode: OpenEpisode,
        request: ChatRequest,
        place: Place,
        sampling: SamplingParams,
        request_id: str,
        number: int,
    ) -> Completion:
        settings, loop = episode.settings, asyncio.get_running_loop()
        engine_id = f"{episode.id}/agent-{place.agent}"
        episode.engine_ids.add(engine_id)
        deadline = loop.time() + settings.generate_timeout_s
        if settings.deadline is not None:
            deadline = min(deadline, settings.deadline)
        if not episode.sampling:
            episode.sampling_since = loop.time()
        episode.sampling += 1
        try:
            generation = await self._proxy.generate(
                GenerationRequest(
                    request_id=request_id,
                    prompt_ids=place.prompt_ids,
                    sampling=sampling,
                    episode_id=engine_id,
                    affinity=settings.affinity,
                    deadline=deadline,
                    seed=None if settings.seed is None else _mix(settings.seed, number),
                )
            )
        except UsageError as error:
            raise RefusedRequestError(400, str(error), code="invalid_value") from error
        except EpisodeTimeoutError as error:
            if settings.deadline is not None and loop.time() >= settings.deadline:
                # Who runs the episode sees that its time is over; that is no failure of the engine.
                raise RefusedRequestError(
                    403, "the episode's time is over", code="episode_timeout"
                ) from error
            episode.fail(error)
            raise RefusedRequestError(504, str(error), code="timeout") from error
        except AgentEnvError as error:
            episode.fail(error)
            raise RefusedRequestError(503, "the inference engine failed", code="engine_failed") from error
        finally:
            episode.sampling -= 1
            if not episode.sampling and episode.track is not None:
                self._proxy.trace.span(episode.track, "generate", episode.sampling_since, loop.time())
        if generation.finish_reason == "abort":
            episode.aborted_tokens += len(generation.token_ids)
            episode.fail(EnvError(f"request {request_id!r} was aborted from outside"))
            raise _over(episode)
        answer = episode.record.record(place, generation, self._tools.read if request.tools else None)
        episode.exhausted = None
        reason = (
            "tool_calls"
            if answer.tool_calls and generation.finish_reason == "stop"
            else generation.finish_reason
        )
        return Completion(answer, reason, len(place.prompt_ids), len(generation.token_ids))


def _over(episode: OpenEpisode) -> RefusedRequestError:
    return RefusedRequestError(403, f"episode {episode.id!r} is over", code="episode_over")


def _hashed(key: str) -> str:
    """Found by a hash: how long the search takes tells nothing about keys."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()


def _mix(seed: int, number: int) -> int:
    digest = hashlib.blake2b(f"{seed}/{number}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def _is_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
