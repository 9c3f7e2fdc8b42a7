"""Does an agent program as it is released yield episodes that can be trained on? mini-swe-agent, unchanged.

    python benchmarks/agent_programs.py --json agent_programs.json --check
    python benchmarks/agent_programs.py --agent VENV/bin/mini --sandbox local-unisolated --check
    python benchmarks/agent_programs.py --model DIR --config mini_textbased.yaml      a pretrained model

The program runs beside the sandbox, on generated tasks of SWE-v0, and talks to the endpoint that records. Its
package is installed from the index into an environment of its own (--work_dir), where --agent names none.

- sampled: the policy, random by default, samples its answers. The recorded ids are fed back through the model, each
  segment of its own, and the log-probs compared with the recorded ones; then SAO takes a step on the episodes. A random
  policy calls no tool, so that the program leaves each answer out of its history: every turn is a fork.
- dictated: the answers are written beforehand and the model gives their log-probs, turn by turn as the engine is asked.
  The commands look around, list the sandbox's network interfaces, make the right edit and submit. So histories that go
  on are fed back, too, and what the program does in the sandbox is graded.

--sandbox auto takes Docker where an engine answers; without, nothing isolates the policy's commands.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import json
import platform
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, PrinterCallback, Qwen3Config, Qwen3ForCausalLM
from trl.chat_template_utils import qwen3_chat_template

from agentenv.agents import AgentRunner
from agentenv.errors import AgentEnvError, UsageError
from agentenv.inference import Generation, GenerationRequest, LLMProxy
from agentenv.inference.policy import Policy, load_policy
from agentenv.inference.transformers_engine import TransformersEngine
from agentenv.report.bars import Bar, print_bars
from agentenv.rollout import AsyncController, RolloutConfig
from agentenv.testing import ScriptedModel
from agentenv.trajectory import Trajectory
from agentenv_envs.swe.agents import Launcher, SWEAgentPrograms, mini_swe_agent
from agentenv_envs.swe.embedded.tasks import MODULE
from agentenv_envs.swe.sandbox import open_backend
from agentenv_envs.swe.sandbox.images import ensure_base_image
from agentenv_envs.swe.workspace import EmbeddedTasks
from agentenv_trainers import SAOConfig, SAOTrainer

RELEASE = "mini-swe-agent==2.4.6"
LARGEST_DIFFERENCE = 1e-4
CONTEXT = 16_000
SEED = 3
"""Of the dictated episode's task."""
WORK_DIR = Path(__file__).resolve().parent.parent / ".cache" / "agent_programs"


def find_program(agent: str | None, work_dir: Path) -> tuple[str, str]:
    """The command of mini-swe-agent and the version of its package; installs it where none is named.

    Raises:
        UsageError: it can't be had.
    """
    if agent is None:
        venv = work_dir / "mini-swe-agent"
        program = venv / "bin" / "mini"
        if not program.exists():
            print(f"installing {RELEASE} into {venv}", flush=True)
            _run([sys.executable, "-m", "venv", "--clear", str(venv)])
            # -I: what PYTHONPATH names is not there when the program runs.
            pip = [str(venv / "bin" / "python"), "-I", "-m", "pip", "--disable-pip-version-check"]
            _run([*pip, "install", "-qq", RELEASE])
    else:
        program = Path(agent)
    python = program.parent / "python"  # its environment's
    if not (program.exists() and python.exists()):
        raise UsageError(f"--agent {program}: no command of an environment that has mini-swe-agent")
    ask = "import importlib.metadata as m; print(m.version('mini-swe-agent'))"
    return str(program.absolute()), _run([str(python), "-I", "-c", ask]).strip()


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Bytes as tokens, with the chat template of Qwen3, which has tools."""
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


def random_policy() -> Policy:
    """A tiny model with a long context."""
    torch.manual_seed(0)
    tokenizer = byte_tokenizer()
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


class _Counted:
    """An engine whose sampled tokens are counted by episode."""

    def __init__(self, engine: TransformersEngine) -> None:
        self._engine = engine
        self.tokens: dict[str, int] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def generate(self, request: GenerationRequest) -> Generation:
        generation = await self._engine.generate(request)
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
    sandbox: str = "local-unisolated",
    episodes: int = 2,
    max_turns: int = 8,
    max_tokens: int = 24,
    context: int = CONTEXT,
) -> Step:
    """Play episodes with a program, compare what is recorded with a forward pass, and take one step of SAO on it."""
    model, tokenizer = policy.model, policy.tokenizer
    before = copy.deepcopy(model).eval()
    programs = SWEAgentPrograms(launcher, sandbox=sandbox, levels=(1,))
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
        engine = _Counted(TransformersEngine(model, tokenizer, max_batch=episodes, max_length=context))
        runner = AgentRunner(programs, close=programs.close)
        rollout = config.rollout_config()
        with _Recorded(runner, LLMProxy([engine]), tokenizer, rollout, reward_fn=_turns) as controller:
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


class Dictated(ScriptedModel):
    """Says what is written down, with the log-probs that a model gives it after the prompt of each request."""

    def __init__(self, policy: Policy, said: Sequence[str]) -> None:
        super().__init__(said, tokenizer=policy.tokenizer)
        self._model = policy.model

    async def generate(self, request: GenerationRequest) -> Generation:
        generation = await super().generate(request)
        logprobs = forward_logprobs(self._model, request.prompt_ids, generation.token_ids)
        return dataclasses.replace(generation, logprobs=logprobs.tolist())


def tool_call(command: str) -> str:
    """An answer that calls mini-swe-agent's tool, in the form of Qwen3's template."""
    call = json.dumps({"name": "bash", "arguments": {"command": command}})
    return f"I go on.\n<tool_call>\n{call}\n</tool_call>"


def right_commands() -> list[str]:
    """What solves the task of :data:`SEED`, with a look at the sandbox's network on the way."""
    task = EmbeddedTasks("train", (1,), None).task(SEED)
    edits = [f"sed -i '{edit.line}s/{edit.old}/{edit.new}/' {MODULE}" for edit in task.gold_edits]
    return [
        f"ls; head -3 {MODULE}",
        "echo interfaces: $(tail -n +3 /proc/net/dev | cut -d: -f1)",
        *edits,
        "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT",
    ]


def dictated_episode(launcher: Launcher, policy: Policy, *, sandbox: str = "local-unisolated") -> Trajectory:
    """An episode in which mini-swe-agent solves its task by :func:`right_commands`.

    Raises:
        AgentEnvError: it failed.
    """
    programs = SWEAgentPrograms(launcher, sandbox=sandbox, levels=(1,))
    proxy = LLMProxy([Dictated(policy, [tool_call(command) for command in right_commands()])])
    config = RolloutConfig(
        batch_size=1, num_envs=1, max_tokens_per_turn=500, max_tokens_per_episode=CONTEXT, asynchrony=0.0
    )
    runner = AgentRunner(programs, close=programs.close)
    with AsyncController(runner, proxy, policy.tokenizer, config) as controller:
        (trajectory,) = controller.evaluate(None, [SEED])
    if trajectory.failed:
        raise AgentEnvError(f"the dictated episode failed: {trajectory.info['error']}")
    trajectory.validate()
    return trajectory


def interfaces(trajectory: Trajectory) -> list[str]:
    """Names of the network interfaces that the dictated episode found beside the sandbox's own loopback.

    Raises:
        AgentEnvError: it told of none.
    """
    told = [str(message["content"]) for message in trajectory.messages if message["role"] == "tool"]
    found = re.search(
        r"interfaces: ([\w. -]*)", "\n".join(told)
    )  # the program wraps outputs in forms of its own
    if found is None:
        raise AgentEnvError(f"the sandbox told of no network interfaces: {told}")
    return [name for name in found.group(1).split() if name != "lo"]


def prepare(sandbox: str) -> str:
    """The kind of sandbox that there is; the image of Docker's is made where it is missing."""
    backend = open_backend(sandbox)
    try:
        client = getattr(backend.backend, "client", None)
        if client is not None:
            ensure_base_image(client, progress=lambda line: print(line, flush=True))
        return backend.kind
    finally:
        backend.close()


def measure(options: argparse.Namespace) -> tuple[dict[str, Any], list[Bar]]:
    """Both parts; what was found, and its bars."""
    program, version = find_program(options.agent, options.work_dir)
    policy = load_policy(options.model) if options.model else random_policy()
    context = min(CONTEXT, policy.model.config.max_position_embeddings)
    kind, started = prepare(options.sandbox), time.monotonic()
    step = sao_step(
        mini_swe_agent(program, config=options.config),
        policy,
        sandbox=kind,
        episodes=options.episodes,
        max_turns=options.max_turns,
        max_tokens=options.max_tokens,
        context=context,
    )
    sampled: dict[str, Any] = {
        "policy": policy.name,
        "episodes": len(step.batch),
        "requests": sum(trajectory.turns for trajectory in step.batch),
        "segments": sum(len(trajectory.split()) for trajectory in step.batch),
        "forks": sum(trajectory.info["agent_program"]["forks"] for trajectory in step.batch),
        "sampled_tokens": sum(trajectory.num_action_tokens for trajectory in step.batch),
        "engine_tokens": step.engine_tokens,
        "commands": sum(trajectory.info["commands"] for trajectory in step.batch),
        "solved": sum(bool(trajectory.info["success"]) for trajectory in step.batch),
        "largest_difference": step.difference,
        "loss": step.log["loss"],
        "largest_weight_change": step.changed,
        "seconds": round(time.monotonic() - started, 1),
    }
    started, speaker = time.monotonic(), random_policy()
    trajectory = dictated_episode(mini_swe_agent(program), speaker, sandbox=kind)
    dictated = {
        "requests": trajectory.turns,
        "forks": trajectory.info["agent_program"]["forks"],
        "sampled_tokens": trajectory.num_action_tokens,
        "commands": trajectory.info["commands"],
        "interfaces": interfaces(trajectory),
        "reward": trajectory.reward,
        "largest_difference": largest_difference(speaker.model, trajectory),
        "seconds": round(time.monotonic() - started, 1),
    }
    difference = "recorded log-probs against a forward pass"
    bars = [
        Bar(f"sampled: {difference}", step.difference, "<=", LARGEST_DIFFERENCE, "nats"),
        Bar(
            "sampled: tokens of the engine that no trajectory has",
            step.engine_tokens - sampled["sampled_tokens"],
            "==",
            0,
        ),
        Bar("sampled: weights changed by the SAO step", int(step.changed > 0.0), "==", 1),
        Bar(f"dictated: {difference}", dictated["largest_difference"], "<=", LARGEST_DIFFERENCE, "nats"),
        Bar("dictated: histories rewritten", dictated["forks"], "==", 0),
        Bar("dictated: commands run in the sandbox", dictated["commands"], "==", len(right_commands())),
        Bar("dictated: reward of the right edit", dictated["reward"], "==", 1),
    ]
    if kind == "docker":
        number = len(dictated["interfaces"])
        bars.append(Bar("dictated: network interfaces of the sandbox beside loopback", number, "==", 0))
    found = {
        "program": {"name": "mini-swe-agent", "version": version, "config": options.config},
        "sandbox": kind,
        "sampled": sampled,
        "dictated": dictated,
    }
    return found, bars


def main(argv: Sequence[str] | None = None) -> int:
    """Run, print, write, judge."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--agent", metavar="PATH", help="command `mini`; unset: it is installed")
    parser.add_argument("--work_dir", type=Path, default=WORK_DIR, help="it is installed there")
    parser.add_argument("--sandbox", choices=("auto", "docker", "local-unisolated"), default="auto")
    parser.add_argument("--model", help="folder, or name on the hub; unset: a random one")
    parser.add_argument("--config", default="mini.yaml", help="mini-swe-agent's, of the sampled episodes")
    parser.add_argument("--episodes", type=int, default=2, help="that are sampled")
    parser.add_argument("--max_turns", type=int, default=8, help="of a sampled episode")
    parser.add_argument("--max_tokens", type=int, default=24, help="of a sampled turn")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there")
    parser.add_argument("--check", action="store_true", help="exit 1 where a figure misses its bar")
    options = parser.parse_args(argv)
    try:
        found, bars = measure(options)
    except AgentEnvError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2 if isinstance(error, UsageError) else 1
    program, sandbox = found["program"], found["sandbox"]
    print(f"{program['name']} {program['version']} with {program['config']}; sandbox: {sandbox}")
    for part in ("sampled", "dictated"):
        print(f"{part}: " + ", ".join(f"{name} {value}" for name, value in found[part].items()))
    held = print_bars(bars)
    if options.json:
        settings = {name: str(value) for name, value in vars(options).items()}
        machine = {"platform": platform.platform(), "python": platform.python_version()}
        result = {
            "settings": settings,
            "machine": machine,
            **found,
            "bars": [bar.as_dict() for bar in bars],
        }
        options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 0 if held or not options.check else 1


def _run(command: Sequence[str]) -> str:
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode != 0:
        last = (done.stderr.strip() or done.stdout.strip() or "no output").splitlines()[-1]
        raise UsageError(f"{' '.join(command)}: {last}")
    return done.stdout


if __name__ == "__main__":
    sys.exit(main())
