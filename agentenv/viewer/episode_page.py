"""One episode as the page shows it: facts, conversation, the diff it made, and its tokens.

Invariants:
- Every text is to be shown as text, with nothing hidden in it (`revealed`), and has a bound.
- What the file holds in another form than expected is shown as it is, or left out; it never raises.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from agentenv.errors import UsageError
from agentenv.report.token_records import SegmentTokens, read_tokens
from agentenv.report.transcripts import cut, revealed
from agentenv.viewer.episode_index import EpisodeRow
from agentenv.viewer.episode_query import row_to_json

__all__ = ["episode_to_json", "tokens_to_json"]

MAX_CHARS: Final = 200_000
"""Of a message, a diff or the info."""
MAX_MESSAGES: Final = 2_000
QUANTITIES: Final = ("rollout_logprobs", "policy_logprobs", "ratios", "values", "advantages")


def episode_to_json(row: EpisodeRow, line: Mapping[str, Any], others: Sequence[EpisodeRow]) -> dict[str, Any]:
    """An episode for JSON.

    Args:
        row: of the index.
        line: the whole line of trajectories.jsonl.
        others: more episodes of its task.
    """
    info, messages = line.get("info"), line.get("messages")
    if not isinstance(info, dict):
        info = {}
    if not isinstance(messages, list):
        messages = []
    rest = {name: value for name, value in info.items() if name not in ("patch", "rewards")}
    patch = info.get("patch")
    rewards = info.get("rewards")
    return {
        "row": row_to_json(row),
        "messages": _messages(messages, rewards if isinstance(rewards, list) else []),
        "messages_left_out": max(0, len(messages) - MAX_MESSAGES),
        "patch": _shown(patch) if isinstance(patch, str) else None,
        "info": _shown(_json(rest)),
        "others": [row_to_json(other) for other in others],
    }


def _messages(messages: Sequence[Any], rewards: Sequence[Any]) -> list[dict[str, Any]]:
    shown: list[dict[str, Any]] = []
    turn = 0
    for message in messages[:MAX_MESSAGES]:
        fields = message if isinstance(message, dict) else {"content": message}
        role, content = fields.get("role"), fields.get("content", "")
        item: dict[str, Any] = {
            "role": revealed(role[:100]) if isinstance(role, str) else "",
            "action": role == "assistant",
            "text": _shown(content if isinstance(content, str) else _json(content)),
        }
        if role == "assistant":
            turn += 1
            item["turn"] = turn
            item["reward"] = _number(rewards[turn - 1]) if turn <= len(rewards) else None
        shown.append(item)
    return shown


def tokens_to_json(run: Path, row: EpisodeRow) -> dict[str, Any]:
    """What was recorded of an episode's tokens, for JSON; "missing" says why there is nothing."""
    try:
        tokens = read_tokens(run, row.episode_id)
    except (UsageError, OSError, LookupError, TypeError, ValueError, struct.error, zlib.error) as error:
        return {
            "missing": revealed(f"The record of its tokens can't be read: {cut(str(error), max_chars=500)}")
        }
    if tokens is None or (tokens.phase, tokens.step) != (row.phase, row.step):
        return {"missing": "No record of its tokens was kept."}
    return {"segments": [_segment(segment) for segment in tokens.segments]}


def _segment(segment: SegmentTokens) -> dict[str, Any]:
    numbers = {
        name: [None if value is None else round(value, 5) for value in getattr(segment, name)]
        for name in QUANTITIES
    }
    return {
        "texts": [revealed(text) for text in segment.texts],
        "token_ids": list(segment.token_ids),
        "action_mask": list(segment.action_mask),
        "policy_versions": list(segment.policy_versions),
        "kept": list(segment.kept),
        **numbers,
    }


def _shown(text: str) -> str:
    return revealed(cut(text, max_chars=MAX_CHARS))


def _json(value: Any) -> str:
    try:
        return json.dumps(value, indent=2, ensure_ascii=False)
    except RecursionError:
        return "nested too deeply to be shown"


def _number(value: Any) -> float | None:
    # A bool is no number here.
    return value if type(value) in (int, float) and -1e300 < value < 1e300 else None
