"""Registering, finding and making environments."""

import logging
import sys
import textwrap
import warnings
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import gymnasium
import pytest

import agentenv
from agentenv import registration
from agentenv.built_in import BUILT_IN
from agentenv.errors import UnknownEnvironmentError, UsageError
from agentenv.testing import EchoEnv


@pytest.fixture(autouse=True)
def _only_what_ships_is_registered() -> Iterator[None]:
    """What other tests have registered is put aside for a test, and what it registers is removed."""
    before, ours = dict(gymnasium.registry), set(registration._registered)
    for id in ours - {f"agentenv/{name}" for name in BUILT_IN}:
        gymnasium.registry.pop(id, None)
        registration._registered.discard(id)
    yield
    gymnasium.registry.clear()
    gymnasium.registry.update(before)
    registration._registered.clear()
    registration._registered.update(ours)


def test_a_short_id_is_stored_in_the_namespace_and_both_spellings_make_it() -> None:
    agentenv.register(id="Guess-v0", entry_point=EchoEnv)
    assert "agentenv/Guess-v0" in gymnasium.registry
    for id in ("Guess-v0", "agentenv/Guess-v0"):
        assert type(agentenv.make(id)) is EchoEnv
        assert agentenv.spec(id).id == "agentenv/Guess-v0"


def test_an_id_with_a_namespace_of_its_own_is_kept() -> None:
    agentenv.register(id="lab/Guess-v0", entry_point=EchoEnv)
    assert type(agentenv.make("lab/Guess-v0")) is EchoEnv
    with pytest.raises(UnknownEnvironmentError):
        agentenv.make("Guess-v0")


def test_gymnasium_makes_it_without_wrappers_and_without_warnings() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        env = gymnasium.make("agentenv/Echo-v0")
        env.reset(seed=1)
        env.step("no")
        env.close()
    assert type(env) is EchoEnv


def test_gymnasiums_own_checker_passes(recwarn: pytest.WarningsRecorder) -> None:
    from gymnasium.utils.env_checker import check_env

    check_env(gymnasium.make("agentenv/Echo-v0").unwrapped, skip_render_check=True)
    assert [str(warning.message) for warning in recwarn] == []


def test_arguments_of_make_win_over_registered_ones() -> None:
    agentenv.register(id="Guess-v0", entry_point=EchoEnv, kwargs={"max_turns": 5})
    assert agentenv.make("Guess-v0").get_wrapper_attr("max_turns") == 5
    assert agentenv.make("Guess-v0", max_turns=7).get_wrapper_attr("max_turns") == 7


def test_max_turns_reaches_the_environment_as_advice_and_gymnasium_as_time_limit() -> None:
    agentenv.register(id="Guess-v0", entry_point=EchoEnv, kwargs={"max_turns": 50}, max_turns=2)
    env = agentenv.make("Guess-v0")
    assert type(env) is EchoEnv
    assert env.max_turns == 2
    limited = gymnasium.make("agentenv/Guess-v0")
    limited.reset(seed=0)
    assert limited.step("no")[2:4] == (False, False)
    assert limited.step("no")[2:4] == (False, True)


def test_registering_again_replaces_and_says_so_unless_nothing_changed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    agentenv.register(id="Guess-v0", entry_point=EchoEnv)
    agentenv.register(id="Guess-v0", entry_point=EchoEnv)
    assert caplog.records == []
    agentenv.register(id="Guess-v0", entry_point="agentenv.testing:EchoEnv")
    assert "agentenv/Guess-v0 is registered again" in caplog.text


@pytest.mark.parametrize(
    ("asked", "suggested"),
    [("SVE-v0", "SWE-v0"), ("swe-v0", "SWE-v0"), ("agentenv/SWE-v1", "SWE-v0"), ("Ehco-v0", "Echo-v0")],
)
def test_an_unknown_id_suggests_the_close_one(asked: str, suggested: str) -> None:
    with pytest.raises(UnknownEnvironmentError) as caught:
        agentenv.make(asked)
    assert str(caught.value) == f"unknown environment {asked!r}; did you mean {suggested!r}?"


def test_an_id_like_no_other_lists_what_there_is() -> None:
    with pytest.raises(UnknownEnvironmentError, match=r"registered are .*Echo-v0, .*, SWE-v0"):
        agentenv.spec("Quux-v0")


@pytest.mark.parametrize("id", ["", "two words-v0", "a/b/c-v0", "Guess-v0!"])
def test_a_malformed_id_is_refused(id: str) -> None:
    with pytest.raises(UsageError, match="malformed environment id"):
        agentenv.register(id=id, entry_point=EchoEnv)


@pytest.mark.parametrize("entry_point", ["module", "module:", ":Class", 3])
def test_a_malformed_entry_point_is_refused(entry_point: str) -> None:
    with pytest.raises(UsageError, match="entry_point of 'Guess-v0' must be 'module:Class' or a callable"):
        agentenv.register(id="Guess-v0", entry_point=entry_point)


@pytest.mark.parametrize("max_turns", [0, -1, True, 2.0])
def test_a_turn_limit_that_is_none_is_refused(max_turns: int) -> None:
    with pytest.raises(UsageError, match="max_turns of 'Guess-v0'"):
        agentenv.register(id="Guess-v0", entry_point=EchoEnv, max_turns=max_turns)


def test_a_misspelt_argument_suggests_the_right_one() -> None:
    with pytest.raises(UsageError, match="takes no argument 'max_turn'; did you mean 'max_turns'"):
        agentenv.make("Echo-v0", max_turn=3)


def test_a_lazy_entry_point_is_imported_by_make_and_not_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "lazy_guess.py").write_text("from agentenv.testing import EchoEnv as Guess\n")
    monkeypatch.syspath_prepend(tmp_path)
    agentenv.register(id="Lazy-v0", entry_point="lazy_guess:Guess")
    assert "lazy_guess" not in sys.modules
    assert type(agentenv.make("Lazy-v0")) is EchoEnv


def test_an_entry_point_that_does_not_exist_is_named() -> None:
    agentenv.register(id="NoModule-v0", entry_point="no_such_module_here:Env")
    with pytest.raises(UsageError, match="'no_such_module_here:Env' is not installed"):
        agentenv.make("NoModule-v0")
    agentenv.register(id="NoClass-v0", entry_point="agentenv.testing:NoSuchEnv")
    with pytest.raises(UsageError, match=r"'agentenv\.testing' has no 'NoSuchEnv'"):
        agentenv.make("NoClass-v0")


def test_a_module_missing_inside_the_environment_is_not_hidden(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "needs_more.py").write_text("import no_such_dependency\n")
    monkeypatch.syspath_prepend(tmp_path)
    agentenv.register(id="NeedsMore-v0", entry_point="needs_more:Env")
    with pytest.raises(ModuleNotFoundError, match="no_such_dependency"):
        agentenv.make("NeedsMore-v0")


def test_an_environment_that_is_not_text_is_refused() -> None:
    with pytest.raises(
        UsageError, match="'CartPole-v1' is not a text environment: its observation_space is Box"
    ):
        agentenv.make("CartPole-v1")


def test_plug_ins_name_their_environments_by_entry_point(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    points = [
        metadata.EntryPoint("Plugged-v0", "agentenv.testing:EchoEnv", "agentenv.envs"),
        metadata.EntryPoint("lab/Own-v2", "agentenv.testing:EchoEnv", "agentenv.envs"),
        metadata.EntryPoint("SWE-v0", "thief:Env", "agentenv.envs"),
        metadata.EntryPoint("not an id", "agentenv.testing:EchoEnv", "agentenv.envs"),
        metadata.EntryPoint("NoClass-v0", "module_only", "agentenv.envs"),
    ]
    monkeypatch.setattr(metadata, "entry_points", lambda *, group: points if group == "agentenv.envs" else [])
    registration._registered.clear()
    with caplog.at_level(logging.WARNING):
        registration._register_known()
    built_in = {f"agentenv/{name}" for name in BUILT_IN}
    assert built_in >= {"agentenv/Echo-v0", "agentenv/SWE-v0"}
    assert set(registration.registered_ids()) - built_in == {"agentenv/Plugged-v0", "lab/Own-v2"}
    assert agentenv.spec("SWE-v0").entry_point == "agentenv_envs.swe:SWEEnv"
    assert [record.getMessage().split(" is left out")[0] for record in caplog.records] == [
        "plug-in environment agentenv/SWE-v0 (thief:Env)",
        "plug-in environment 'not an id'",
        "plug-in environment 'NoClass-v0'",
    ]


def test_the_swe_environment_is_registered_without_importing_its_package(repository: Path) -> None:
    import subprocess

    script = textwrap.dedent(
        """
        import sys, agentenv
        assert agentenv.spec("SWE-v0").entry_point == "agentenv_envs.swe:SWEEnv"
        assert "agentenv_envs" not in sys.modules
        """
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
