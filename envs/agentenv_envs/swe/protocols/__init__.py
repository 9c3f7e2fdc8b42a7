"""How an agent of the SWE environment speaks: `bash` (default), `r2e` and `tools`.

Invariants:
- every protocol does the same things in the same sandbox: a command, an edit, the end; only the form differs;
- an object of a protocol serves one episode.
"""

from collections.abc import Callable, Mapping
from typing import Final

from agentenv.errors import UsageError

from .base import AgentProtocol, Call, Limits, Malformed, format_observation
from .bash import SUBMIT, BashProtocol, as_action, first_observation, parse_action
from .r2e import R2EProtocol
from .tools import ToolsProtocol

__all__ = [
    "PROTOCOLS",
    "SUBMIT",
    "AgentProtocol",
    "BashProtocol",
    "Call",
    "Limits",
    "Malformed",
    "R2EProtocol",
    "ToolsProtocol",
    "as_action",
    "first_observation",
    "format_observation",
    "open_protocol",
    "parse_action",
]

PROTOCOLS: Final[Mapping[str, Callable[[], AgentProtocol]]] = {
    "bash": BashProtocol,
    "r2e": R2EProtocol,
    "tools": ToolsProtocol,
}


def open_protocol(name: str) -> AgentProtocol:
    """A protocol for one episode.

    Raises:
        UsageError: there is none of this name.
    """
    if name not in PROTOCOLS:
        raise UsageError(f"protocol is {name!r}; allowed are: {', '.join(PROTOCOLS)}")
    return PROTOCOLS[name]()
