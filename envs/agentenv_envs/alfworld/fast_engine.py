"""TextWorld's PDDL environment with the same output at a fraction of the cost; for TextWorld 1.7.0 and alfworld 0.4.2.

The state, the rules and the sentences stay TextWorld's; what it computes again and again is kept: the parsed grammar,
the translation of the problem, and what each action is called. Importing this module needs the extra `alfworld`.

Invariants:
- commands, texts and the end of the game are those of `PddlEnv` (a test plays both side by side);
- not thread-safe, like what it derives from: the caller holds a lock;
- nothing of TextWorld stays replaced after a call.
"""

import contextlib
import copy
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

import fast_downward
from textworld.core import GameState
from textworld.envs import PddlEnv
from textworld.envs.pddl import logic as pddl_logic
from textworld.logic import Action, Placeholder, Variable

from .fast_grammar import FastGrammar
from .translation import TranslationCache

__all__ = ["FastPddlEnv"]

_TASK: Final = re.compile(r'("task"\s*:\s*\[\s*\{\s*"rhs"\s*:\s*)("(?:[^"\\]|\\.)*")')
_NO_TASK: Final = '"(task)"'
_STATIC: Final = "receptacleatlocation("
"""A condition on this alone never changes: no action of the domain moves a receptacle."""

_LOGICS_KEPT: Final = 8
_logics: dict[tuple[str, str], Any] = {}
"""Parsed once per grammar, the sentence of the task left out: all official games share one."""


class FastPddlEnv(PddlEnv):  # type: ignore[misc]
    """In place of `PddlEnv`, under the same wrappers.

    Args:
        infos: as for `PddlEnv`; of the requests only `won` and `admissible_commands` are served.
        translations: where translations are kept.
    """

    def __init__(self, infos: Any, translations: TranslationCache) -> None:
        super().__init__(infos)
        self._translations = translations
        self._is_fresh = False

    def load(self, data: Mapping[str, Any]) -> None:
        """Take on a game."""
        self._game_data, self._game_file = data, None
        self.walkthrough = data.get("walkthrough")
        self._logic = _game_logic(data["pddl_domain"], data["grammar"])
        self._new_state()
        self._entity_infos = self._get_entity_infos()
        self._named: dict[str, tuple[Any, str]] = {}
        self._is_fresh = True

    def reset(self) -> GameState:
        """Begin the loaded game."""
        if not self._is_fresh:
            self._new_state()
        self._is_fresh = False
        self.prev_state: Any = None
        self.state = GameState()
        self._last_action: Any = None
        self._moves = 0
        self.state.feedback = self.state.raw = self._logic.grammar.derive("#intro#", self._context({}))
        self._gather_infos()
        return self.state

    def step(self, command: str) -> tuple[GameState, int, bool]:
        """Carry out an admissible command; any other changes nothing."""
        self.prev_state, self.state = self.state, GameState()
        self.state.last_command = command
        self._last_action = self.prev_state["_actions"].get(command)
        if self._last_action is None:
            self.state.feedback = "Nothing happens."
        else:
            action = self._last_action
            self._pddl_state.apply(action)
            self.state.feedback = self._logic.grammar.derive(
                action.feedback_rule, self._context(action.mapping)
            )
            self._moves += 1
        self.state.raw = self.state.feedback
        self._gather_infos()
        self.state["score"] = 1 if self.state["won"] else 0
        self.state["done"] = self.state["won"]
        return self.state, self.state["score"], self.state["done"]

    def _new_state(self) -> None:
        with _replaced_translator(self._translations):
            self._pddl_state = pddl_logic.PddlState(
                self.downward_lib, self._game_data["pddl_problem"], self._logic
            )

    def _context(self, mapping: Mapping[Any, Any]) -> dict[str, Any]:
        return {
            "state": self._pddl_state,
            "variables": {
                placeholder.name: self._entity_infos[var.name] for placeholder, var in mapping.items()
            },
            "mapping": mapping,
            "entity_infos": self._entity_infos,
        }

    def _gather_infos(self) -> None:
        library = self.downward_lib
        operators = (fast_downward.Operator * library.get_applicable_operators_count())()
        library.get_applicable_operators(operators)
        self._pddl_state._operators = {operator.id: operator for operator in operators}
        actions: dict[str, Any] = {}
        seen: set[str] = set()
        for operator in operators:
            name = operator.name
            if name not in seen:
                seen.add(name)
                action, command = self._action(name)
                # The first of those that are called alike, as in a list.
                if command not in actions:
                    action.id = operator.id
                    actions[command] = action
        self.state["_actions"] = actions
        self.state["admissible_commands"] = sorted(actions)
        self.state["won"], self.state["lost"] = self._pddl_state.check_goal(), False

    def _action(self, name: str) -> tuple[Any, str]:
        """An action and what it is called, by the planner's name of it."""
        known = self._named.get(name)
        if known is not None:
            return known
        kind, *arguments = name.split()
        rule = self._logic.actions[kind]
        action = Action(name=kind, preconditions=[], postconditions=[])
        parameters = self._pddl_state._actions[kind].parameters
        action.mapping = {
            Placeholder(parameter.name.strip("?"), parameter.type_name): Variable(
                argument, parameter.type_name
            )
            for parameter, argument in zip(parameters, arguments, strict=False)
        }
        action.feedback_rule = rule.feedback_rule
        command = self._logic.grammar.derive(rule.template, self._context(action.mapping))
        if _is_static(rule.template):
            self._named[name] = action, command
        return action, command


def _is_static(template: str) -> bool:
    """What the template says depends on the action's arguments alone."""
    if "|" not in template:
        return True
    condition = template.partition("|")[2]
    return _STATIC in condition and "&" not in condition


def _game_logic(domain: str, grammar: str) -> Any:
    """Parsed rules and grammar, with the game's own sentence."""
    sentences = [match[2] for match in _TASK.finditer(grammar)]
    common = _TASK.sub(lambda match: match[1] + _NO_TASK, grammar) if len(sentences) == 1 else grammar
    parsed = _logics.get((domain, common))
    if parsed is None:
        if len(_logics) >= _LOGICS_KEPT:
            _logics.clear()
        parsed = _logics[domain, common] = pddl_logic.GameLogic(domain=domain, grammar=common)
    logic = copy.copy(parsed)
    replaced = {"task": str(json.loads(sentences[0]))} if len(sentences) == 1 else {}
    logic.grammar = FastGrammar(parsed.grammar._rules, replaced)
    return logic


@contextlib.contextmanager
def _replaced_translator(translations: TranslationCache) -> Iterator[None]:
    original = fast_downward.pddl2sas
    fast_downward.pddl2sas = translations.pddl2sas
    try:
        yield
    finally:
        fast_downward.pddl2sas = original
