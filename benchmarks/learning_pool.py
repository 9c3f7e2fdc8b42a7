"""Runs side by side, each in a process of its own, and none of them twice.

A process that has imported torch and trl is forked for each run, which saves the seconds that those imports take.

Invariants:
- a run that is finished has one JSON file in the directory, written whole or not at all;
- a run that failed leaves NAME.failed.json and nothing else, and is tried again by the next start;
- a finished run of other settings under the same name is an error: results of two experiments are never mixed;
- when this process ends, however it ends, no run goes on for longer than a training step.
"""

import json
import multiprocessing
import os
import signal
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from learning_methods import Run

from agentenv.errors import UsageError
from agentenv.report.progress import Progress, format_seconds

_PRELOADED = ["trl.trainer.grpo_trainer", "agentenv_trainers", "agentenv.inference.transformers_engine"]
_NOTICE_S = 1.0


class RunningRun:
    """A run and its process."""

    def __init__(self, run: Run, policy: Path, directory: Path) -> None:
        self.run = run
        self.steps = 0
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(_PRELOADED)
        self.messages, theirs = context.Pipe(duplex=False)
        self.process = context.Process(
            target=work, args=(run, policy, directory, theirs), name=run.name, daemon=True
        )
        self.process.start()
        theirs.close()

    def listen(self) -> bool:
        """Take what the process has said; False: it has ended."""
        try:
            while self.messages.poll():
                self.steps = self.messages.recv()
        except (EOFError, ConnectionResetError):
            self.process.join()
            return False
        return True


def run_all(
    runs: Sequence[Run], policy: Path, directory: Path, *, workers: int, progress: Progress, title: str
) -> dict[str, dict[str, Any]]:
    """The results of all runs, by name; those that failed are not among them.

    Args:
        runs: in the order in which they are started.
        policy: folder of the policy that they start from.
        directory: where results are and go to.
        workers: most runs at a time.
        progress: shows what is going on, and a line for every run that ended.
        title: of this stage.

    Raises:
        UsageError: a run was made with other settings before.
    """
    directory.mkdir(parents=True, exist_ok=True)
    results = {run.name: found for run in runs if (found := finished(run, directory)) is not None}
    waiting = [run for run in runs if run.name not in results]
    if results:
        progress.note(f"{title}: {len(results)} of {len(runs)} runs are finished already")
    progress.stage(title, unit="run", total=len(runs), done=len(results))
    ended = len(results)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    running: list[RunningRun] = []
    try:
        while waiting or running:
            while waiting and len(running) < workers:
                running.append(RunningRun(waiting.pop(0), policy, directory))
            wait([item.messages for item in running], timeout=_NOTICE_S)
            for item in [item for item in running if not item.listen()]:
                running.remove(item)
                ended += 1
                result = finished(item.run, directory)
                if result is not None:
                    results[item.run.name] = result
                progress.note(describe(item, result, directory))
            now = ", ".join(f"{item.run.name} {item.steps}/{item.run.sizes.steps}" for item in running)
            progress.update(ended, {"now": now} if now else {})
    finally:
        for item in running:
            item.process.terminate()
            item.process.join()
    return results


def finished(run: Run, directory: Path) -> dict[str, Any] | None:
    """The result of a run that is finished, or None.

    Raises:
        UsageError: it was made with other settings.
    """
    path = directory / f"{run.name}.json"
    if not path.exists():
        return None
    result: dict[str, Any] = json.loads(path.read_text())
    wanted = json.loads(json.dumps(run.as_dict()))
    if result["run"] != wanted:
        different = sorted(name for name in wanted if result["run"].get(name) != wanted[name])
        raise UsageError(
            f"{path} was made with other settings ({', '.join(different)}): give another --output_dir"
        )
    return result


def describe(item: RunningRun, result: dict[str, Any] | None, directory: Path) -> str:
    """A line about a run that ended."""
    name = item.run.name
    if result is None:
        failure = directory / f"{name}.failed.json"
        if not failure.exists():
            # It was killed, and could not write down why.
            story = {"run": item.run.as_dict(), "error": f"its process ended with {item.process.exitcode}"}
            write(failure, story)
        return f"{name}: FAILED: {json.loads(failure.read_text())['error']}"
    final = result["final"]
    low, high = final["interval"]
    return (
        f"{name}: success {final['success']:.3f} [{low:.3f}, {high:.3f}] "
        f"after {format_seconds(result['seconds']['total'])}"
    )


def work(
    run: Run,
    policy: Path,
    directory: Path,
    messages: Connection,
    play: Callable[..., dict[str, Any]] | None = None,
) -> None:
    """A run from start to file; the whole life of a process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    os.nice(1)  # a person at the machine comes first
    failure = directory / f"{run.name}.failed.json"
    try:
        if play is None:
            from learning_run import play
        result = play(run, policy, lambda step, _: messages.send(step))
    except BrokenPipeError:
        return  # the parent is gone
    except BaseException as error:
        story = {
            "run": run.as_dict(),
            "error": f"{type(error).__name__}: {error}",
            "traceback": traceback.format_exc(),
        }
        write(failure, story)
        return
    write(directory / f"{run.name}.json", result)
    failure.unlink(missing_ok=True)


def write(path: Path, content: Any) -> None:
    """A JSON file, whole or not at all."""
    staged = path.with_suffix(".part")
    staged.write_text(json.dumps(content) + "\n")
    os.replace(staged, path)
