"""`agentenv proxy` over a vLLM server: the options reach it, and what is recorded is what the model says."""

import argparse
import asyncio
from typing import Any

import pytest

from agentenv import proxy_command
from agentenv.agents.chat_request import read_request
from agentenv.agents.endpoint import AgentEndpoint, EpisodeSettings
from agentenv.agents.episode_record import Outcome
from agentenv.errors import UsageError
from agentenv.inference import LLMProxy, SamplingParams


def _parse(*options: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    proxy_command.add_parser(parser.add_subparsers())
    return parser.parse_args(["proxy", "--model", "m", "--token-file", "f", *options])


def test_turns_of_an_agent_are_sampled_by_the_server_and_recorded(make_fake: Any, small: Any) -> None:
    small.policy.model.load_state_dict(small.weights)
    servers = [make_fake(), make_fake()]
    urls = ",".join(server.url for server in servers)
    options = proxy_command._vllm_options(_parse("--engine", "vllm", "--vllm_url", urls))

    async def play() -> Any:
        proxy = LLMProxy(engines)
        try:
            endpoint = AgentEndpoint(proxy, small.policy.tokenizer)
            settings = EpisodeSettings(sampling=SamplingParams(max_tokens=6), max_context=400)
            episode = endpoint.open(settings, "one")
            messages = [{"role": "user", "content": "hi"}]
            for _ in range(2):
                done = await endpoint.complete(episode, read_request({"messages": messages}))
                messages += [
                    {"role": "assistant", "content": done.answer.content},
                    {"role": "user", "content": "go on"},
                ]
            return episode.record.trajectory(Outcome(1.0), episode_id="one")
        finally:
            await proxy.close()

    engines = proxy_command.open_engines(small.policy, options, max_batch=4, max_length=400)
    trajectory = asyncio.run(play())
    assert sum(server.calls.count("/v1/completions") for server in servers) >= 2 + len(servers)
    parts = trajectory.split()
    assert sum(sum(part.action_mask) for part in parts) == trajectory.num_action_tokens > 0
    for part in parts:
        expected = small.logprobs(small.weights, part.prompt_ids, part.completion_ids)
        for logprob, wanted, acted in zip(part.rollout_logprobs, expected, part.action_mask, strict=True):
            assert not acted or logprob == pytest.approx(wanted, abs=1e-4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--vllm-url", "http://a"], "--vllm-url is for --engine vllm"),
        (["--engine", "vllm", "--vllm-url", "http://a,http://a"], "names a server twice"),
        (["--engine", "vllm", "--vllm-url", "http://a", "--vllm-devices", "0"], "--vllm_devices is for"),
        (["--engine", "vllm-in-process", "--vllm-url", "http://a"], "takes no --vllm_url"),
        (["--engine", "vllm", "--vllm-python", "/no/python"], "/no/python"),
    ],
)
def test_options_that_cannot_work_are_named(options: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        proxy_command._vllm_options(_parse(*options))
