"""Episodes as HTML: the same task before and after training, side by side.

Invariants:
- All that a model or an environment wrote is escaped; control and direction-changing characters, which could
  hide or reorder text, are shown as their code points.
- The choice of episodes is made by rule, failures included, so that the page shows no picked best case.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

Episode = Mapping[str, Any]
"""A line of trajectories.jsonl."""

MAX_CHARS = 6000
"""Longest message that is shown whole; of a longer one head and tail are."""
MAX_MESSAGES = 80
"""Longest conversation that is shown whole; likewise."""


def choose_pairs(
    before: Sequence[Episode], after: Sequence[Episode], *, count: int = 4
) -> list[tuple[Episode, Episode]]:
    """Pairs of episodes of the same task, in the order of the evaluation.

    By turns one that training mended, one that failed both times, one solved both times and one that training
    broke, as far as each kind exists.

    Args:
        before: episodes before training.
        after: episodes after training.
        count: most pairs.
    """
    by_task = {(item["seed"], item["task_id"]): item for item in after}
    kinds: dict[tuple[bool, bool], list[tuple[Episode, Episode]]] = {}
    for item in before:
        match = by_task.get((item["seed"], item["task_id"]))
        if match is not None:
            kinds.setdefault((bool(item["success"]), bool(match["success"])), []).append((item, match))
    order = [(False, True), (False, False), (True, True), (True, False)]
    chosen: list[tuple[Episode, Episode]] = []
    while len(chosen) < count and any(kinds.get(kind) for kind in order):
        chosen += [kinds[kind].pop(0) for kind in order if kinds.get(kind)]
    return chosen[:count]


def render_pair(before: Episode | None, after: Episode | None) -> str:
    """Two episodes side by side; None leaves a column out."""
    columns = [_episode("before training", before), _episode("after training", after)]
    return f'<div class="pair">{"".join(columns)}</div>'


def visible(text: str) -> str:
    """Text for HTML, escaped, in which nothing hides: see :func:`revealed`."""
    return escape(revealed(text), quote=True)


def revealed(text: str) -> str:
    """Text, not escaped: control, format and surrogate characters, but for line feed and tab, become ``\\u{...}``."""
    hidden = {
        ord(character): f"\\u{{{ord(character):x}}}"
        for character in set(text).difference("\n\t")
        if unicodedata.category(character) in ("Cc", "Cf", "Cs", "Co", "Cn")
    }
    return text.translate(hidden) if hidden else text


def cut(text: str, *, max_chars: int = MAX_CHARS) -> str:
    """Head and tail of a long text with the number of characters left out."""
    if len(text) <= max_chars:
        return text
    half = max_chars // 2
    return f"{text[:half]}\n... {len(text) - 2 * half} characters left out ...\n{text[-half:]}"


def word(episode: Episode) -> str:
    """Whether the task was solved, for a reader."""
    return "solved" if episode.get("success") else "not solved"


def _episode(title: str, episode: Episode | None) -> str:
    if episode is None:
        return ""
    outcome = f'<span class="{"good" if episode.get("success") else "bad"}">{word(episode)}</span>'
    facts = f"{outcome} · {visible(str(episode.get('turns', '?')))} turns"
    facts += f" · {visible(str(episode.get('action_tokens', '?')))} tokens written"
    if episode.get("end_reason"):
        facts += f" · end: {visible(cut(str(episode['end_reason']), max_chars=200))}"
    messages = _messages(episode)
    shown = [*messages[: MAX_MESSAGES // 2], *messages[-(MAX_MESSAGES // 2) :]]
    if len(messages) <= MAX_MESSAGES:
        shown = messages
    left = len(messages) - len(shown)
    gap = f'<p class="soft">{left} messages left out</p>' if left else ""
    texts = [_message(item) for item in shown]
    texts.insert(MAX_MESSAGES // 2, gap)
    return f'<div class="episode"><h3>{escape(title)}: {facts}</h3>{"".join(texts)}</div>'


def _messages(episode: Episode) -> list[Mapping[str, Any]]:
    messages = episode.get("messages")
    return [item for item in messages if isinstance(item, Mapping)] if isinstance(messages, list) else []


def _message(message: Mapping[str, Any]) -> str:
    role, content = str(message.get("role", "")), str(message.get("content", ""))
    kind = "assistant" if role == "assistant" else "other"
    name = {"assistant": "policy", "user": "environment"}.get(role, role)
    return (
        f'<div class="message {kind}"><span class="role">{visible(name)}</span>'
        f"<pre>{visible(cut(content))}</pre></div>"
    )
