"""Measures all cases of a figure over all seeds, in worker processes.

Invariants:

* The result does not depend on the number of processes.
* A cost is measured in a process that has done nothing else.
* An interrupt, or an error in one measurement, ends all of them at once, and the processes with them.
"""

from __future__ import annotations

import concurrent.futures
import multiprocessing
import signal
from collections.abc import Callable

from agentenv.simulation import figures
from agentenv.simulation.figure import Figure, Measurement, Measurements


def measure_all(
    figure: Figure, *, seeds: int, jobs: int, on_done: Callable[[int], None] = lambda done: None
) -> Measurements:
    """Every case with the seeds 0 to ``seeds`` - 1.

    Args:
        figure: what to measure.
        seeds: at least 1.
        jobs: processes; 1: all here.
        on_done: called with the number of measurements done, as they end.
    """
    work = [(case, seed) for seed in range(seeds) for case in figure.cases]
    measured: dict[tuple[str, int], Measurement] = {}
    if (jobs == 1 or len(work) == 1) and not figure.measures_cost:
        for case, seed in work:
            measured[case, seed] = figure.measure(case, seed)
            on_done(len(measured))
    else:
        # Spawned, not forked: the caller may have threads (a progress line).
        context = multiprocessing.get_context("spawn")
        others = set(multiprocessing.active_children())
        pool = concurrent.futures.ProcessPoolExecutor(
            min(jobs, len(work)),
            mp_context=context,
            initializer=_leave_interrupts_to_the_caller,
            max_tasks_per_child=1 if figure.measures_cost else None,
        )
        try:
            running = {pool.submit(_measure, figure.name, *item): item for item in work}
            for future in concurrent.futures.as_completed(running):
                measured[running[future]] = future.result()
                on_done(len(measured))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for process in set(multiprocessing.active_children()) - others:
                process.terminate()
            raise
        pool.shutdown()
    return {case: [measured[case, seed] for seed in range(seeds)] for case in figure.cases}


def _leave_interrupts_to_the_caller() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _measure(name: str, case: str, seed: int) -> Measurement:
    return figures.load(name).measure(case, seed)
