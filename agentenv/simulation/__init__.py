"""Rollouts in virtual time: the production classes over modelled engines and environments.

- `VirtualLoop`: an event loop whose clock jumps to the next timer; a `loop_factory` of `AsyncController`.
- `SimulatedEngine`, `DecodeModel`: an inference engine of which only the time is modelled.
- `SimulatedEnv`, `SimulatedTasks`, `SimulatedTokenizer`: environments that only take time.
- `Workload`: what episodes are like; `Constant`, `Gaussian`, `LogNormal`, `Beta` say how it varies.
- `Run`, `rollout_config`, `simulate`: a training run in virtual time.

`agentenv simulate NAME` reproduces the figures of ROLL Flash with them.
"""

from agentenv.simulation.clock import VirtualLoop
from agentenv.simulation.engine import DecodeModel, SimulatedEngine
from agentenv.simulation.environment import SimulatedEnv, SimulatedTasks, SimulatedTokenizer
from agentenv.simulation.experiment import Outcome, Run, rollout_config, simulate
from agentenv.simulation.workload import Beta, Constant, EpisodePlan, Gaussian, LogNormal, Workload

__all__ = [
    "Beta",
    "Constant",
    "DecodeModel",
    "EpisodePlan",
    "Gaussian",
    "LogNormal",
    "Outcome",
    "Run",
    "SimulatedEngine",
    "SimulatedEnv",
    "SimulatedTasks",
    "SimulatedTokenizer",
    "VirtualLoop",
    "Workload",
    "rollout_config",
    "simulate",
]
