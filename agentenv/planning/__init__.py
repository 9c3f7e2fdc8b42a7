"""What a run needs of GPUs before it is started: memory by model, and how many train. `agentenv plan` prints it.

See docs/deployment.md. Arithmetic, not measurement: nothing here has been held against a GPU.
"""

from agentenv.planning.memory import MODELS, Memory, ModelShape, Precision, estimate, read_shape
from agentenv.planning.split import Split, StepTimes, Workload, best_split, splits

__all__ = [
    "MODELS",
    "Memory",
    "ModelShape",
    "Precision",
    "Split",
    "StepTimes",
    "Workload",
    "best_split",
    "estimate",
    "read_shape",
    "splits",
]
