"""Conversations: ids as sampled, deltas of the template, forks."""

from collections.abc import Sequence
from typing import Any

import pytest

from agentenv.conversation import Conversation, end_of_turn_ids
from agentenv.errors import UsageError
from agentenv.testing import ByteTokenizer

_USER = [{"role": "user", "content": "hi"}]


class LossyTokenizer(ByteTokenizer):
    """Decodes to lower case with every run of spaces as one: encode(decode(ids)) is rarely ids."""

    def decode(self, token_ids: Any, **options: Any) -> str:
        return " ".join(super().decode(token_ids, **options).lower().split())


class ForgetfulTokenizer(ByteTokenizer):
    """Its template drops what stands before </think> in all assistant turns but the last message."""

    def apply_chat_template(self, conversation: Any, *, tokenize: bool = True, **options: Any) -> Any:
        messages = [dict(message) for message in conversation]
        for message in messages:
            if message["role"] == "assistant":
                message["content"] = message["content"].rpartition("</think>")[2]
        return super().apply_chat_template(messages, tokenize=tokenize, **options)


def _act(conversation: Conversation, ids: Sequence[int], version: int = 0) -> str:
    return conversation.add_action(ids, [-1.0] * len(ids), [version] * len(ids))


def test_sampled_ids_stay_as_they_are_with_a_tokenizer_that_does_not_round_trip() -> None:
    tokenizer = LossyTokenizer()
    conversation = Conversation(tokenizer)
    first = conversation.start(_USER)
    action = [
        *tokenizer.encode("LS   -la"),
        0xC3,
        257,
    ]  # the fragment of a character, then the end of the turn
    assert tokenizer.encode(tokenizer.decode(action)) != action
    _act(conversation, action)
    added = conversation.add_observation("A  File")
    assert conversation.prompt_ids == first + action + added
    assert conversation.segment.completion_ids == action + added
    assert conversation.segment.action_mask == [True] * len(action) + [False] * len(added)
    assert conversation.segment.rollout_logprobs == [-1.0] * len(action) + [0.0] * len(added)
    assert conversation.segment.policy_versions == [0] * len(action) + [-1] * len(added)


def test_a_turn_that_was_stopped_gives_the_same_ids_as_the_whole_template() -> None:
    tokenizer = ByteTokenizer()
    conversation = Conversation(tokenizer)
    conversation.start(_USER)
    assert _act(conversation, [*tokenizer.encode("ls"), 257]) == "ls"
    conversation.add_observation("a.py")
    whole = tokenizer.apply_chat_template(conversation.messages, tokenize=True, add_generation_prompt=True)
    assert conversation.prompt_ids == whole


def test_a_turn_that_was_cut_gets_the_end_of_turn_from_the_template() -> None:
    tokenizer = ByteTokenizer()
    conversation = Conversation(tokenizer)
    conversation.start(_USER)
    _act(conversation, tokenizer.encode("ls"))
    added = conversation.add_observation("a.py")
    assert added[0] == 257
    whole = tokenizer.apply_chat_template(conversation.messages, tokenize=True, add_generation_prompt=True)
    assert conversation.prompt_ids == whole


def test_every_prompt_begins_with_the_previous_prompt_and_completion() -> None:
    tokenizer = LossyTokenizer()
    conversation = Conversation(tokenizer)
    before = conversation.start(_USER)
    for turn in range(5):
        action = [*tokenizer.encode("X" * turn + "  y"), 257]
        _act(conversation, action, version=turn)
        conversation.add_observation("obs  " * turn)
        assert conversation.prompt_ids[: len(before) + len(action)] == before + action
        before = conversation.prompt_ids
    assert conversation.num_tokens == len(before)
    assert conversation.forks == 0


def test_the_announced_length_of_a_delta_is_that_of_the_added_ids() -> None:
    conversation = Conversation(ByteTokenizer())
    conversation.start(_USER)
    _act(conversation, [65, 257])
    announced = conversation.delta_length("a long observation")
    assert announced == len(conversation.add_observation("a long observation"))


def test_a_template_that_rewrites_history_forks_explicitly() -> None:
    tokenizer = ForgetfulTokenizer()
    conversation = Conversation(tokenizer, history="fork")
    first = conversation.start(_USER)
    action = [*tokenizer.encode("<think>hm</think>ls"), 257]
    _act(conversation, action)
    conversation.add_observation("a.py")
    assert conversation.forks == 1
    (earlier,) = conversation.earlier_segments
    assert (earlier.prompt_ids, earlier.completion_ids, earlier.action_mask) == (
        first,
        action,
        [True] * len(action),
    )
    assert "hm" not in tokenizer.decode(conversation.prompt_ids)
    assert conversation.segment.prompt_ids == conversation.prompt_ids
    assert conversation.segment.completion_ids == []


def test_append_keeps_what_a_template_would_drop() -> None:
    tokenizer = ForgetfulTokenizer()
    conversation = Conversation(tokenizer, history="append")
    first = conversation.start(_USER)
    action = [*tokenizer.encode("<think>hm</think>ls"), 257]
    _act(conversation, action)
    added = conversation.add_observation("a.py")
    assert conversation.forks == 0
    assert conversation.prompt_ids == first + action + added


def test_a_template_that_keeps_history_never_forks() -> None:
    tokenizer = ByteTokenizer()
    conversation = Conversation(tokenizer, history="fork")
    conversation.start([{"role": "system", "content": "s"}, *_USER])
    for text in ("  ls\n", "", "cat <x"):
        _act(conversation, [*tokenizer.encode(text), 257])
        conversation.add_observation("out\n")
    assert conversation.forks == 0


def test_a_tokenizer_without_template_is_refused() -> None:
    tokenizer = ByteTokenizer()
    tokenizer.chat_template = ""
    with pytest.raises(UsageError, match="has no chat template"):
        Conversation(tokenizer)


def test_lengths_that_differ_are_refused() -> None:
    conversation = Conversation(ByteTokenizer())
    conversation.start(_USER)
    with pytest.raises(ValueError, match="2 ids, 1 log-probs and 2 versions"):
        conversation.add_action([65, 66], [-1.0], [0, 0])


def test_messages_out_of_turn_are_refused() -> None:
    conversation = Conversation(ByteTokenizer())
    with pytest.raises(UsageError, match="start was not called"):
        _act(conversation, [65])
    conversation.start(_USER)
    with pytest.raises(UsageError, match="cannot follow"):
        conversation.add_observation("too early")
    _act(conversation, [65])
    with pytest.raises(UsageError, match="cannot follow"):
        _act(conversation, [65])
    with pytest.raises(UsageError, match="called twice"):
        conversation.start(_USER)


def test_a_template_that_raises_is_a_usage_error() -> None:
    class Refusing(ByteTokenizer):
        def apply_chat_template(self, *_: Any, **__: Any) -> Any:
            raise RuntimeError("roles must alternate")

    with pytest.raises(UsageError, match="roles must alternate"):
        Conversation(Refusing()).start(_USER)


def test_the_templates_own_end_of_turn_stops_a_turn_too() -> None:
    tokenizer = ByteTokenizer()
    tokenizer.eos_token_id = 258
    assert end_of_turn_ids(tokenizer) == (258,)
    tokenizer.all_special_ids = [256, 257, 258]  # type: ignore[attr-defined]
    assert end_of_turn_ids(tokenizer) == (258, 257)


def test_several_messages_after_an_action_are_one_delta() -> None:
    tokenizer = ByteTokenizer()
    conversation = Conversation(tokenizer)
    conversation.start(_USER)
    _act(conversation, [*tokenizer.encode("ls"), 257])
    messages = [{"role": "tool", "content": "a.py"}, {"role": "user", "content": "go on"}]
    expected = conversation.continuation(messages)
    assert conversation.add_messages(messages) == expected
    whole = tokenizer.apply_chat_template(conversation.messages, tokenize=True, add_generation_prompt=True)
    assert conversation.prompt_ids == whole


def test_a_branch_begins_with_the_recorded_ids_and_leaves_the_conversation_as_it_is() -> None:
    tokenizer = LossyTokenizer()
    conversation = Conversation(tokenizer)
    first = conversation.start(_USER)
    action = [*tokenizer.encode("LS   -la"), 0xC3, 257]
    _act(conversation, action)
    conversation.add_observation("A  File")
    _act(conversation, [*tokenizer.encode("done"), 257])
    before = conversation.prompt_ids
    branch = conversation.branch(2)
    added = branch.add_messages([{"role": "user", "content": "Other"}])
    assert branch.prompt_ids == branch.segment.prompt_ids == first + action + added
    assert added[0] != 257
    _act(branch, [*tokenizer.encode("x"), 257])
    assert branch.segment.action_mask == [True, True]
    assert conversation.prompt_ids == before and len(conversation.messages) == 4


def test_a_conversation_branches_at_its_actions_only() -> None:
    conversation = Conversation(ByteTokenizer())
    conversation.start(_USER)
    _act(conversation, [1])
    for place in (0, 1, 3):
        with pytest.raises(UsageError, match="is no action"):
            conversation.branch(place)


def test_messages_wait_for_an_action() -> None:
    conversation = Conversation(ByteTokenizer())
    conversation.start(_USER)
    with pytest.raises(UsageError, match="cannot follow"):
        conversation.add_messages(_USER)
    _act(conversation, [1])
    with pytest.raises(UsageError, match="no messages"):
        conversation.add_messages([])
