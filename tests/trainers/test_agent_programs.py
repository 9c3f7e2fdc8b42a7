"""Agent programs as they are, trained on: what is recorded is what the model says, and SAO takes a step on it.

mini-swe-agent is used where its command `mini` is installed, or where AGENTENV_MINI_SWE_AGENT names it.
"""

from __future__ import annotations

import copy
import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from trl.chat_template_utils import qwen3_chat_template

from agentenv.agents import AgentRunner
from agentenv.inference import LLMProxy
from agentenv.inference.transformers_engine import TransformersEngine
from agentenv.rollout import AsyncController, RolloutConfig
from agentenv.testing import ScriptedModel
from agentenv.trajectory import Trajectory
from agentenv_envs.swe.agents import Job, Launch, SWEAgentPrograms, mini_swe_agent
from agentenv_trainers import SAOConfig, SAOTrainer

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")

_AGENT = """
import json, os, subprocess, urllib.request

history = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "mend it"}]
for turn in range(4):
    if turn == 3:  # what came before is summed up
        history = [*history[:2], {"role": "user", "content": "you looked around"}]
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        json.dumps({"model": "m", "messages": history}).encode(),
        {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"},
    )
    message = json.load(urllib.request.urlopen(request))["choices"][0]["message"]
    output = subprocess.run([os.environ["DOCKER"], "exec", "x", "ls"], capture_output=True, text=True).stdout
    history += [message, {"role": "user", "content": output}]
"""


@pytest.fixture(scope="module")
def mini() -> str:
    """The command of mini-swe-agent, from its released package."""
    found = os.environ.get("AGENTENV_MINI_SWE_AGENT") or shutil.which("mini")
    if not found:
        pytest.skip("mini-swe-agent is not installed")
    return found


@pytest.fixture(scope="module")
def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Bytes as tokens, with the chat template of Qwen3."""
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *special]
    words = Tokenizer(models.BPE({token: index for index, token in enumerate(alphabet)}, []))
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    words.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>"],
    )
    tokenizer.chat_template = qwen3_chat_template
    return tokenizer


def _policy(tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    """Random, with a long context."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        intermediate_size=48,
        tie_word_embeddings=True,
        max_position_embeddings=16_384,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    model = Qwen3ForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2.0)  # so that it says something more than noise
    return model


class _Recorded(AsyncController):
    """Keeps what it hands out."""

    batches: list[list[Trajectory]]

    def get_batch(self, step: int) -> list[Trajectory]:
        batch = super().get_batch(step)
        self.__dict__.setdefault("batches", []).append(batch)
        return batch


def _largest_difference(model: Qwen3ForCausalLM, trajectory: Trajectory) -> float:
    """Between the recorded log-probs and those of a forward pass over the recorded ids, over all segments."""
    differences = []
    for part in trajectory.split():
        ids = torch.tensor([part.prompt_ids + part.completion_ids])
        with torch.inference_mode():
            logprobs = model(input_ids=ids, use_cache=False).logits[0].float().log_softmax(-1)
        start = len(part.prompt_ids)
        expected = logprobs[start - 1 : -1].gather(-1, ids[0, start:, None])[:, 0]
        mask = torch.tensor(part.action_mask)
        differences.append((expected - torch.tensor(part.rollout_logprobs))[mask].abs().max())
    return float(max(differences))


def _turns(trajectory: Trajectory) -> float:
    """A reward for noise, which solves nothing: without one no step moves the policy."""
    return trajectory.turns / 10


def _train(
    launcher: Callable[[Job], Launch], tokenizer: PreTrainedTokenizerFast, folder: Path
) -> tuple[list[Trajectory], float, bool, dict[str, float]]:
    """One SAO step on two episodes; returns them, the largest difference, whether the policy moved, and the log."""
    model = _policy(tokenizer)
    before = copy.deepcopy(model).eval()
    config = SAOConfig(
        output_dir=str(folder / "run"),
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        report_to=[],
        max_steps=1,
        logging_steps=1,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=2,
        learning_rate=1e-3,
        save_strategy="no",
        num_envs=2,
        asynchrony=0.0,
        max_turns=8,
        max_tokens_per_turn=24,
        max_tokens_per_episode=16_000,
        episode_timeout_s=3000.0,
    )
    programs = SWEAgentPrograms(launcher, sandbox="local-unisolated", levels=(1,))
    engine = TransformersEngine(model, tokenizer, max_batch=4, max_length=16_000)
    runner = AgentRunner(programs, close=programs.close)
    rollout, proxy = config.rollout_config(), LLMProxy([engine])
    with _Recorded(runner, proxy, tokenizer, rollout, reward_fn=_turns) as controller:
        trainer = SAOTrainer(model, config, controller, tokenizer)
        trainer.train()
        (batch,) = controller.batches
    difference = max(_largest_difference(before, trajectory) for trajectory in batch)
    pairs = zip(model.state_dict().values(), before.state_dict().values(), strict=True)
    moved = any(not torch.equal(after, old) for after, old in pairs)
    return batch, difference, moved, trainer.state.log_history[0]


def test_one_sao_step_trains_on_an_agent_program_that_forks(
    byte_tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    (tmp_path / "agent.py").write_text(_AGENT)

    def launch(job: Job) -> Launch:
        return Launch([sys.executable, str(tmp_path / "agent.py")], {"DOCKER": str(job.executable)})

    batch, difference, moved, log = _train(launch, byte_tokenizer, tmp_path)
    assert difference < 1e-4 and moved and "loss" in log
    for trajectory in batch:
        trajectory.validate()
        assert trajectory.turns == 4 and len(trajectory.earlier_segments) == 1
        assert trajectory.info["exit_code"] == 0 and trajectory.info["commands"] == 4


@pytest.mark.slow
def test_one_sao_step_trains_on_mini_swe_agent_as_it_is_released(
    mini: str, byte_tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    batch, difference, moved, log = _train(mini_swe_agent(mini), byte_tokenizer, tmp_path)
    assert difference < 1e-4 and moved and "loss" in log
    for trajectory in batch:
        trajectory.validate()
        # Noise is no call of a tool: it leaves such an answer out of its history, and gives up after three.
        assert (trajectory.turns, len(trajectory.earlier_segments)) == (3, 2)
        assert trajectory.info["agent_program"]["forks"] == 2
        assert trajectory.terminated and not trajectory.success
        assert "bash" in byte_tokenizer.decode(trajectory.prompt_ids)


@pytest.mark.slow
def test_the_tools_of_mini_swe_agent_reach_the_sandbox(
    mini: str, byte_tokenizer: PreTrainedTokenizerFast
) -> None:
    def call(command: str) -> str:
        arguments = json.dumps({"name": "bash", "arguments": {"command": command}})
        return f"I go on.\n<tool_call>\n{arguments}\n</tool_call>"

    said = [call("ls; cat app.py | head -3"), call("echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT")]
    programs = SWEAgentPrograms(mini_swe_agent(mini), sandbox="local-unisolated", levels=(1,))
    config = RolloutConfig(
        batch_size=1, num_envs=1, max_tokens_per_turn=500, max_tokens_per_episode=16_000, asynchrony=0.0
    )
    proxy = LLMProxy([ScriptedModel(said, tokenizer=byte_tokenizer)])
    with AsyncController(
        AgentRunner(programs, close=programs.close), proxy, byte_tokenizer, config
    ) as controller:
        (trajectory,) = controller.get_batch(0)
    info: dict[str, Any] = trajectory.info
    assert (info["exit_code"], info["commands"], info["agent_program"]["forks"]) == (0, 2, 0)
    assert [message["role"] for message in trajectory.messages] == [
        "system",
        "user",
        "assistant",
        "tool",
        "assistant",
    ]
    assert "def " in trajectory.messages[3]["content"]
    assert info["grade"]["resolved"] is False and trajectory.end_reason == "terminated"
