"""What comes over the stream of a driver, from a driver that the test plays."""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from agentenv_envs.swe.sandbox import channel
from agentenv_envs.swe.sandbox.channel import SPARE_BYTES, Channel, ChannelLostError

Play = Callable[[Callable[[str, Callable[[bytes], None]], None]], Channel]


class Near(socket.socket):
    """The channel's end, with something to do before each read."""

    before_read: Callable[[], None] = staticmethod(lambda: None)

    def recv(self, *arguments: int) -> bytes:
        self.before_read()
        return super().recv(*arguments)


@pytest.fixture
def play() -> Iterator[Play]:
    """A channel to a driver that answers pings, and "run" as it is told: with the tag, and a function that sends."""
    pair, far = socket.socketpair()
    near = Near(fileno=pair.detach())

    class Api:
        def exec_create(self, *arguments: Any, **settings: Any) -> dict[str, str]:
            return {"Id": "1"}

        def exec_start(self, *arguments: Any, **settings: Any) -> socket.socket:
            return near

    def send(data: bytes) -> None:
        far.sendall(b"\1\0\0\0" + len(data).to_bytes(4, "big") + data)

    def open_channel(answer: Callable[[str, Callable[[bytes], None]], None]) -> Channel:
        def drive() -> None:
            try:
                for line in far.makefile():
                    operation, tag, *_ = f"{line} x".split(" ")
                    if operation == "run":
                        answer(tag, send)
                    else:
                        send(f"\1{tag} ok 0 0\1\1{tag}\1".encode())
            except OSError:
                pass

        threading.Thread(target=drive, daemon=True).start()
        return Channel(Api(), "1", [], b"", "test")

    yield open_channel
    near.close()
    far.close()


def test_what_else_comes_is_no_part_of_an_answer(play: Play) -> None:
    channel = play(lambda tag, send: send(f"\1x\1\1old ok 7 1\1y\1old\1\1{tag} ok 3 2\1hi\1{tag}\1".encode()))
    answer = channel.ask("run", b"\n", 60.0)
    assert (answer.code, answer.payload) == (3, b"hi")


@pytest.mark.parametrize("header", ["", "ok", "ok x 0", "ok 0 0 0", "ö 0"])
def test_an_answer_that_is_none_is_a_lost_channel(play: Play, header: str) -> None:
    channel = play(lambda tag, send: send(f"\1{tag} {header}\1hi\1{tag}\1".encode()))
    with pytest.raises(ChannelLostError, match="garbled"):
        channel.ask("run", b"\n", 60.0)


def test_an_answer_without_end_is_cut_at_its_limit(play: Play) -> None:
    sent = 0

    def flood(tag: str, send: Callable[[bytes], None]) -> None:
        nonlocal sent
        send(f"\1{tag} ok 0 0\1".encode())
        while True:
            send(bytes(1 << 16))
            sent += 1 << 16

    with pytest.raises(ChannelLostError, match="too long"):
        play(flood).ask("run", b"\n", 60.0, most=1000)
    assert sent < 2 * SPARE_BYTES


def test_an_answer_that_trickles_in_for_ever_ends_at_the_deadline(play: Play) -> None:
    def trickle(tag: str, send: Callable[[bytes], None]) -> None:
        while True:
            send(b"x")
            time.sleep(0.001)

    with pytest.raises(ChannelLostError, match="deadline") as caught:
        play(trickle).ask("run", b"\n", 0.2)
    assert caught.value.late


def test_what_the_one_who_looks_on_takes_is_not_the_answers_time(
    play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked_s = 0.0
    looked = threading.Event()

    class Clock:
        @staticmethod
        def monotonic() -> float:
            return time.monotonic() + looked_s

    def answer(tag: str, send: Callable[[bytes], None]) -> None:
        send(f"\1{tag} more 0 1\1a\1{tag}\1".encode())
        looked.wait(60.0)
        send(f"\1{tag} ok 0 1\1a\1{tag}\1".encode())

    def look(part: object) -> None:
        nonlocal looked_s
        looked_s += 1000.0
        looked.set()

    monkeypatch.setattr(channel, "time", Clock)
    assert play(answer).ask("run", b"\n", 60.0, look).state == "ok"


def test_a_channel_that_is_closed_while_a_thread_is_about_to_read_frees_its_file_after_that_thread_has_left(
    play: Play,
) -> None:
    channel = play(lambda tag, send: None)
    near: Any = channel._socket
    about_to_read, closed = threading.Event(), threading.Event()
    numbers: list[int] = []

    def before_read() -> None:
        about_to_read.set()
        assert closed.wait(30)
        numbers.append(near.fileno())

    near.before_read = before_read

    def close() -> None:
        assert about_to_read.wait(30)
        channel.close()
        closed.set()

    threading.Thread(target=close, daemon=True).start()
    with pytest.raises(ChannelLostError, match="was closed"):
        channel.ask("run", b"\n", 60.0)
    assert numbers[0] != -1 and near.fileno() == -1
    with pytest.raises(ChannelLostError, match="was closed"):
        channel.ask("run", b"\n", 60.0)
