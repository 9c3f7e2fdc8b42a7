"""Our environments in TRL's GRPOTrainer, as it is released; runs the example of docs/interop.md."""

import logging
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("trl")

from datasets import Dataset  # noqa: E402
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers  # noqa: E402
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM  # noqa: E402
from trl import GRPOConfig, GRPOTrainer  # noqa: E402
from trl.chat_template_utils import qwen3_chat_template  # noqa: E402

import agentenv  # noqa: E402
from agentenv.errors import RolloutError, UsageError  # noqa: E402
from agentenv.interop.trl import MAX_FAILURES, EnvironmentFactory, environment_factory  # noqa: E402
from agentenv.testing import EchoEnv  # noqa: E402

WORDS = ("apple", "brook", "cedar", "delta", "ember", "fjord", "grape", "heron")
HEAD, TAIL = '<tool_call>\n{"name": "act", "arguments": {"action": "', '"}}\n</tool_call>'


class UnrewardedEcho(EchoEnv):
    """The same without a reward."""

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        observation, _, terminated, truncated, info = super().step(action)
        return observation, 0.0, terminated, truncated, info


class Broken(agentenv.BaseEnv):
    """Fails at `reset`, or else at `step`."""

    def __init__(self, fail_at: str = "reset") -> None:
        self.fail_at, self.closed = fail_at, 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        if self.fail_at == "reset":
            raise OSError("no sandbox")
        return "begin", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        raise OSError("no sandbox")

    def close(self) -> None:
        self.closed += 1


@pytest.fixture(scope="module", autouse=True)
def _quiet() -> Iterator[None]:
    patch = pytest.MonkeyPatch()
    patch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    yield
    patch.undo()


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE, learned from what TRL will render, with the template of Qwen3."""
    bare = Tokenizer(models.BPE())
    bare.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bare.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    prompt = Qwen3Rendering(bare).prompt()
    trainer = trainers.BpeTrainer(
        vocab_size=700,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bare.train_from_iterator([prompt], trainer)
    bare.add_tokens([HEAD, TAIL, *WORDS])
    return Qwen3Rendering(bare).tokenizer


class Qwen3Rendering:
    """A tokenizer with the template, and the prompt of an episode of Echo-v0 with its tool."""

    def __init__(self, bare: Tokenizer) -> None:
        self.tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=bare, pad_token="<|endoftext|>", eos_token="<|im_end|>", padding_side="left"
        )
        self.tokenizer.chat_template = qwen3_chat_template

    def prompt(self, word: str = "apple") -> str:
        with environment_factory("Echo-v0") as factory:
            text = self.tokenizer.apply_chat_template(
                [{"role": "user", "content": f"Say the word {word}."}],
                tools=[factory().act],  # type: ignore[attr-defined]
                add_generation_prompt=True,
                tokenize=False,
            )
        return str(text)


@pytest.fixture(scope="module")
def caller(tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    """A tiny model that has learned one thing: to call the tool with any of the words."""
    torch.manual_seed(0)
    rng = random.Random(0)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=len(tokenizer),
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=16,
            intermediate_size=64,
            max_position_embeddings=1024,
            pad_token_id=tokenizer.pad_token_id,
            eos_token_id=tokenizer.eos_token_id,
            tie_word_embeddings=False,
        )
    )
    rendering = Qwen3Rendering(tokenizer.backend_tokenizer)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-2)
    for _ in range(60):
        prompt = rendering.prompt(rng.choice(WORDS))
        texts = [f"{prompt}{HEAD}{rng.choice(WORDS)}{TAIL}<|im_end|>" for _ in range(8)]
        ids = torch.tensor([tokenizer(text)["input_ids"] for text in texts])
        labels = ids.clone()
        labels[:, :-4] = -100
        optimizer.zero_grad()
        model(input_ids=ids, labels=labels).loss.backward()
        optimizer.step()
    return model


def train(
    caller: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    factory: EnvironmentFactory,
    folder: Path,
    tasks: int = 4,
    **changes: Any,
) -> GRPOTrainer:
    """Two steps of TRL's GRPO, eight rollouts of a task in each; the model is changed in a copy."""
    args = GRPOConfig(
        **{
            "output_dir": str(folder),
            "per_device_train_batch_size": 8,
            "num_generations": 8,
            "max_completion_length": 160,
            "max_tool_calling_iterations": 4,
            "max_steps": 2,
            "learning_rate": 1e-3,
            "logging_steps": 1,
            "beta": 0.0,
            "use_cpu": True,
            "report_to": "none",
            "save_strategy": "no",
            "disable_tqdm": True,
            "seed": 3,
            **changes,
        }
    )
    model = Qwen3ForCausalLM(caller.config)
    model.load_state_dict(caller.state_dict())
    trainer = GRPOTrainer(
        model,
        args=args,
        train_dataset=Dataset.from_list(factory.tasks(tasks)),
        processing_class=tokenizer,
        environment_factory=factory,
    )
    trainer.train()
    return trainer


def moved(trainer: GRPOTrainer, caller: Qwen3ForCausalLM) -> float:
    """Greatest change of a weight."""
    old, new = caller.state_dict(), trainer.accelerator.unwrap_model(trainer.model).state_dict()
    return max(float((new[name] - old[name]).abs().max()) for name in old)


@pytest.fixture(scope="module")
def trained(
    caller: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, tmp_path_factory: pytest.TempPathFactory
) -> tuple[GRPOTrainer, list[Any]]:
    """A training on Echo-v0, with the rollouts of its last step."""
    with environment_factory("Echo-v0") as factory:
        trainer = train(caller, tokenizer, factory, tmp_path_factory.mktemp("trl"))
        return trainer, list(trainer.environments)


def test_rewards_of_the_environment_reach_the_loss_of_trls_grpo(
    trained: tuple[GRPOTrainer, list[Any]], caller: Qwen3ForCausalLM
) -> None:
    trainer, rollouts = trained
    steps = [line for line in trainer.state.log_history if "reward" in line]
    assert len(steps) == 2
    for line in steps:
        assert line["tools/call_frequency"] > 1.5, "the model called the tool, more than once a rollout"
        assert line["tools/failure_frequency"] == 0.0
        assert 0.0 < line["rewards/Echo-v0/mean"] < 1.0
        assert line["reward"] == line["rewards/Echo-v0/mean"]
    assert steps[-1]["reward"] == pytest.approx(sum(r.get_reward() for r in rollouts) / 8)
    assert moved(trainer, caller) > 1e-4


def test_without_rewards_trl_changes_no_weight(
    caller: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    with environment_factory(UnrewardedEcho) as factory:
        trainer = train(caller, tokenizer, factory, tmp_path, max_steps=1)
    assert trainer.state.log_history[0]["tools/call_frequency"] > 1.5
    assert moved(trainer, caller) == 0.0


def test_the_example_of_the_documentation_runs(
    caller: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    documented: Callable[..., str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    caller.save_pretrained("model")
    tokenizer.save_pretrained("model")
    small = "max_steps=1, num_generations=2, per_device_train_batch_size=2, use_cpu=True, report_to='none'"
    exec(
        documented("environment_factory", **{"Qwen/Qwen3-0.6B": "model", "max_steps=100": small}), found := {}
    )
    assert "rewards/GuessNumber-v0/mean" in found["trainer"].state.log_history[-1]


def test_rollouts_of_a_group_play_one_task(trained: tuple[GRPOTrainer, list[Any]]) -> None:
    _, rollouts = trained
    assert len({id(rollout) for rollout in rollouts}) == 8
    with environment_factory("Echo-v0") as factory:
        one, two = factory(), factory()
        for seed in range(5):
            assert one.reset(seed=seed) == two.reset(seed=seed) == EchoEnv().reset(seed=seed)[0]


def test_a_rollout_is_the_environment_step_by_step() -> None:
    env = EchoEnv()
    word = env.reset(seed=4)[0].removesuffix(".").split()[-1]
    with environment_factory(EchoEnv, tool="say", description="Say a word.") as factory:
        rollout: Any = factory()
        assert rollout.reset(seed=4, prompt=[{"role": "user", "content": ""}]) == f"Say the word {word}."
        assert rollout.say(action="no") == "You said: no"
        assert rollout.get_reward() == 0.0
        assert rollout.say(action=word) == "Right."
        assert rollout.say(action=word).startswith("The episode is over")
        assert rollout.get_reward() == 1.0


def test_the_turn_limit_of_the_environment_ends_an_episode() -> None:
    with environment_factory("Echo-v0", {"max_turns": 9}, max_turns=2) as factory:
        rollout: Any = factory()
        word = rollout.reset(seed=0).removesuffix(".").split()[-1]
        answers = [rollout.act(action=action) for action in ("a", "b", word)]
    assert answers == ["You said: a", "You said: b", "The episode is over; nothing you do counts any more."]
    assert rollout.get_reward() == 0.0


def test_instructions_stand_before_the_first_observation() -> None:
    with environment_factory("Echo-v0") as factory:
        row = factory.tasks(1, first_seed=7, instructions="Play well.")[0]
        assert row == {"prompt": [{"role": "user", "content": "Play well."}], "seed": 7}
        assert factory().reset(**row).startswith("\n\nSay the word ")


def test_a_failed_episode_has_no_reward_and_many_in_a_row_stop_the_run(
    caplog: pytest.LogCaptureFixture,
) -> None:
    made: list[Broken] = []

    def make() -> Broken:
        made.append(Broken("step"))
        return made[-1]

    with caplog.at_level(logging.WARNING), environment_factory(make) as factory:
        rollout: Any = factory()
        for _ in range(MAX_FAILURES - 1):
            rollout.reset(seed=0)
            with pytest.raises(OSError, match="no sandbox"):
                rollout.act(action="x")
            assert rollout.get_reward() is None
        rollout.reset(seed=0)
        with pytest.raises(RolloutError, match="16 episodes in a row failed"):
            rollout.act(action="x")
    assert "counts for nothing: OSError: no sandbox" in caplog.text
    assert [env.closed for env in made] == [1]
    with environment_factory(Broken) as factory:
        assert factory().reset(seed=0) == "The environment could not be started."


def test_rows_without_a_seed_are_refused() -> None:
    with environment_factory("Echo-v0") as factory, pytest.raises(UsageError, match=r"factory\.tasks\(N\)"):
        factory().reset(prompt=[{"role": "user", "content": ""}])


class Remote(agentenv.AsyncEnv):
    """Has coroutines."""


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: environment_factory("Ecko-v0"), "did you mean 'Echo-v0'"),
        (lambda: environment_factory("Echo-v0", {"turns": 3}), "takes no argument 'turns'"),
        (lambda: environment_factory("Echo-v0", tool="get_reward"), "tool must be"),
        (lambda: environment_factory("Echo-v0", tool="_act"), "tool must be"),
        (lambda: environment_factory("Echo-v0", max_turns=0), "max_turns must be at least 1"),
        (lambda: environment_factory(EchoEnv, {"max_turns": 3}), "kwargs go with the name"),
        (lambda: environment_factory(Remote), "is an AsyncEnv"),
    ],
)
def test_bad_arguments_are_one_clear_error(make: Callable[[], object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        make()
