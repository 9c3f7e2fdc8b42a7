"""Write every episode to a JSON Lines file, to be read by people and by reports.

Invariants:
- One line per episode, written in one piece when the episode ends, or is left by `reset` or `close`; a crash
  loses at most the running episode.
- The file is appended to and held open only while a line is written.
"""

import json
from pathlib import Path
from typing import Any

import gymnasium
from gymnasium.utils import RecordConstructorArgs

from agentenv.errors import UsageError
from agentenv.wrappers.base import TextWrapper

__all__ = ["Record"]


class Record(TextWrapper, RecordConstructorArgs):
    """Append each episode as one JSON object to `path`.

    The object: {"episode": running number from 0, "seed", "observation", "info", "steps": [{"action",
    "observation", "reward", "terminated", "truncated", "info"}], "total_reward", "complete": whether it came
    to its end}. What JSON cannot hold is written as its `str`.

    Args:
        env: the environment to wrap.
        path: the file; missing parent folders are made.

    Raises:
        UsageError: `path` is a folder.
    """

    def __init__(self, env: gymnasium.Env[str, str], path: str | Path) -> None:
        RecordConstructorArgs.__init__(self, path=str(path))
        super().__init__(env)
        self._path = Path(path)
        if self._path.is_dir():
            raise UsageError(f"path must be a file to write episodes to, and {str(path)!r} is a folder")
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._count = 0
        self._episode: dict[str, Any] | None = None

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        """Begin an episode; one that was left unfinished is written first."""
        self._write(complete=False)
        observation, info = self.env.reset(seed=seed, options=options)
        self._episode = {"seed": seed, "observation": observation, "info": _frozen(info), "steps": []}
        return observation, info

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Take a turn; the last one writes the episode."""
        observation, reward, terminated, truncated, info = self.env.step(action)
        if self._episode is not None:
            self._episode["steps"].append(
                {
                    "action": action,
                    "observation": observation,
                    "reward": float(reward),
                    "terminated": bool(terminated),
                    "truncated": bool(truncated),
                    "info": _frozen(info),
                }
            )
            if terminated or truncated:
                self._write(complete=True)
        return observation, float(reward), terminated, truncated, info

    def close(self) -> None:
        """Write an unfinished episode and close the environment."""
        self._write(complete=False)
        super().close()

    def _write(self, *, complete: bool) -> None:
        if self._episode is None:
            return
        episode, self._episode = self._episode, None
        line = {
            "episode": self._count,
            **episode,
            "total_reward": sum(step["reward"] for step in episode["steps"]),
            "complete": complete,
        }
        self._count += 1
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line, ensure_ascii=True, default=str) + "\n")


def _frozen(info: dict[str, Any]) -> Any:
    """`info` as it is now; environments may go on changing the object they returned."""
    return json.loads(json.dumps(info, default=str))
