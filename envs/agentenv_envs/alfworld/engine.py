"""The engine of ALFWorld as one player uses it: load a game, begin it, give commands.

The stack is alfworld's: TextWorld's PDDL environment under `AlfredDemangler`, which names things, and `AlfredInfos`.

Invariants:
- an engine is never thrown away but lent again: each holds a copy of a library of 34 MB until its process ends;
- calls of all engines of a process exclude each other: what they are built on is not thread-safe; a fork waits for
  the call that is running, and its child can call;
- `sys.argv` and `sys.stdout` are after a call as they were before it;
- with other versions than those that were compared, the engine is alfworld's own, unchanged and slower.
"""

import contextlib
import importlib
import logging
import os
import threading
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any, Final, NamedTuple

from agentenv.errors import InfrastructureError, MissingExtraError, UsageError

from .games import Game
from .translation import Prefetcher, TranslationCache, TranslationFolder, problem_key, untouched_process

__all__ = ["Engine", "State", "borrow_engine", "require_engine", "return_engine", "rules"]

logger = logging.getLogger(__name__)

_COMPARED: Final = {"textworld": "1.7.0", "alfworld": "0.4.2"}
"""Versions whose transcripts were compared."""
_PREFETCH_TIMEOUT_S: Final = 60.0

_lock = threading.RLock()
_idle: list["Engine"] = []
_translations = TranslationCache()


def _before_fork() -> None:
    """Wait for the call that is running: a child could neither end that call nor begin one of its own."""
    _lock.acquire()
    _translations.lock.acquire()


def _after_fork() -> None:
    _translations.lock.release()
    _lock.release()


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork)


class State(NamedTuple):
    """What the engine says after a reset or a command."""

    text: str
    commands: tuple[str, ...]
    """The admissible ones, sorted."""
    won: bool


def require_engine() -> None:
    """Import what the engine needs.

    Raises:
        MissingExtraError: it is not installed.
        UsageError: alfworld can't make the folder of its data, which it does when it is imported.
    """
    try:
        with _calls():
            for module in ("fast_downward", "textworld.envs", "alfworld.agents.environment.alfred_tw_env"):
                importlib.import_module(module)
    except ImportError as error:
        raise MissingExtraError(error.name or "alfworld", "alfworld") from error
    except OSError as error:
        raise UsageError(
            f"alfworld makes the folder of its data when it is imported, and can't: {error}; set ALFWORLD_DATA to a "
            "folder that can be written"
        ) from error


def rules() -> tuple[str, str]:
    """PDDL of the domain and grammar of what the engine says, of the installed alfworld.

    Raises:
        MissingExtraError: it is not installed.
    """
    require_engine()
    from alfworld.info import ALFRED_PDDL_PATH, ALFRED_TWL2_PATH

    return Path(ALFRED_PDDL_PATH).read_text(encoding="utf-8"), Path(ALFRED_TWL2_PATH).read_text(
        encoding="utf-8"
    )


def borrow_engine(cache_dir: Path | None = None) -> "Engine":
    """An engine that nobody else uses; give it back with `return_engine`.

    Args:
        cache_dir: folder of translations.

    Raises:
        MissingExtraError: the extra is not installed.
    """
    with _lock:
        engine = _idle.pop() if _idle else Engine()
    engine.folder = TranslationFolder(cache_dir) if cache_dir is not None and engine.is_fast else None
    return engine


def return_engine(engine: "Engine") -> None:
    """Give an engine back."""
    with _lock:
        _idle.append(engine)


class Engine:
    """One game at a time.

    Args:
        fast: with what is kept between steps and games, where the versions are those that were compared.

    Raises:
        MissingExtraError: the extra is not installed.
    """

    def __init__(self, *, fast: bool = True) -> None:
        self._domain, self._grammar = rules()
        self.is_fast = fast and _versions_are_known()
        self._prefetcher = Prefetcher(_translations)
        self._loaded: Game | None = None
        self.folder: TranslationFolder | None = None
        """Where translations are looked up and left; None: nowhere."""
        with _calls():
            self._env = self._stack()

    def _stack(self) -> Any:
        import textworld
        from alfworld.agents.environment.alfred_tw_env import AlfredDemangler, AlfredInfos

        wanted = textworld.EnvInfos(won=True, admissible_commands=True)
        if self.is_fast:
            from .fast_engine import FastPddlEnv

            base = FastPddlEnv(wanted, _translations)
        else:
            base = textworld.envs.PddlEnv(wanted)
        return AlfredInfos(AlfredDemangler(base, shuffle=False))

    def begin(self, game: Game) -> State:
        """Begin a game anew; the one that is loaded is not loaded again.

        Raises:
            UsageError: its PDDL or its grammar is damaged, or the folder of translations can't be written.
        """
        self.wait_prefetched(game, _PREFETCH_TIMEOUT_S)
        key = problem_key(game.domain or self._domain, game.problem) if self.folder is not None else ""
        if self.folder is not None:
            self.folder.load(key, _translations)
        state = self._begin(game)
        if self.folder is not None:
            self.folder.save(key, _translations)
        return state

    def _begin(self, game: Game) -> State:
        with _calls():
            try:
                if self._loaded != game:
                    self._loaded = None
                    self._env.load(game.engine_data(self._domain, self._grammar))
                    self._loaded = game
                return _state(self._env.reset())
            except (Exception, SystemExit) as error:  # the translator leaves the program by some mistakes
                self._loaded = None
                raise UsageError(
                    f"game {game.file or game.task_id} is damaged: the engine refuses its PDDL or grammar "
                    f"({type(error).__name__}: {str(error)[:200]}); `agentenv alfworld check DIR --play N` finds such "
                    "games"
                ) from error

    def command(self, command: str) -> State:
        """Give a command to the running game.

        Raises:
            InfrastructureError: the engine broke.
        """
        with _calls():
            try:
                return _state(self._env.step(command)[0])
            except Exception as error:
                self._loaded = None
                raise InfrastructureError(
                    f"the engine of ALFWorld broke at {command!r}: {error!r}"
                ) from error

    def facts(self) -> list[tuple[str, tuple[str, ...]]]:
        """What is true in the running game: names with their arguments, all in lower case."""
        with _calls():
            state = self._env.unwrapped._pddl_state
            return [(fact.name, tuple(argument.name for argument in fact.arguments)) for fact in state.facts]

    def prefetch(self, game: Game) -> None:
        """Have the costly part of `begin` done by another process; returns at once."""
        if self.is_fast:
            self._prefetcher.request(game.domain or self._domain, game.problem)

    def wait_prefetched(self, game: Game, timeout_s: float) -> bool:
        """Wait for what `prefetch` began; False: it takes longer."""
        return self._prefetcher.wait(game.domain or self._domain, game.problem, timeout_s)

    def close(self) -> None:
        """End the process that prefetches; the engine stays usable."""
        self._prefetcher.close()


def _versions_are_known() -> bool:
    installed = {name: metadata.version(name) for name in _COMPARED}
    if installed == _COMPARED:
        return True
    logger.warning(
        "ALFWorld runs on %s; transcripts were compared for %s only, so the slower, unchanged engine is used",
        installed,
        _COMPARED,
    )
    return False


def _state(state: Any) -> State:
    return State(str(state.feedback), tuple(state["admissible_commands"]), bool(state["won"]))


@contextlib.contextmanager
def _calls() -> Iterator[None]:
    with _lock, untouched_process():
        yield
