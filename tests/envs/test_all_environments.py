"""Every environment that ships: made both ways, checked twice, with an oracle that keeps within the protocol."""

import gymnasium
import pytest
from gymnasium.utils.env_checker import check_env as gymnasium_check_env

import agentenv
from agentenv.baselines import baseline_names, make_baseline
from agentenv.built_in import BUILT_IN
from agentenv.errors import MissingExtraError
from agentenv.testing import check_env

UNISOLATED = {"sandbox": "local-unisolated"}
OPTIONS = {"SWE-v0": UNISOLATED, "MathPython-v0": UNISOLATED}


OURS = [name for name, built_in in BUILT_IN.items() if "interop" not in built_in.entry_point]


@pytest.fixture(params=sorted(OURS))
def id(request: pytest.FixtureRequest) -> str:
    """Of an environment whose extra is installed."""
    name: str = request.param
    try:
        agentenv.make(name, **OPTIONS.get(name, {})).close()
    except MissingExtraError as error:
        pytest.skip(str(error))
    return name


def test_both_makers_build_it_and_both_checkers_pass_with_the_oracles_actions(id: str) -> None:
    env = agentenv.make(id, **OPTIONS.get(id, {}))
    assert {"oracle", "random"} <= set(baseline_names(env))
    oracle = make_baseline(env, "oracle")
    observation, info = env.reset(seed=3)
    assert info["task_id"] and info["family"]
    oracle.begin(observation, info)
    actions, ended = [], False
    while not ended:
        actions.append(oracle.act(observation))
        observation, reward, terminated, truncated, info = env.step(actions[-1])
        ended = terminated or truncated
    assert (terminated, info["success"], reward) == (True, True, 1.0)
    env.close()
    check_env(agentenv.make(id, **OPTIONS.get(id, {})), actions=actions, seed=3)

    made = gymnasium.make(f"agentenv/{id}", **OPTIONS.get(id, {}))
    assert type(made.unwrapped) is type(env.unwrapped)
    gymnasium_check_env(made.unwrapped, skip_render_check=True)
    made.close()
