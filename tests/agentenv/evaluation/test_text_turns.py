"""Conversations as text: what goes in comes out, whatever characters it has."""

from hypothesis import given, settings
from hypothesis import strategies as st

from agentenv.conversation import Conversation, end_of_turn_ids
from agentenv.inference.text_turns import TextTokenizer, read_messages, text_generation

# Among them the sentinels of conversations, controls, and what templates and JSON give a meaning to.
TEXTS = st.text(
    st.sampled_from('ab \n\r\t\x00\x1b<|>{}"\\é世\U0001f600\ue000\ue001\ufdd4\ufffd\u2028'), max_size=20
)


@settings(max_examples=50, deadline=None)
@given(st.lists(TEXTS, min_size=2, max_size=6))
def test_every_message_of_a_conversation_is_read_back(texts: list[str]) -> None:
    tokenizer = TextTokenizer()
    conversation = Conversation(tokenizer, stop_token_ids=end_of_turn_ids(tokenizer), history="append")
    conversation.start([{"role": "system", "content": "rules"}, {"role": "user", "content": texts[0]}])
    expected = [("system", "rules"), ("user", texts[0])]
    for text in texts[1:]:
        generation = text_generation(text)
        action = conversation.add_action(
            generation.token_ids, generation.logprobs, generation.policy_versions
        )
        assert action == text
        conversation.add_observation(text)
        expected += [("assistant", text), ("user", text)]
    read = read_messages(conversation.live_prompt_ids)
    assert [(message["role"], message["content"]) for message in read] == expected


def test_the_four_marks_and_lone_surrogates_cannot_break_a_conversation() -> None:
    tokenizer = TextTokenizer()
    hostile = "a\ufdd0b\ufdd1c\ufdd2d\ufdd3e"
    prompt = tokenizer.encode(tokenizer.apply_chat_template([{"role": "user", "content": hostile}]))
    assert read_messages(prompt) == [{"role": "user", "content": "a\ufffdb\ufffdc\ufffdd\ufffde"}]
    assert tokenizer.decode(text_generation("x\ud800y").token_ids, skip_special_tokens=True) == "x?y"
