"""Token-exact conversations: sampled ids are kept as they are, everything else comes from the chat template.

Each turn's prompt is the previous prompt, then the ids the policy sampled, then the ids of what the chat template puts
between them and the next turn: the closing of the assistant's turn, the observation, and the opening of the next
assistant turn (the *delta*). The delta is the template's own text around a sentinel, so any template works.

Invariants:

* A sampled id is never decoded and encoded again on its way into a prompt; text made from it is for reading only.
* Within a segment every prompt begins with the previous prompt and completion.
* Where the template rewrites history (drops the reasoning of earlier turns, say), ``history="fork"`` starts a new
  segment whose prompt is the template's, and counts it in ``forks``; ``history="append"`` never rewrites.
* Ids, log-probs, action mask and versions of a segment have one length.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol, cast

from agentenv.errors import UsageError
from agentenv.trajectory import OBSERVATION_VERSION, Segment

Message = dict[str, Any]
"""``role``, ``content`` and whatever else the chat template reads, such as ``tool_calls``."""

_SENTINEL = "\ue000agentenv\ue001"
"""Private-use characters: no template, observation or trimming filter alters them."""


class Tokenizer(Protocol):
    """What is used of a tokenizer; every ``transformers`` tokenizer with a chat template fits."""

    eos_token_id: int | None

    def apply_chat_template(self, conversation: Any, **kwargs: Any) -> Any:
        """Text of a conversation (``tokenize=False``)."""

    def encode(self, text: Any, **kwargs: Any) -> Any:
        """Ids of a text."""

    def decode(self, token_ids: Any, **kwargs: Any) -> Any:
        """Readable text of ids."""


class Conversation:
    """One episode's dialogue, as ids for the engine and the trainer and as text for people.

    Args:
        tokenizer: with a chat template.
        stop_token_ids: tokens that end a turn, besides the tokenizer's end-of-sequence token; left out of texts.
        history: what to do where the template rewrites earlier turns, see the module docstring.
        template_options: passed on to the template (``tools``, ``enable_thinking=False`` and the like).

    Raises:
        UsageError: the tokenizer has no chat template.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        stop_token_ids: Sequence[int] = (),
        history: Literal["append", "fork"] = "fork",
        template_options: Mapping[str, Any] | None = None,
    ) -> None:
        if not getattr(tokenizer, "chat_template", None):
            raise UsageError(
                f"tokenizer {getattr(tokenizer, 'name_or_path', type(tokenizer).__name__)!r} has no chat template; "
                "use an instruction-tuned model's tokenizer or set tokenizer.chat_template"
            )
        self._tokenizer = tokenizer
        self._history = history
        self._options = dict(template_options or {})
        eos = getattr(tokenizer, "eos_token_id", None)
        self._stop_ids = frozenset(stop_token_ids) | (frozenset() if eos is None else frozenset((int(eos),)))
        self.messages: list[Message] = []
        self.forks = 0
        """How often the template rewrote history and a new segment began."""
        self._segments = [Segment([], [], [], [], [])]
        self._prompt_ids: list[int] = []
        self._opening: list[Message] = []
        self._rendered = ""
        self._last_delta: tuple[list[Message], list[int]] | None = None
        self._ends_sampled = False
        """The last token of the prompt so far is one that the policy sampled."""
        self._ends: dict[int, int] = {}
        """Number of messages after each action of the current segment -> number of tokens then."""

    @property
    def prompt_ids(self) -> list[int]:
        """Prompt of the next generation: everything so far in the current segment (a copy)."""
        return list(self._prompt_ids)

    @property
    def live_prompt_ids(self) -> list[int]:
        """:attr:`prompt_ids` itself: it grows with the next message, and only the conversation may change it.

        A copy per turn would be the greatest cost of long contexts, the garbage collector's visits of it included.
        """
        return self._prompt_ids

    @property
    def num_tokens(self) -> int:
        """Length of :attr:`prompt_ids`."""
        return len(self._prompt_ids)

    @property
    def segment(self) -> Segment:
        """The current segment."""
        return self._segments[-1]

    @property
    def earlier_segments(self) -> list[Segment]:
        """Segments before the last fork, oldest first."""
        return self._segments[:-1]

    def start(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Begin with these messages (system, user).

        Returns:
            ids of the first prompt, generation prompt included.

        Raises:
            UsageError: already started, no messages, or the template refuses them.
        """
        if self.messages:
            raise UsageError("Conversation.start was called twice")
        if not messages:
            raise UsageError("Conversation.start got no messages")
        self.messages = [dict(message) for message in messages]
        self._opening = [dict(message) for message in messages]
        self._rendered = self._render(self.messages, generation_prompt=True)
        self._begin_segment(self._encode(self._rendered))
        return self.prompt_ids

    def add_action(self, token_ids: Sequence[int], logprobs: Sequence[float], versions: Sequence[int]) -> str:
        """Append what the policy sampled, its stop token included.

        Returns:
            the action's text, without stop token and special tokens.

        Raises:
            ValueError: the three lengths differ.
            UsageError: not started, or the last message is an action already.
        """
        if not len(token_ids) == len(logprobs) == len(versions):
            raise ValueError(
                f"add_action got {len(token_ids)} ids, {len(logprobs)} log-probs and {len(versions)} versions"
            )
        self._expect_turn_of("assistant")
        segment = self.segment
        segment.completion_ids.extend(token_ids)
        segment.rollout_logprobs.extend(logprobs)
        segment.action_mask.extend([True] * len(token_ids))
        segment.policy_versions.extend(versions)
        self._prompt_ids.extend(token_ids)
        text = self._text(token_ids)
        self.messages.append({"role": "assistant", "content": text})
        self._ends[len(self.messages)] = len(self._prompt_ids)
        self._ends_sampled = len(token_ids) > 0
        return text

    def add_observation(self, text: str, *, role: str = "user") -> list[int]:
        """Append an observation and the opening of the next assistant turn.

        Returns:
            the ids that were added to the current segment; after a fork, its new prompt.

        Raises:
            UsageError: no action since the last observation.
        """
        self._expect_turn_of(role)
        return self.add_messages([{"role": role, "content": text}])

    def add_messages(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Append what came after an action, several messages maybe, and the opening of the next assistant turn.

        Returns:
            the ids that were added to the current segment; after a fork, its new prompt.

        Raises:
            UsageError: no action since the last messages, none given, or the template refuses them.
        """
        if not messages:
            raise UsageError("Conversation.add_messages got no messages")
        self._expect_turn_of("user")
        action = self.messages[-1]["content"]
        previous_rendering = self._rendered
        self.messages.extend(dict(message) for message in messages)
        if self._history == "fork":
            self._rendered = self._render(self.messages, generation_prompt=True)
            if not _extends(self._rendered, previous_rendering, action):
                self.forks += 1
                self._segments.append(Segment([], [], [], [], []))
                self._begin_segment(self._encode(self._rendered))
                return self.prompt_ids
        added = self.continuation(messages)
        segment = self.segment
        if segment.completion_ids:
            segment.completion_ids.extend(added)
            segment.rollout_logprobs.extend([0.0] * len(added))
            segment.action_mask.extend([False] * len(added))
            segment.policy_versions.extend([OBSERVATION_VERSION] * len(added))
        else:  # nothing was sampled in it yet: it is a branch
            segment.prompt_ids.extend(added)
        self._prompt_ids.extend(added)
        self._ends_sampled = False
        return added

    def continuation(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """The ids that :meth:`add_messages` adds without a fork; changes nothing."""
        ids = self._template_delta([dict(message) for message in messages])
        return ids[self._num_sampled_of(ids) :]

    def branch(self, num_messages: int) -> Conversation:
        """Another conversation, which begins as this one did, for a history that is rewritten after that.

        The ids of the common part stay as they were sampled. They are the prompt of the branch, so that nothing is
        trained twice.

        Args:
            num_messages: how many messages they have in common; the last of them is an action of the current segment.

        Raises:
            UsageError: the last of them is no such action.
        """
        if num_messages not in self._ends:
            raise UsageError(
                f"Conversation.branch: message {num_messages} is no action of the current segment"
            )
        branch = Conversation(
            self._tokenizer,
            stop_token_ids=tuple(self._stop_ids),
            history=self._history,
            template_options=self._options,
        )
        branch.messages = [dict(message) for message in self.messages[:num_messages]]
        branch._opening = self._opening
        if self._history == "fork":
            branch._rendered = self._render(branch.messages[:-1], generation_prompt=True)
        end = self._ends[num_messages]
        branch._begin_segment(self._prompt_ids[:end])
        branch._ends[num_messages] = end
        branch._ends_sampled = True
        return branch

    def delta_length(self, text: str, *, role: str = "user") -> int:
        """How many ids :meth:`add_observation` would add (without a fork)."""
        return len(self.continuation([{"role": role, "content": text}]))

    def _num_sampled_of(self, delta: list[int]) -> int:
        """1 where the policy sampled the template's own end of turn as its stop token, which must not stand twice."""
        last = self._prompt_ids[-1]
        return int(bool(delta and delta[0] == last and last in self._stop_ids and self._ends_sampled))

    def _template_delta(self, messages: list[Message]) -> list[int]:
        """What the template puts after an action's content, up to the next one."""
        if self._last_delta is not None and self._last_delta[0] == messages:
            return self._last_delta[1]
        rendered = self._render(
            [*self._opening, {"role": "assistant", "content": _SENTINEL}, *messages], generation_prompt=True
        )
        position = rendered.find(_SENTINEL)
        if position < 0:
            raise UsageError(
                "the chat template drops the assistant's content; it cannot be used for rollouts"
            )
        ids = self._encode(rendered[position + len(_SENTINEL) :])
        self._last_delta = (messages, ids)
        return ids

    def _begin_segment(self, prompt_ids: list[int]) -> None:
        self.segment.prompt_ids = prompt_ids
        self._prompt_ids = list(prompt_ids)
        self._ends_sampled = False
        self._ends.clear()

    def _expect_turn_of(self, role: str) -> None:
        if not self.messages:
            raise UsageError("Conversation.start was not called")
        if (self.messages[-1]["role"] == "assistant") == (role == "assistant"):
            raise UsageError(
                f"Conversation: a message of {role!r} cannot follow one of {self.messages[-1]['role']!r}"
            )

    def _render(self, messages: list[Message], *, generation_prompt: bool) -> str:
        try:
            text = self._tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=generation_prompt, **self._options
            )
        except Exception as error:  # jinja raises TemplateError and whatever the template's code raises
            roles = [message["role"] for message in messages]
            raise UsageError(f"the chat template refused messages with roles {roles}: {error}") from error
        return cast(str, text)

    def _encode(self, text: str) -> list[int]:
        # The template writes its special tokens itself, the beginning of the sequence included.
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def _text(self, token_ids: Sequence[int]) -> str:
        # Cleaning up would change the white space of an action, which may be code.
        body = list(itertools.filterfalse(self._stop_ids.__contains__, token_ids))
        return cast(
            str, self._tokenizer.decode(body, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        )


def _extends(rendered: str, previous: str, action: str) -> bool:
    """Whether the template's new text is the old one, then the action (up to outer white space), then something."""
    return rendered.startswith(previous) and rendered[len(previous) :].lstrip().startswith(action.strip())


def end_of_turn_ids(tokenizer: Tokenizer) -> tuple[int, ...]:
    """Tokens that end an assistant's turn: the tokenizer's end of sequence and the template's own end of turn.

    The latter is what the template writes right after the assistant's content, if that is a special token.

    Raises:
        UsageError: no chat template, or one that drops the content.
    """
    conversation = Conversation(tokenizer)
    conversation.start([{"role": "user", "content": "x"}])
    delta = conversation._template_delta([{"role": "user", "content": "x"}])
    ids = [] if tokenizer.eos_token_id is None else [int(tokenizer.eos_token_id)]
    if delta and delta[0] in getattr(tokenizer, "all_special_ids", ()):
        ids.append(delta[0])
    return tuple(dict.fromkeys(ids))
