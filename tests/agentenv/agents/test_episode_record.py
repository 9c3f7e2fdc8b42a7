"""Requests of an episode, joined: chains, forks, sub-agents, and no token that is encoded twice."""

from typing import Any

from agentenv.agents.chat_request import read_request
from agentenv.agents.episode_record import EpisodeRecord, Outcome, Place
from agentenv.inference import Generation
from agentenv.testing import ByteTokenizer
from agentenv.trajectory import Trajectory

_TOKENIZER = ByteTokenizer()
_END = 257
_BROKEN = 0xC3
"""Half a character: what it decodes to is encoded as something else."""


def _message(role: str, content: str) -> dict[str, Any]:
    return {"role": role, "content": content}


def _opening(system: str = "be brief", task: str = "mend it") -> list[dict[str, Any]]:
    return [_message("system", system), _message("user", task)]


class Agent:
    """Asks like an agent program, and keeps what it was answered."""

    def __init__(self, record: EpisodeRecord, history: list[dict[str, Any]] | None = None) -> None:
        self.record = record
        self.history = _opening() if history is None else history
        self.prompts: list[list[int]] = []
        self.turns: list[list[int]] = []

    def ask(self, said: str = "ls") -> None:
        place = self.record.place(read_request({"messages": self.history}))
        ids = [*_TOKENIZER.encode(said), _BROKEN, _END]
        self._keep(place, ids)

    def _keep(self, place: Place, ids: list[int]) -> None:
        generation = Generation(ids, [-0.5] * len(ids), [3] * len(ids), "stop")
        self.prompts.append(list(place.prompt_ids))
        self.turns.append(ids)
        answer = self.record.record(place, generation)
        self.history.append(_message("assistant", answer.content))

    def hear(self, text: str) -> None:
        self.history.append(_message("user", text))


def _record() -> EpisodeRecord:
    return EpisodeRecord(_TOKENIZER, (_END,))


def _joined(record: EpisodeRecord) -> Trajectory:
    trajectory = record.trajectory(Outcome(1.0), episode_id="e")
    assert trajectory is not None
    trajectory.validate()
    return trajectory


def _sampled(trajectory: Trajectory) -> list[list[int]]:
    """Ids of the action tokens of each segment."""
    return [
        [token for token, is_action in zip(part.completion_ids, part.action_mask, strict=True) if is_action]
        for part in trajectory.split()
    ]


def test_each_prompt_is_the_recorded_ids_and_what_is_new() -> None:
    agent = Agent(_record())
    agent.ask("ls")
    agent.hear("app.py")
    agent.ask("cat app.py")
    first, second = agent.prompts
    new = _TOKENIZER.encode("\n<|im_start|>user\napp.py<|im_end|>\n<|im_start|>assistant\n")
    assert second == first + agent.turns[0] + new
    trajectory = _joined(agent.record)
    assert trajectory.prompt_ids == first
    assert trajectory.completion_ids == agent.turns[0] + new + agent.turns[1]
    assert (trajectory.turns, trajectory.earlier_segments) == (2, [])
    assert trajectory.reward == 1.0 and trajectory.messages[-1]["role"] == "assistant"


def test_a_prompt_that_was_re_encoded_would_differ() -> None:
    agent = Agent(_record())
    agent.ask()
    agent.hear("x")
    agent.ask()
    again = _TOKENIZER.apply_chat_template(agent.history[:-1], tokenize=True, add_generation_prompt=True)
    assert again != agent.prompts[1]


def test_several_messages_may_come_between_two_turns() -> None:
    agent = Agent(_record())
    agent.ask()
    agent.hear("one")
    agent.hear("two")
    agent.ask()
    assert agent.record.forks == 0
    assert _TOKENIZER.decode(agent.prompts[1]).count("<|im_start|>user") == 3


def test_what_the_agent_puts_into_the_policys_mouth_is_no_action() -> None:
    agent = Agent(_record())
    agent.ask("one")
    agent.history += [_message("assistant", "I also say this"), _message("user", "go on")]
    agent.ask("two")
    assert agent.record.forks == 0
    assert _sampled(_joined(agent.record)) == [agent.turns[0] + agent.turns[1]]
    assert "I also say this" in _TOKENIZER.decode(agent.prompts[1])


def test_a_rewritten_history_forks_from_the_last_answer_that_it_kept() -> None:
    agent = Agent(_record())
    agent.ask("one")
    agent.hear("x")
    agent.ask("two")
    agent.hear("y")
    agent.ask("three")
    agent.history = [*agent.history[:3], _message("user", "the rest was long")]
    agent.ask("four")
    kept = agent.prompts[0] + agent.turns[0]
    assert agent.prompts[3][: len(kept)] == kept
    trajectory = _joined(agent.record)
    one, two, three, four = agent.turns
    assert _sampled(trajectory) == [one + two + three, four]
    assert trajectory.prompt_ids == agent.prompts[3] and trajectory.action_mask == [True] * len(four)
    assert trajectory.info["agent_program"] == {"turns": 4, "forks": 1, "agents": 1}


def test_a_fork_goes_on_as_a_chain_and_so_may_what_it_left() -> None:
    agent = Agent(_record())
    agent.ask("one")
    left = list(agent.history)
    agent.hear("x")
    agent.ask("two")
    main = list(agent.history)
    agent.history = [*left, _message("user", "z")]
    agent.ask("three")
    agent.hear("w")
    agent.ask("four")
    agent.history = [*main, _message("user", "y")]
    agent.ask("five")
    assert agent.record.forks == 1
    one, two, three, four, five = agent.turns
    assert _sampled(_joined(agent.record)) == [three + four, one + two + five]


def test_a_history_without_any_recorded_answer_forks_from_the_template() -> None:
    agent = Agent(_record())
    agent.ask("one")
    agent.history = [*_opening(), _message("user", "you had looked around")]
    agent.ask("two")
    assert agent.record.forks == 1 and agent.record.num_agents == 1
    whole = _TOKENIZER.apply_chat_template(agent.history[:-1], tokenize=True, add_generation_prompt=True)
    assert agent.prompts[1] == whole
    assert len(_joined(agent.record).earlier_segments) == 1


def test_a_summary_behind_the_task_in_one_message_is_a_fork_and_no_sub_agent() -> None:
    """As OpenHands writes a history that it summed up; who sums up is asked in between, and is another."""
    record = _record()
    main, other = Agent(record), Agent(record, [_message("user", "sum up: one")])
    task = {"type": "text", "text": "mend it"}
    main.history = [_message("system", "be brief"), {"role": "user", "content": [task]}]
    main.ask("one")
    other.ask("a summary")
    for summary in ("you looked around", "you looked around again"):
        parts = [task, {"type": "text", "text": summary}]
        main.history = [_message("system", "be brief"), {"role": "user", "content": parts}]
        main.ask(f"after: {summary}")
    main.hear("output")
    main.ask("done")
    assert (record.forks, record.num_agents) == (2, 2)
    joined = _joined(record)
    assert _sampled(joined) == [main.turns[0], other.turns[0], main.turns[1], main.turns[2] + main.turns[3]]
    assert joined.messages[-1]["content"] == "done\ufffd"


def test_another_task_that_begins_as_the_agents_is_a_sub_agent() -> None:
    record = _record()
    Agent(record, _opening(task="mend it")).ask("one")
    Agent(record, _opening(task="mend it, and the tests")).ask("two")
    assert (record.forks, record.num_agents) == (0, 2)


def test_the_same_request_again_is_another_turn() -> None:
    agent = Agent(_record())
    agent.ask("one")
    agent.history = _opening()
    agent.ask("two")
    assert agent.prompts[0] == agent.prompts[1]
    assert _sampled(_joined(agent.record)) == agent.turns


def test_tools_are_part_of_the_prompt() -> None:
    record = _record()
    tool = {"type": "function", "function": {"name": "bash"}}
    agent = Agent(record)
    agent.ask()
    history = [*agent.history, _message("user", "x")]
    place = record.place(read_request({"messages": history, "tools": [tool]}))
    assert place.is_fork


def test_a_sub_agent_has_a_trajectory_of_its_own() -> None:
    record = _record()
    main = Agent(record)
    main.ask("ask the other")
    sub = Agent(record, _opening(system="you search"))
    sub.ask("grep")
    sub.hear("found")
    sub.ask("it is there")
    main.hear("it is there")
    main.ask("done")
    assert record.forks == 0 and record.num_agents == 2
    first, second = record.trajectories(Outcome(1.0), episode_id="e")
    assert _sampled(first) == [main.turns[0] + main.turns[1]]
    assert _sampled(second) == [sub.turns[0] + sub.turns[1]]
    assert second.reward == 1.0 and second.info["agent_program"]["agent"] == 1
    joined = _joined(record)
    assert joined.messages == first.messages
    assert [part.prompt_ids for part in joined.split()] == [sub.prompts[0], main.prompts[0]]


def test_the_end_is_the_main_agents_whoever_spoke_last() -> None:
    record = _record()
    main, sub = Agent(record), Agent(record, _opening(task="find a title"))
    main.ask("done")
    sub.ask("a title")
    assert _sampled(_joined(record)) == [sub.turns[0], main.turns[0]]


def test_two_requests_at_once_do_not_share_a_chain() -> None:
    record = _record()
    agent = Agent(record)
    agent.ask("one")
    agent.hear("x")
    request = read_request({"messages": agent.history})
    first, second = record.place(request), record.place(request)
    assert not first.is_fork and second.is_fork
    assert first.prompt_ids == second.prompt_ids
    agent._keep(second, [*_TOKENIZER.encode("b"), _END])
    agent._keep(first, [*_TOKENIZER.encode("a"), _END])
    one, b, a = agent.turns
    assert _sampled(_joined(record)) == [b, one + a]


def test_a_request_that_came_to_nothing_leaves_nothing() -> None:
    record = _record()
    agent = Agent(record)
    agent.ask("one")
    agent.hear("x")
    record.give_up(record.place(read_request({"messages": agent.history})))
    agent.ask("two")
    assert record.forks == 0
    assert _sampled(_joined(record)) == [agent.turns[0] + agent.turns[1]]


def test_the_first_request_that_failed_makes_no_agent() -> None:
    record = _record()
    record.give_up(record.place(read_request({"messages": _opening(task="other")})))
    agent = Agent(record)
    agent.ask("one")
    assert record.num_agents == 1
    assert _sampled(_joined(record)) == agent.turns


def test_an_episode_in_which_nothing_was_asked_has_no_trajectory() -> None:
    assert _record().trajectory(Outcome(), episode_id="e") is None
    assert _record().trajectories(Outcome(), episode_id="e") == []
