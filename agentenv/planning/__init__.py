"""What a run needs before it is started: memory by model, how many GPUs train, redundancy. `agentenv plan` prints it.

See docs/deployment.md. Arithmetic, not measurement: nothing here has been held against a GPU.
"""

from agentenv.planning.memory import MODELS, Memory, ModelShape, Precision, estimate, read_shape
from agentenv.planning.redundancy import Redundancy, least_redundancy, ready_share
from agentenv.planning.split import Split, StepTimes, Workload, best_split, splits

__all__ = [
    "MODELS",
    "Memory",
    "ModelShape",
    "Precision",
    "Redundancy",
    "Split",
    "StepTimes",
    "Workload",
    "best_split",
    "estimate",
    "least_redundancy",
    "read_shape",
    "ready_share",
    "splits",
]
