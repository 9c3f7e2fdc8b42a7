"""How the function that makes an environment gets into another process.

It is pickled by reference, together with the registrations that it names and the list of modules that it needs, so
that the other process can import them beforehand.

Invariants:

* The main script is imported in the other process (as ``__mp_main__``) only if the function refers to it: a training
  script that loads torch costs an environment's process nothing.
* A module that can't be found by its name (a test's, with pytest's import mode "importlib") is loaded from its file.
* A script that would start processes again while it is being imported gets a UsageError that says what to do.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import io
import pickle
import runpy
import sys
import types
import weakref
from dataclasses import dataclass
from typing import Any

import gymnasium
from gymnasium.envs.registration import EnvSpec

import agentenv
from agentenv import registration
from agentenv.errors import UsageError

_ADVICE = (
    "use a class or function at the top level of a module, or register the environment and use "
    "functools.partial(agentenv.make, id)"
)

importing_main = False
"""True in a process that is just importing its parent's main script."""
_main_imported = False
_main_error: BaseException | None = None


@dataclass(frozen=True)
class Imports:
    """What a process must import before it can make an environment."""

    modules: tuple[tuple[str, str | None], ...] = ()
    """Name and file of each."""
    main: tuple[str | None, str | None] | None = None
    """Module name or path of the main script, where it is needed."""


@dataclass(frozen=True)
class EnvPayload:
    """A pickled ``env_fn`` with what it needs."""

    env_fn: bytes
    specs: bytes
    imports: Imports

    def load(self) -> Any:
        """The ``env_fn``, in another process.

        Raises:
            UsageError: it can't be unpickled there.
        """
        if self.imports.main is not None:
            _import_main(self.imports.main)
        try:
            for name, file in self.imports.modules:
                _import_module(name, file)
            for spec in pickle.loads(self.specs):
                gymnasium.registry[spec.id] = spec
            return pickle.loads(self.env_fn)
        except UsageError:
            raise
        except Exception as error:
            raise UsageError(f"env_fn can't be unpickled in a process: {error!r}; {_ADVICE}") from error


def pack(env_fn: Any) -> EnvPayload:
    """Pickle ``env_fn``.

    Raises:
        UsageError: it can't be pickled, or is defined where another process can't import it.
    """
    with contextlib.suppress(TypeError):  # neither hashable nor weakly referable
        if (known := _packed.get(env_fn)) is not None:
            return known
    try:
        pickled, pickler = _dump(env_fn)
    except Exception as error:
        raise UsageError(f"env_fn {env_fn!r} can't be pickled for a process: {error}; {_ADVICE}") from error
    try:
        specs, of_specs = _dump([registration.spec(id) for id in pickler.ids])
    except UsageError:
        raise
    except Exception as error:
        raise UsageError(
            f"the registration of {', '.join(pickler.ids)} can't be pickled for a process: {error}; register with an "
            'entry point "module:Class", and with keyword arguments that can be pickled'
        ) from error
    names = dict.fromkeys([*pickler.modules, *of_specs.modules])
    main = _main_script(env_fn) if "__main__" in names else None
    modules = tuple((name, _file(name)) for name in names if name not in ("__main__", "builtins"))
    payload = EnvPayload(pickled, specs, Imports(modules, main))
    with contextlib.suppress(TypeError):
        _packed[env_fn] = payload
    return payload


def preload(imports: Imports) -> None:
    """Import beforehand, so that forks find everything there; what fails is tried and reported by :meth:`load`."""
    if imports.main is not None:
        with contextlib.suppress(UsageError):
            _import_main(imports.main)
    for name, file in imports.modules:
        with contextlib.suppress(Exception, SystemExit):
            _import_module(name, file)


_packed: weakref.WeakKeyDictionary[Any, EnvPayload] = weakref.WeakKeyDictionary()


class _Pickler(pickle.Pickler):
    """Notes modules and registered environments that a pickle refers to."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self.modules: list[str] = []
        self.ids: list[str] = []

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, type | types.FunctionType) and obj.__module__:
            self.modules.append(obj.__module__)
        elif isinstance(obj, functools.partial) and obj.func is agentenv.make and obj.args:
            self.ids.append(obj.args[0])
        elif isinstance(obj, EnvSpec) and isinstance(obj.entry_point, str):
            self.modules.append(obj.entry_point.partition(":")[0])
        return NotImplemented


def _dump(value: Any) -> tuple[bytes, _Pickler]:
    file = io.BytesIO()
    pickler = _Pickler(file)
    pickler.dump(value)
    return file.getvalue(), pickler


def _file(name: str) -> str | None:
    return getattr(sys.modules.get(name), "__file__", None)


def _main_script(env_fn: Any) -> tuple[str | None, str | None]:
    main = sys.modules["__main__"]
    spec = getattr(main, "__spec__", None)
    name: str | None = spec.name if spec is not None else None
    path: str | None = getattr(main, "__file__", None)
    if name is None and path is None:
        raise UsageError(
            f"env_fn {env_fn!r} is defined in an interactive session or in `python -c`, where another process can't "
            "import it; put it into a module"
        )
    return name, path


def _import_main(main: tuple[str | None, str | None]) -> None:
    """Run the main script under the name ``__mp_main__``, once in a process and its forks.

    Raises:
        UsageError: it could not be imported, now or earlier.
    """
    global importing_main, _main_imported, _main_error
    name, path = main
    if not _main_imported:
        _main_imported = True
        module = types.ModuleType("__mp_main__")
        importing_main = True
        try:
            if name is not None:
                content = runpy.run_module(name, run_name="__mp_main__", alter_sys=True)
            else:
                content = runpy.run_path(str(path), run_name="__mp_main__")
            module.__dict__.update(content)
            sys.modules["__main__"] = sys.modules["__mp_main__"] = module
        except (Exception, SystemExit) as error:
            _main_error = error
        finally:
            importing_main = False
    if _main_error is not None:
        if isinstance(_main_error, UsageError):
            raise _main_error
        raise UsageError(
            f"the main script {name or path}, where env_fn is defined, can't be imported in a process: it raised "
            f"{_main_error!r}. What shall only run in the main process belongs under `if __name__ == '__main__':`"
        ) from _main_error


def _import_module(name: str, file: str | None) -> None:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        missing = error.name is None or f"{name}.".startswith(f"{error.name}.")
        spec = importlib.util.spec_from_file_location(name, file) if missing and file else None
        if spec is None or spec.loader is None:
            raise
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
