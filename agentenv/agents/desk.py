"""Episodes that are opened and ended over HTTP, by whoever runs agents and knows their reward.

    POST   /episodes           {"id"?, "task_id"?, "seed"?, "max_turns"?}    -> {"id", "base_url", "api_key", "model"}
    GET    /episodes                                                         -> {"episodes": [...]}
    POST   /episodes/ID/end    {"reward", "truncated"?, "info"?}             -> {"trajectory": {...} or null}
    DELETE /episodes/ID                                                      -> {"discarded_tokens": n}

Invariants:

* All of it needs the token of the desk, which is none of an episode: an agent cannot give itself a reward.
* An episode that nothing was asked in for its time to live is discarded.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import logging
import math
import secrets
from pathlib import Path
from typing import Any

from agentenv.agents.chat_request import RefusedRequestError
from agentenv.agents.endpoint import AgentEndpoint, EpisodeSettings, OpenEpisode
from agentenv.agents.episode_record import Outcome
from agentenv.errors import UsageError
from agentenv.inference.proxy import LLMProxy

__all__ = ["EpisodeDesk"]

logger = logging.getLogger(__name__)

_MIN_TOKEN = 16
_MAX_OPEN = 4096


class EpisodeDesk:
    """Opens and ends episodes of an endpoint.

    Args:
        endpoint: of the episodes.
        proxy: whose weights' version new episodes begin with.
        token: of those who may use it.
        settings: of every episode; a request may lower ``max_turns`` and set ``seed``.
        output: trajectories are appended to this file, one a line; None: they are only answered.
        ttl_s: how long an episode may be idle.

    Raises:
        UsageError: the token is too short.
    """

    def __init__(
        self,
        endpoint: AgentEndpoint,
        proxy: LLMProxy,
        token: str,
        settings: EpisodeSettings,
        *,
        output: Path | None = None,
        ttl_s: float = 3600.0,
    ) -> None:
        if len(token) < _MIN_TOKEN or not token.isascii() or not token.isprintable():
            raise UsageError(f"the token: at least {_MIN_TOKEN} printable ASCII characters are needed")
        self._endpoint, self._proxy, self._settings = endpoint, proxy, settings
        self._token = hashlib.sha256(token.encode()).digest()
        self._output, self._ttl_s = output, ttl_s
        self._open: dict[str, _Entry] = {}
        self._closing: set[asyncio.Future[None]] = set()

    def admit(self, token: str) -> None:
        """Check the token.

        Raises:
            RefusedRequestError: it is another one.
        """
        given = hashlib.sha256(token.encode("utf-8", "surrogateescape")).digest()
        if not secrets.compare_digest(given, self._token):
            raise RefusedRequestError(401, "this needs the token of the service", code="invalid_token")

    def open(self, body: Any) -> OpenEpisode:
        """Begin an episode.

        Raises:
            RefusedRequestError: a field is wrong, or too many episodes are open.
            UsageError: the id is in use.
        """
        self._expire()
        if len(self._open) >= _MAX_OPEN:
            raise RefusedRequestError(429, f"{_MAX_OPEN} episodes are open", code="too_many_episodes")
        fields = _fields(body, {"id": str, "task_id": str, "seed": int, "max_turns": int})
        turns, most = fields.get("max_turns"), self._settings.max_turns
        if turns is not None and not 1 <= turns <= (most or turns):
            allowed = f"1 to {most}" if most else "1 or more"
            raise RefusedRequestError(400, f"max_turns={turns}: {allowed} is allowed", param="max_turns")
        settings = dataclasses.replace(self._settings, max_turns=turns or most, seed=fields.get("seed"))
        episode = self._endpoint.open(settings, fields.get("id"))
        now = asyncio.get_running_loop().time()
        self._open[episode.id] = _Entry(
            episode, str(fields.get("task_id", episode.id)), fields.get("seed", 0), self._proxy.version, now
        )
        return episode

    def list(self) -> list[dict[str, Any]]:
        """The open episodes."""
        self._expire()
        return [
            {"id": name, "task_id": entry.task_id, "answers": entry.episode.record.answers}
            for name, entry in self._open.items()
        ]

    async def end(self, episode_id: str, body: Any) -> dict[str, Any]:
        """End an episode with its reward.

        Raises:
            RefusedRequestError: no such episode, a field is wrong, or the episode failed and is no sample.
        """
        entry = self._entry(episode_id)
        fields = _fields(body, {"reward": float, "truncated": bool, "info": dict})
        reward = fields.get("reward")
        if reward is None or not math.isfinite(reward):
            raise RefusedRequestError(400, f"reward={reward!r}: a finite number is needed", param="reward")
        info = fields.get("info", {})
        if "failure" in info:
            raise RefusedRequestError(
                400, "info.failure is reserved: DELETE the episode instead", param="info"
            )
        await self._close(entry)
        if entry.episode.failure is not None:
            raise RefusedRequestError(
                409, f"the episode failed and is discarded: {entry.episode.failure}", code="episode_failed"
            )
        truncated = bool(fields.get("truncated", entry.episode.exhausted is not None))
        reason = (entry.episode.exhausted or "truncated") if truncated else "terminated"
        outcome = Outcome(float(reward), not truncated, truncated, reason, info)
        now = asyncio.get_running_loop().time()
        trajectory = entry.episode.record.trajectory(
            outcome,
            episode_id=episode_id,
            group_id=episode_id,
            task_id=entry.task_id,
            seed=entry.seed,
            start_version=entry.version,
            duration_s=now - entry.opened,
        )
        if trajectory is not None and self._output is not None:
            line = trajectory.to_json() + "\n"
            await asyncio.to_thread(_append, self._output, line)
        return {"trajectory": None if trajectory is None else trajectory.to_dict()}

    async def discard(self, episode_id: str) -> dict[str, Any]:
        """End an episode without a trajectory.

        Raises:
            RefusedRequestError: no such episode.
        """
        entry = self._entry(episode_id)
        await self._close(entry)
        return {"discarded_tokens": entry.episode.record.action_tokens}

    async def _close(self, entry: _Entry) -> None:
        del self._open[entry.episode.id]
        await self._endpoint.close(entry.episode)

    def _entry(self, episode_id: str) -> _Entry:
        if (entry := self._open.get(episode_id)) is None:
            raise RefusedRequestError(404, f"no open episode {episode_id[:128]!r}", code="episode_not_found")
        return entry

    def _expire(self) -> None:
        now = asyncio.get_running_loop().time()
        for entry in list(self._open.values()):
            episode = entry.episode
            if episode.in_flight or episode.requests != entry.seen_requests:
                entry.seen_requests, entry.used = episode.requests, now
            elif now - entry.used > self._ttl_s:
                logger.warning("episode %s was idle for %g s and is discarded", episode.id, self._ttl_s)
                del self._open[episode.id]
                closing = asyncio.ensure_future(self._endpoint.close(episode))
                self._closing.add(closing)
                closing.add_done_callback(self._closing.discard)


@dataclasses.dataclass
class _Entry:
    episode: OpenEpisode
    task_id: str
    seed: int
    version: int
    opened: float
    used: float = 0.0
    seen_requests: int = 0

    def __post_init__(self) -> None:
        self.used = self.opened


def _fields(body: Any, kinds: dict[str, type]) -> dict[str, Any]:
    if not isinstance(body, dict):
        raise RefusedRequestError(400, "the body must be a JSON object")
    for name, value in body.items():
        if name not in kinds:
            raise RefusedRequestError(400, f"{name[:80]}: no such field; {', '.join(kinds)} are allowed")
        allowed = (int, float) if kinds[name] is float else kinds[name]
        if not isinstance(value, allowed) or (isinstance(value, bool) and kinds[name] is not bool):
            raise RefusedRequestError(400, f"{name}: a {kinds[name].__name__} is needed", param=name)
    return dict(body)


def _append(path: Path, line: str) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(line)


def read_token(path: Path) -> str:
    """The one line of a token file.

    Raises:
        UsageError: no such file, or none or several lines.
    """
    try:
        lines = path.read_text(encoding="utf-8").split()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--token-file {path}: {error}") from None
    if len(lines) != 1:
        raise UsageError(f"--token-file {path}: one line with one token is needed")
    return lines[0]
