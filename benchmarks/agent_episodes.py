"""Episodes of an agent program, sampled or dictated: played, compared with a forward pass, and trained on by one step.

Part of `agent_programs.py`. The answers are the policy's own, or written beforehand: then the model gives their
log-probs, turn by turn as the engine is asked, so that long histories are checked without a policy that can write them.
"""

from __future__ import annotations

import copy
import dataclasses
import re
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from byte_level import qwen3_tokenizer
from transformers import PrinterCallback, Qwen3Config, Qwen3ForCausalLM

from agentenv.agents import AgentCall, AgentOutcome, AgentRunner
from agentenv.errors import AgentEnvError
from agentenv.inference import Generation, GenerationRequest, LLMProxy
from agentenv.inference.policy import Policy
from agentenv.inference.transformers_engine import TransformersEngine
from agentenv.rollout import AsyncController
from agentenv.testing import ScriptedModel
from agentenv.trajectory import Trajectory
from agentenv_envs.swe.agents import Launcher, SWEAgentPrograms
from agentenv_trainers import SAOConfig, SAOTrainer

CONTEXT = 32_000
_TEXTS = Path(__file__).resolve().parent.parent / "docs"


def random_policy() -> Policy:
    """A tiny model with a long context, and tokens of two or three characters: agents' prompts are long."""
    torch.manual_seed(0)
    texts = (path.read_text(encoding="utf-8") for path in sorted(_TEXTS.glob("*.md")))
    tokenizer = qwen3_tokenizer(texts, vocab_size=2000)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        intermediate_size=48,
        tie_word_embeddings=True,
        max_position_embeddings=CONTEXT,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    model = Qwen3ForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2.0)  # so that it says something more than noise
    return Policy("random", model, tokenizer)


def forward_logprobs(model: Any, prompt: Sequence[int], completion: Sequence[int]) -> torch.Tensor:
    """Log-probs of a completion's ids after a prompt, in nats, by one forward pass without a cache."""
    ids = torch.tensor([[*prompt, *completion]])
    with torch.inference_mode():
        logits = model(input_ids=ids, use_cache=False, logits_to_keep=len(completion) + 1).logits
        logprobs = logits[0, :-1].float().log_softmax(-1)
    return logprobs.gather(-1, ids[0, len(prompt) :, None])[:, 0]


def largest_difference(model: Any, trajectory: Trajectory) -> float:
    """Between the recorded log-probs and those of a forward pass over the recorded ids, over all segments, in nats."""
    differences = []
    for part in trajectory.split():
        expected = forward_logprobs(model, part.prompt_ids, part.completion_ids)
        mask = torch.tensor(part.action_mask)
        differences.append((expected - torch.tensor(part.rollout_logprobs))[mask].abs().max())
    return float(max(differences))


class Dictated(ScriptedModel):
    """Says what is written down, with the log-probs that a model gives it after the prompt of each request.

    Args:
        policy: the model, as it is now, and its tokenizer.
        said: the main agent's answers in turn.
        summary: every answer to another agent, such as who sums a history up.
    """

    def __init__(self, policy: Policy, said: Sequence[str], summary: str = "You looked around.") -> None:
        self._left: dict[str, list[str]] = {}
        self._said, self._summary = said, summary
        super().__init__(self._reply, tokenizer=policy.tokenizer)
        self._speaker = copy.deepcopy(policy.model).eval()

    def _reply(self, request: GenerationRequest) -> str:
        episode, _, agent = request.episode_id.partition("/")
        if agent != "agent-0":
            return self._summary
        return self._left.setdefault(episode, list(self._said)).pop(0)

    async def generate(self, request: GenerationRequest) -> Generation:
        generation = await super().generate(request)
        logprobs = forward_logprobs(self._speaker, request.prompt_ids, generation.token_ids)
        return dataclasses.replace(generation, logprobs=logprobs.tolist())


@dataclasses.dataclass
class Step:
    """What a training step on an agent program's episodes showed."""

    batch: list[Trajectory]
    difference: float
    """Largest one of :func:`largest_difference`, under the weights that sampled."""
    engine_tokens: int
    """Sampled by the engine for these episodes."""
    changed: float
    """Largest change of a weight."""
    log: dict[str, float]

    def figures(self) -> dict[str, Any]:
        """For people."""

        def total(name: Callable[[Trajectory], int]) -> int:
            return sum(name(trajectory) for trajectory in self.batch)

        return {
            "episodes": len(self.batch),
            "requests": total(lambda trajectory: trajectory.turns),
            "segments": total(lambda trajectory: len(trajectory.split())),
            "forks": total(lambda trajectory: trajectory.info["agent_program"]["forks"]),
            "agents": total(lambda trajectory: trajectory.info["agent_program"]["agents"]),
            "sampled_tokens": total(lambda trajectory: trajectory.num_action_tokens),
            "engine_tokens": self.engine_tokens,
            "longest_context": max(
                len(part.prompt_ids) + len(part.completion_ids)
                for trajectory in self.batch
                for part in trajectory.split()
            ),
            "commands": total(lambda trajectory: trajectory.info["commands"]),
            "solved": total(lambda trajectory: bool(trajectory.info["success"])),
            "largest_difference": self.difference,
            "loss": self.log["loss"],
            "largest_weight_change": self.changed,
        }


class _Counted:
    """An engine whose sampled tokens are counted by episode."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self.tokens: dict[str, int] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def generate(self, request: GenerationRequest) -> Generation:
        generation: Generation = await self._engine.generate(request)
        episode = request.episode_id.partition("/")[0]
        self.tokens[episode] = self.tokens.get(episode, 0) + len(generation.token_ids)
        return generation


class _Recorded(AsyncController):
    """Keeps what it hands out."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.taken: list[Trajectory] = []

    def get_batch(self, step: int) -> list[Trajectory]:
        batch = super().get_batch(step)
        self.taken += batch
        return batch


def _turns(trajectory: Trajectory) -> float:
    """A reward for noise, which solves nothing: without one no step moves the policy."""
    return trajectory.turns / 10


def sao_step(
    launcher: Launcher,
    policy: Policy,
    *,
    said: Sequence[str] | None = None,
    seed: int | None = None,
    sandbox: str = "local-unisolated",
    episodes: int = 2,
    max_turns: int = 20,
    max_tokens: int = 24,
    context: int = CONTEXT,
) -> Step:
    """Play episodes with a program, compare what is recorded with a forward pass, and take one step of SAO on it.

    Args:
        launcher: starts the program.
        policy: trained.
        said: the answers, in turn; None: the policy samples them, and their reward is their number.
        seed: of every episode's task; None: one after another.
        sandbox: kind of backend.
        episodes: that are played, all of them for one step.
        max_turns, max_tokens, context: of an episode, a turn and a request.
    """
    model, tokenizer = policy.model, policy.tokenizer
    before = copy.deepcopy(model).eval()
    programs = SWEAgentPrograms(launcher, sandbox=sandbox, levels=(1,))

    def play(call: AgentCall) -> AgentOutcome:
        return programs(call if seed is None else dataclasses.replace(call, seed=seed))

    with tempfile.TemporaryDirectory(prefix="agentenv-") as folder:
        config = SAOConfig(
            output_dir=folder,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            report_to=[],
            disable_tqdm=True,
            max_steps=1,
            logging_steps=1,
            per_device_train_batch_size=1,
            gradient_accumulation_steps=episodes,
            learning_rate=1e-3,
            save_strategy="no",
            num_envs=episodes,
            asynchrony=0.0,
            max_turns=max_turns,
            max_tokens_per_turn=max_tokens,
            max_tokens_per_episode=context,
            episode_timeout_s=3000.0,
            generate_timeout_s=1000.0,
        )
        inner = (
            TransformersEngine(model, tokenizer, max_batch=episodes, max_length=context)
            if said is None
            else Dictated(policy, said)
        )
        engine = _Counted(inner)
        runner = AgentRunner(play, close=programs.close)
        reward = {"reward_fn": _turns} if said is None else {}
        with _Recorded(
            runner, LLMProxy([engine]), tokenizer, config.rollout_config(), **reward
        ) as controller:
            trainer = SAOTrainer(model, config, controller, tokenizer)
            trainer.remove_callback(PrinterCallback)
            trainer.train()
            batch = controller.taken
    for trajectory in batch:
        trajectory.validate()
    pairs = zip(model.state_dict().values(), before.state_dict().values(), strict=True)
    return Step(
        batch,
        max(largest_difference(before, trajectory) for trajectory in batch),
        sum(engine.tokens[trajectory.episode_id] for trajectory in batch),
        max(float((after - old).abs().max()) for after, old in pairs),
        trainer.state.log_history[0],
    )


def interfaces(trajectory: Trajectory) -> list[str]:
    """Names of the network interfaces that the dictated episode found beside the sandbox's own loopback.

    Raises:
        AgentEnvError: it told of none.
    """
    told = [str(message["content"]) for message in trajectory.messages if message["role"] == "tool"]
    # The program wraps outputs in forms of its own.
    found = re.search(r"interfaces: ([\w. -]*)", "\n".join(told))
    if found is None:
        raise AgentEnvError(f"the sandbox told of no network interfaces: {told}")
    return [name for name in found.group(1).split() if name != "lo"]
