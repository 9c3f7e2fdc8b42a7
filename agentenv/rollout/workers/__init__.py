"""Where an environment runs: in the event loop (inline), in a thread, or in a process that can be killed.

Which one is the environment's choice (the class attribute ``worker``, see :class:`agentenv.BaseEnv`) unless the
configuration names one.
"""

from agentenv.rollout.workers.base import EnvFn, EnvWorker, WorkerKind, make_worker, worker_kind

__all__ = ["EnvFn", "EnvWorker", "WorkerKind", "make_worker", "worker_kind"]
