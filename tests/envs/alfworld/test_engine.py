"""The real engine: the fast one says what the unchanged one says, and leaves the process as it was."""

import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from agentenv.errors import MissingExtraError, UsageError
from agentenv_envs.alfworld import engine as engine_module
from agentenv_envs.alfworld.engine import Engine, State, borrow_engine, require_engine, return_engine, rules
from agentenv_envs.alfworld.games import Game, read_game
from agentenv_envs.alfworld.generate import synthetic_game
from agentenv_envs.alfworld.household import FAMILIES
from agentenv_envs.alfworld.translation import TranslationCache, problem_key, translate


@pytest.fixture
def engine(engine_installed: None) -> Iterator[Engine]:
    """One of the process's engines."""
    lent = borrow_engine()
    yield lent
    lent.close()
    return_engine(lent)


def assert_same_transcript(plain: Engine, fast: Engine, game: Game, turns: int) -> None:
    rng = random.Random(game.task_id)
    one, other = plain.begin(game), fast.begin(game)
    assert one == other
    for turn in range(turns):
        command = rng.choice(one.commands) if turn % 7 else "fly to the moon"
        one, other = plain.command(command), fast.command(command)
        assert one == other, command
    one, other = plain.begin(game), fast.begin(game)
    for command in game.walkthrough or ():
        assert command in one.commands
        one, other = plain.command(command), fast.command(command)
        assert one == other, command
    assert one.won


def test_the_fast_engine_says_what_the_unchanged_one_says(engine: Engine) -> None:
    assert engine.is_fast
    plain = Engine(fast=False)
    assert not plain.is_fast
    for seed, family in enumerate(FAMILIES):
        game = synthetic_game(seed, families=[family], size="small" if seed % 2 else "full")
        assert_same_transcript(plain, engine, game, 10)


def test_the_real_game_has_the_same_transcript_and_is_won(engine: Engine, real_game: Path) -> None:
    game = read_game(real_game)
    assert not game.synthetic and game.walkthrough is not None
    assert_same_transcript(Engine(fast=False), engine, game, 10)


def test_the_sentence_of_one_game_is_not_that_of_another(engine: Engine) -> None:
    first, second = synthetic_game(1, size="small"), synthetic_game(2, size="small")
    odd = replace(first, sentence='say \\\\"#hello#\\\\" {now}', task_id="odd")
    assert f"Your task is to: {first.sentence}." in engine.begin(first).text
    assert f"Your task is to: {second.sentence}." in engine.begin(second).text
    with pytest.raises(UsageError, match="game odd is damaged"):
        engine.begin(odd)
    assert f"Your task is to: {first.sentence}." in engine.begin(first).text


def test_the_process_is_as_it_was(engine: Engine) -> None:
    argv, stdout = sys.argv, sys.stdout
    before = list(argv)
    game = synthetic_game(3, size="small")
    engine.begin(game)
    engine.command("look")
    assert sys.argv is argv and list(argv) == before
    assert sys.stdout is stdout
    import fast_downward
    from fast_downward import interface

    assert fast_downward.pddl2sas is interface.pddl2sas


def test_engines_of_several_threads_do_not_disturb_each_other(engine_installed: None) -> None:
    won: dict[int, bool] = {}

    def play(number: int) -> None:
        engine = borrow_engine()
        game = synthetic_game(number, size="small")
        engine.begin(game)
        state = None
        for command in game.walkthrough or ():
            state = engine.command(command)
        won[number] = state is not None and state.won
        return_engine(engine)

    threads = [threading.Thread(target=play, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert won == dict.fromkeys(range(4), True)


def test_a_prefetched_game_begins_without_being_translated(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    games = [synthetic_game(1000 + number, size="small") for number in range(3)]
    for game in games:
        engine.prefetch(game)
    engine.begin(games[2])
    assert all(problem_key(engine._domain, game.problem) in engine_module._translations for game in games)

    def refuse(*_: object) -> bytes:
        raise AssertionError("translated again")

    monkeypatch.setattr("agentenv_envs.alfworld.translation.translate", refuse)
    began = time.process_time()
    for game in games:
        assert game.sentence in engine.begin(game).text
    assert (time.process_time() - began) / 3 < 0.5
    with pytest.raises(UsageError, match="translated again"):
        engine.begin(synthetic_game(2000, size="small"))


def test_a_folder_spares_the_next_process_the_translation(
    engine_installed: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "new" / "cache"
    game = synthetic_game(4000, size="small")
    engine = borrow_engine(folder)
    state = engine.begin(game)
    return_engine(engine)
    (file,) = folder.iterdir()

    def begin_in_a_new_process() -> State:
        monkeypatch.setattr(engine_module, "_idle", [])
        monkeypatch.setattr(engine_module, "_translations", TranslationCache())
        return borrow_engine(folder).begin(game)

    translated: list[str] = []

    def count(domain: str, problem: str) -> bytes:
        translated.append(problem)
        return translate(domain, problem)

    monkeypatch.setattr("agentenv_envs.alfworld.translation.translate", count)
    assert begin_in_a_new_process() == state
    assert translated == []
    for torn in (b"", file.read_bytes()[:100], b"nonsense"):
        file.write_bytes(torn)
        assert begin_in_a_new_process() == state
        assert len(translated) == 1
        assert begin_in_a_new_process() == state
        assert len(translated) == 1
        translated.clear()


def test_a_folder_that_cannot_be_written_is_named(engine_installed: None, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    engine = borrow_engine(tmp_path / "file")
    with pytest.raises(UsageError, match=r"cache_dir .*file can't be written"):
        engine.begin(synthetic_game(5000, size="small"))
    return_engine(engine)


def test_a_prefetch_of_a_damaged_game_is_no_error_until_it_is_played(engine: Engine) -> None:
    game = replace(synthetic_game(5, size="small"), problem="(define (problem", task_id="torn")
    engine.prefetch(game)
    with pytest.raises(UsageError, match=r"game torn is damaged: .*agentenv alfworld check DIR"):
        engine.begin(game)
    assert synthetic_game(6).sentence in engine.begin(synthetic_game(6)).text


def test_a_goal_that_the_translator_leaves_the_program_for_is_a_damaged_game(engine: Engine) -> None:
    good = synthetic_game(5, size="small")
    bad = good.problem[: good.problem.index("(:goal")] + "(:goal (and (foo bar))))"
    game = replace(good, problem=bad, task_id="torn", file=Path("a/game.tw-pddl"))
    with pytest.raises(UsageError, match=r"game a/game\.tw-pddl is damaged: .*Undeclared predicate: foo"):
        engine.begin(game)
    engine.prefetch(game)
    engine.prefetch(synthetic_game(5500))
    assert engine.wait_prefetched(synthetic_game(5500), 60.0)
    assert problem_key(rules()[0], synthetic_game(5500).problem) in engine_module._translations


def test_a_fork_can_play_whatever_its_parents_threads_do(engine: Engine) -> None:
    games = [synthetic_game(7100 + number, size="small") for number in range(2)]
    stop = threading.Event()

    def play() -> None:
        other = borrow_engine()
        while not stop.wait(0.005):
            other.begin(games[0])
        return_engine(other)

    thread = threading.Thread(target=play)
    thread.start()
    codes = []
    try:
        for _ in range(3):
            time.sleep(0.02)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of forking with threads
                pid = os.fork()
            if pid == 0:
                signal.alarm(120)
                os._exit(0 if engine.begin(games[1]).commands else 1)
            codes.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    finally:
        stop.set()
        thread.join()
    assert codes == [0, 0, 0]


def test_closing_ends_the_process_that_prefetches(engine: Engine) -> None:
    engine.prefetch(synthetic_game(3000))
    engine.close()
    engine.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "alfworld-prefetch"]
    assert engine.begin(synthetic_game(3000)).commands


def test_a_process_that_prefetches_may_die(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine.close()
    monkeypatch.setattr(sys, "executable", shutil.which("false"))
    games = [synthetic_game(6000 + number, size="small") for number in range(3)]
    for game in games:
        engine.prefetch(game)
    for game in games:
        assert game.sentence in engine.begin(game).text
    assert "prefetching of ALFWorld's games ended" in caplog.text


def test_a_fork_does_not_wait_for_its_parents_prefetch(engine: Engine) -> None:
    game = synthetic_game(7000)
    engine.prefetch(game)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of forking with threads
        pid = os.fork()
    if pid == 0:
        began = time.monotonic()
        engine.begin(game)
        os._exit(0 if time.monotonic() - began < 30 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_a_data_folder_that_cannot_be_made_is_named(engine_installed: None, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    code = "from agentenv_envs.alfworld.engine import require_engine; require_engine()"
    environment = {
        **os.environ,
        "ALFWORLD_DATA": str(tmp_path / "file" / "data"),
        "PYTHONPATH": ":".join(sys.path),
    }
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
    )
    assert "UsageError: alfworld makes the folder of its data" in done.stderr
    assert "set ALFWORLD_DATA to a folder that can be written" in done.stderr


def test_another_version_of_textworld_gets_the_unchanged_engine(
    engine_installed: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(engine_module, "_COMPARED", {"textworld": "0.0.1"})
    assert not Engine().is_fast
    assert "transcripts were compared" in caplog.text


def test_a_missing_extra_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fast_downward", None)
    monkeypatch.setitem(sys.modules, "textworld", None)
    monkeypatch.setitem(sys.modules, "alfworld", None)
    monkeypatch.setitem(sys.modules, "alfworld.agents.environment.alfred_tw_env", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'agentenv-rl\[alfworld\]'"):
        require_engine()


def test_our_tables_of_what_fits_where_are_within_those_of_alfworld(engine_installed: None) -> None:
    from alfworld.gen import constants

    from agentenv_envs.alfworld.household import FITS

    theirs = {kind: set(things) for kind, things in constants.VAL_RECEPTACLE_OBJECTS.items()}
    extra = {kind: set(things) - theirs.get(kind, set()) for kind, things in FITS.items()}
    assert {kind: things for kind, things in extra.items() if things} == {}
