"""The requests of one episode, joined into trajectories.

An agent program sends its whole history with every request. Where that history begins with an earlier one and the
policy's answer to it, the prompt is the ids that are recorded for both, then the ids of what is new: what the policy
sampled is never encoded again. Each such chain of requests is a :class:`~agentenv.conversation.Conversation`.

    request 1   system, task                                a new agent
    request 2   system, task, answer 1, output              goes on in its chain
    request 3   system, task, summary                       history rewritten: a fork, from the template
    request 4   system, task, answer 1, output, answer 2'   history rewritten after answer 1: a fork, from recorded ids
    request 5   another system text or task                 a sub-agent

Invariants:

* Every token that the policy sampled for an answer that was given is an action token of exactly one segment. A request
  that failed, or whose client went away, leaves nothing.
* Agents are told apart by how they open: all messages up to the first of the user. A request that opens as an agent
  did, and does not go on in a chain of it, is a fork of it; so is one whose first message of the user has more parts
  behind those (OpenHands puts a summary of the history there).
* The first agent is the main one: its last segment is the end of the joined trajectory, which the reward belongs to.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from agentenv.agents.chat_request import ChatMessage, ChatRequest, answer_message, readable
from agentenv.conversation import Conversation, Tokenizer
from agentenv.inference.protocol import Generation
from agentenv.inference.tool_calls import Answer
from agentenv.trajectory import Segment, Trajectory

__all__ = ["EpisodeRecord", "Outcome", "Place"]

AnswerReader = Callable[[Sequence[int], Sequence[int], Sequence[Any]], Answer | None]


@dataclass
class Outcome:
    """How an episode ended, as whoever ran it says."""

    reward: float = 0.0
    terminated: bool = True
    truncated: bool = False
    end_reason: str = "terminated"
    info: dict[str, Any] = field(default_factory=dict)


@dataclass(eq=False)
class _Chain:
    """Requests each of which goes on where the one before ended."""

    agent: int
    conversation: Conversation
    tools_identity: str
    history: list[str]
    """Identities of all messages, the answers included."""
    answers: list[int]
    """Lengths of the history after each answer, the last one in common with the chain that it forked from included."""
    last_answer: int = 0
    """Counts the episode's answers."""
    is_busy: bool = False


@dataclass(eq=False)
class Place:
    """Where a request's turn belongs; from :meth:`EpisodeRecord.place` to ``record`` or ``give_up``."""

    conversation: Conversation
    prompt_ids: list[int]
    agent: int
    is_fork: bool
    _request: ChatRequest
    _new: Sequence[ChatMessage]
    """Messages that the conversation does not have yet."""
    _chain: _Chain | None
    """The chain that it goes on in; None: a new one."""
    _answers: list[int]


class EpisodeRecord:
    """One episode.

    Args:
        tokenizer: with a chat template.
        stop_token_ids: tokens that end a turn.
    """

    def __init__(self, tokenizer: Tokenizer, stop_token_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._stop_ids = tuple(stop_token_ids)
        self._chains: list[_Chain] = []
        self._openings: list[tuple[str, tuple[str, ...]]] = []
        """Of each agent: what comes before the user's first message, and its parts."""
        self.answers = 0
        """Turns of the policy."""
        self.forks = 0
        """Histories that were rewritten."""

    @property
    def num_agents(self) -> int:
        """The main agent and its sub-agents."""
        return len({chain.agent for chain in self._chains})

    @property
    def action_tokens(self) -> int:
        """Tokens that the policy sampled."""
        return sum(sum(chain.conversation.segment.action_mask) for chain in self._chains)

    def place(self, request: ChatRequest) -> Place:
        """Where a request goes on, and its prompt.

        Raises:
            UsageError: the chat template refuses the messages.
        """
        history = [message.identity for message in request.messages]
        best: tuple[int, bool, _Chain] | None = None
        for chain in self._chains:
            if chain.tools_identity != request.tools_identity:
                continue
            ends = [end for end in chain.answers if end < len(history)]
            common = next((end for end in reversed(ends) if history[:end] == chain.history[:end]), 0)
            goes_on = common == len(chain.history) and not chain.is_busy
            if common and (best is None or (common, goes_on) > best[:2]):
                best = common, goes_on, chain
        if best is None:
            return self._place_anew(request)
        common, goes_on, chain = best
        new = request.messages[common:]
        conversation = chain.conversation if goes_on else chain.conversation.branch(common)
        prompt_ids = conversation.prompt_ids + conversation.continuation([item.message for item in new])
        chain.is_busy = chain.is_busy or goes_on
        return Place(
            conversation,
            prompt_ids,
            chain.agent,
            not goes_on,
            request,
            new,
            chain if goes_on else None,
            [common],
        )

    def record(self, place: Place, generation: Generation, read: AnswerReader | None = None) -> Answer:
        """Keep a turn of the policy; returns what the agent is to hear.

        Args:
            place: of its request; used up.
            generation: the turn.
            read: finds tool calls; None: the answer is text.
        """
        conversation, request, chain = place.conversation, place._request, place._chain
        if chain is None:
            chain = _Chain(place.agent, conversation, request.tools_identity, [], place._answers)
            self._chains.append(chain)
            self.forks += place.is_fork
        if place._new:
            conversation.add_messages([item.message for item in place._new])
        text = conversation.add_action(generation.token_ids, generation.logprobs, generation.policy_versions)
        answer = read(generation.token_ids, place.prompt_ids, request.tools) if read is not None else None
        answer = answer or Answer(text)
        said = answer_message(answer.content, answer.tool_calls)
        chain.history = [*(message.identity for message in request.messages), said.identity]
        chain.answers.append(len(chain.history))
        chain.is_busy = False
        self.answers += 1
        chain.last_answer = self.answers
        return answer

    def give_up(self, place: Place) -> None:
        """The place's request came to nothing; the next one may go on where it would have."""
        if place._chain is not None:
            place._chain.is_busy = False

    def trajectories(self, outcome: Outcome, **fields: Any) -> list[Trajectory]:
        """One trajectory per agent, the main one first; each has the reward of the episode.

        Args:
            outcome: of the episode.
            fields: more of :class:`~agentenv.trajectory.Trajectory`, such as ``episode_id``.
        """
        agents = sorted({chain.agent for chain in self._chains})
        return [
            self._trajectory(
                [chain for chain in self._by_time() if chain.agent == agent],
                outcome,
                {"agent": agent},
                fields,
            )
            for agent in agents
        ]

    def trajectory(self, outcome: Outcome, **fields: Any) -> Trajectory | None:
        """The episode as one trajectory; None where the policy was never asked.

        Forks and sub-agents are its ``earlier_segments``, so that ``split`` gives every one of them as a trajectory of
        its own.
        """
        chains = self._by_time()
        if not chains:
            return None
        first = min(chain.agent for chain in chains)
        main = [chain for chain in chains if chain.agent == first][-1]
        return self._trajectory(
            [*(chain for chain in chains if chain is not main), main], outcome, {}, fields
        )

    def _place_anew(self, request: ChatRequest) -> Place:
        first_user = next(
            (index for index, message in enumerate(request.messages) if message.role == "user"),
            len(request.messages) - 1,
        )
        conversation = Conversation(
            self._tokenizer,
            stop_token_ids=self._stop_ids,
            history="append",
            template_options={"tools": list(request.tools)} if request.tools else None,
        )
        prompt_ids = conversation.start([message.message for message in request.messages])
        agent = self._agent_of(
            "".join(message.identity for message in request.messages[:first_user]),
            request.messages[first_user].parts,
        )
        is_fork = any(chain.agent == agent for chain in self._chains)
        return Place(conversation, prompt_ids, agent, is_fork, request, (), None, [])

    def _agent_of(self, before: str, parts: tuple[str, ...]) -> int:
        """The agent that opens so, or with the first of these parts; a new one where there is none."""
        for length in range(len(parts), 0, -1):
            if (before, parts[:length]) in self._openings:
                return self._openings.index((before, parts[:length]))
        self._openings.append((before, parts))
        return len(self._openings) - 1

    def _by_time(self) -> list[_Chain]:
        return sorted(self._chains, key=lambda chain: chain.last_answer)

    def _trajectory(
        self, chains: Sequence[_Chain], outcome: Outcome, info: dict[str, Any], fields: Mapping[str, Any]
    ) -> Trajectory:
        """The segments of some chains, the last of which is the end."""
        segments = [_copy(chain.conversation.segment) for chain in chains]
        last = segments[-1]
        agent = {
            "turns": sum(_turns(segment) for segment in segments),
            "forks": self.forks,
            "agents": self.num_agents,
            **info,
        }
        messages = [
            {"role": str(message["role"]), "content": readable(message)}
            for message in chains[-1].conversation.messages
        ]
        return Trajectory(
            prompt_ids=last.prompt_ids,
            completion_ids=last.completion_ids,
            rollout_logprobs=last.rollout_logprobs,
            action_mask=last.action_mask,
            policy_versions=last.policy_versions,
            reward=outcome.reward,
            terminated=outcome.terminated,
            truncated=outcome.truncated,
            end_reason=outcome.end_reason,
            turns=agent["turns"],
            messages=messages,
            info={**outcome.info, "agent_program": agent},
            earlier_segments=segments[:-1],
            **fields,
        )


def _turns(segment: Segment) -> int:
    """Runs of action tokens."""
    mask = segment.action_mask
    return sum(is_action and not (place and mask[place - 1]) for place, is_action in enumerate(mask))


def _copy(segment: Segment) -> Segment:
    return replace(
        segment,
        prompt_ids=list(segment.prompt_ids),
        completion_ids=list(segment.completion_ids),
        rollout_logprobs=list(segment.rollout_logprobs),
        action_mask=list(segment.action_mask),
        policy_versions=list(segment.policy_versions),
    )
