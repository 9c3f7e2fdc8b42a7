"""How many GPUs of a machine, or of several, train, and how many sample.

* Of several machines, each trains or samples as a whole, and an engine's GPUs are on one.
* Memory decides which splits there are: the trainer's states are shared out by FSDP2, an engine is spread over 1, 2, 4
  or 8 GPUs (tensor parallel) and there are as many engines as fit in the rest.
* Proposition 2 of ROLL Flash decides among them, where times are known: a step takes at most
  max(N mu / engine GPUs + L / alpha, E N mu_t / trainer GPUs), and with alpha 0, where the two sides take turns,
  N mu / engine GPUs + L + E N mu_t / trainer GPUs. The optimum over real shares is
  :func:`agentenv.simulation.theory.best_share`; here it is searched among whole GPUs.
* Without times the fewest GPUs train: agents' rollouts are the larger part of a step.

Source: ROLL Flash, arXiv 2510.11345, Proposition 2; with alpha in the place of alpha + 1, see docs/simulation.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from agentenv.errors import UsageError
from agentenv.planning.memory import Memory, ModelShape, Precision, estimate

__all__ = ["Split", "StepTimes", "Workload", "best_split", "splits"]

GIB = 1 << 30
USABLE = 0.9
"""Share of a GPU that is planned with; the rest is for what is not counted."""
_ENGINE_OVERHEAD = 2 * GIB
"""Of an engine on each of its GPUs: its activations and graphs. A guess."""
_TENSOR_PARALLEL = (1, 2, 4, 8)


@dataclass(frozen=True)
class StepTimes:
    """Measured seconds, from which a step's time follows.

    Raises:
        UsageError: a value is out of range.
    """

    rollout_s: float
    """mu: GPU-seconds of the engines for an episode, waiting of the environment included."""
    train_s: float
    """mu_t: GPU-seconds of the trainer for an episode."""
    batch: int = 32
    """N: episodes of a step."""
    longest_s: float = 0.0
    """L: the longest episode."""
    asynchrony: float = 1.0
    """alpha; 0 is synchronous."""

    def __post_init__(self) -> None:
        for option, value, least in (
            ("--rollout-s", self.rollout_s, 0.0),
            ("--train-s", self.train_s, 0.0),
            ("--batch", self.batch, 0.0),
        ):
            if not least < value < float("inf"):
                raise UsageError(f"{option} is {value}, must be above 0")
        if not 0.0 <= self.longest_s < float("inf"):
            raise UsageError(f"--longest-s is {self.longest_s}, must be 0 or more")
        if not 0.0 <= self.asynchrony < float("inf"):
            raise UsageError(f"--asynchrony is {self.asynchrony}, must be 0 or more")

    def step_s(self, engine_gpus: int, trainer_gpus: int) -> float:
        """Most that a step takes."""
        rollout = self.batch * self.rollout_s / engine_gpus
        train = self.batch * self.train_s / trainer_gpus
        if not self.asynchrony:
            return rollout + self.longest_s + train
        return max(rollout + self.longest_s / self.asynchrony, train)

    def shared_step_s(self) -> float:
        """The same where one GPU does both; the two are thought to slow each other by as much as each works."""
        return self.batch * (self.rollout_s + self.train_s) + self.longest_s / (self.asynchrony or 1.0)


@dataclass(frozen=True)
class Workload:
    """What is trained, and how.

    Args:
        shape: of the model.
        precision, context, num_envs, reference, lora: as of :func:`~agentenv.planning.memory.estimate`.
    """

    shape: ModelShape
    precision: Precision = "float32"
    context: int = 16_384
    num_envs: int = 32
    reference: bool = False
    lora: bool = False

    @property
    def memory(self) -> Memory:
        """What it holds."""
        return estimate(
            self.shape,
            precision=self.precision,
            context=self.context,
            num_envs=self.num_envs,
            reference=self.reference,
            lora=self.lora,
        )


@dataclass(frozen=True)
class Split:
    """One way to use the GPUs."""

    trainer_gpus: int
    engines: int
    tensor_parallel: int
    """GPUs of an engine."""
    shared: bool
    """One GPU trains and samples."""
    trainer_bytes: int
    """On each GPU that trains; with those of the engine where it is shared."""
    engine_bytes: int
    """On each GPU of an engine: weights, and keys and values of its part of the episodes, as far as they fit."""
    kv_tokens: int
    """Tokens in flight that all engines have room for, at most those of all episodes."""
    step_s: float | None = None

    @property
    def engine_gpus(self) -> int:
        """Of all engines."""
        return self.engines * self.tensor_parallel


def splits(
    work: Workload, gpus: int, gpu_gib: float, times: StepTimes | None = None, *, machines: int = 1
) -> list[Split]:
    """All splits that fit, by the number of GPUs that train.

    Args:
        work: what is trained.
        gpus: of each machine.
        gpu_gib: of each GPU.
        times: measured; None: unknown.
        machines: how many; of several, each trains or samples as a whole.

    Raises:
        UsageError: a size is out of range.
    """
    if machines < 1:
        raise UsageError(f"--machines is {machines}, must be at least 1")
    if gpus < 1:
        raise UsageError(f"--gpus is {gpus}, must be at least 1")
    if not 0.0 < gpu_gib < float("inf"):
        raise UsageError(f"--gpu-gib is {gpu_gib}, must be above 0")
    budget = int(gpu_gib * GIB * USABLE)
    if gpus * machines == 1:
        return list(_shared(work, budget, times))
    return list(_apart(work, gpus, budget, times, machines))


def best_split(
    work: Workload, gpus: int, gpu_gib: float, times: StepTimes | None = None, *, machines: int = 1
) -> Split:
    """The fastest split where times are known, else the one in which the fewest GPUs train.

    Args:
        work, gpus, gpu_gib, times, machines: as of :func:`splits`.

    Raises:
        UsageError: none fits.
    """
    found = splits(work, gpus, gpu_gib, times, machines=machines)
    if not found:
        memory = work.memory
        need = (memory.states + memory.engine) / GIB
        raise UsageError(
            f"{work.shape.name} in {work.precision} does not fit {gpus * machines} x {gpu_gib:g} GiB: trainer and one "
            f"engine alone hold {need:,.0f} GiB; more GPUs, --dtype bfloat16, --lora, or a shorter --context"
        )
    return min(found, key=lambda split: (split.step_s or 0.0, split.trainer_gpus))


def _shared(work: Workload, budget: int, times: StepTimes | None) -> Iterator[Split]:
    memory = work.memory
    trainer = memory.states + memory.activations
    free = budget - trainer - memory.engine - _ENGINE_OVERHEAD
    per_token = work.shape.kv_bytes(work.precision)
    tokens = min(work.num_envs * work.context, free // per_token)
    if tokens < work.context:
        return
    engine = memory.engine + _ENGINE_OVERHEAD + tokens * per_token
    seconds = None if times is None else times.shared_step_s()
    yield Split(1, 1, 1, True, trainer + engine, engine, tokens, seconds)


def _apart(work: Workload, gpus: int, budget: int, times: StepTimes | None, machines: int) -> Iterator[Split]:
    memory, per_token = work.memory, work.shape.kv_bytes(work.precision)
    each = gpus if machines > 1 else 1
    for trainer_gpus in range(each, gpus * machines, each):
        trainer = -(-memory.states // trainer_gpus) + memory.activations
        if trainer > budget:
            continue
        for width in _TENSOR_PARALLEL:
            if machines > 1:  # an engine stays on one
                engines = (machines - trainer_gpus // gpus) * (gpus // width)
            else:
                engines = (gpus - trainer_gpus) // width
            free = width * (budget - _ENGINE_OVERHEAD) - memory.engine
            room = free // per_token  # tokens of one engine
            if engines < 1 or room < work.context or work.shape.kv_heads % width:
                continue
            wanted = -(-work.num_envs // engines) * work.context
            held = _ENGINE_OVERHEAD + (memory.engine + min(room, wanted) * per_token) // width
            tokens = min(engines * room, work.num_envs * work.context)
            seconds = None if times is None else times.step_s(engines * width, trainer_gpus)
            yield Split(trainer_gpus, engines, width, False, trainer, held, tokens, seconds)
            break  # wider engines only talk more
