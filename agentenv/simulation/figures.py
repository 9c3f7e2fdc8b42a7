"""The figures that can be simulated, by name. A figure's module is imported when it is asked for."""

from __future__ import annotations

import difflib
import importlib

from agentenv.errors import UsageError
from agentenv.simulation.figure import Figure

_MODULES = {
    "fig7": "fig7",
    "fig8": "fig8",
    "fig9": "fig9",
    "fig10": "fig10",
    "async": "async_training",
    "theory": "theory",
    "scale": "scale",
}
NAMES = tuple(_MODULES)


def load(name: str) -> Figure:
    """A figure by its name.

    Raises:
        UsageError: there is none of that name.
    """
    if name not in _MODULES:
        close = difflib.get_close_matches(name, NAMES, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"there are {', '.join(NAMES)}"
        raise UsageError(f"unknown simulation {name!r}; {hint}")
    figure: Figure = importlib.import_module(f"agentenv.simulation.{_MODULES[name]}").FIGURE
    return figure
