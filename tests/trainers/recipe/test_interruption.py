"""Signals: the first ends the run cleanly, the second at once."""

import signal

import pytest

from agentenv_trainers.recipe import Interrupted, Interruption


def test_a_signal_while_the_trainer_computes_only_sets_a_flag():
    with Interruption() as interruption:
        assert not interruption.requested
        signal.raise_signal(signal.SIGINT)
        assert interruption.requested
        assert interruption.exit_code == 130
        with pytest.raises(Interrupted):
            interruption.check()


def test_a_signal_while_the_run_waits_ends_the_wait():
    with Interruption() as interruption:
        with pytest.raises(Interrupted), interruption.at_once():
            signal.raise_signal(signal.SIGTERM)
        assert interruption.exit_code == 143


def test_a_wait_does_not_begin_after_a_signal():
    with Interruption() as interruption:
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(Interrupted), interruption.at_once():
            pytest.fail("the wait began")


def test_a_signal_just_before_a_wait_is_not_lost():
    class Late(Interruption):
        def check(self):
            super().check()
            signal.raise_signal(signal.SIGINT)

    with Late() as interruption, pytest.raises(Interrupted), interruption.at_once():
        pytest.fail("the wait began")


def test_after_a_wait_a_signal_sets_the_flag_again():
    with Interruption() as interruption:
        with interruption.at_once():
            pass
        signal.raise_signal(signal.SIGINT)
        assert interruption.requested


def test_the_second_signal_ends_the_process():
    codes = []
    with Interruption(force=codes.append):
        signal.raise_signal(signal.SIGINT)
        assert codes == []
        signal.raise_signal(signal.SIGINT)
    assert codes == [130]


def test_the_handlers_of_before_come_back():
    before = signal.getsignal(signal.SIGINT)
    with Interruption():
        assert signal.getsignal(signal.SIGINT) != before
    assert signal.getsignal(signal.SIGINT) == before


def test_an_interruption_is_no_ordinary_exception():
    # An `except Exception` in a library must not swallow it.
    assert not issubclass(Interrupted, Exception)
