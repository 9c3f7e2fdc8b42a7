"""Leases over a clock that tests move."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytest.importorskip("fastapi")

from agentenv.errors import SandboxError
from agentenv_envs.swe.sandbox import SandboxSpec
from agentenv_envs.swe.sandbox.local_backend import LocalBackend
from agentenv_envs.swe.sandbox.service.leases import Leases
from agentenv_envs.swe.sandbox.service.limits import ServiceLimits
from agentenv_envs.swe.sandbox.service.wire import Refusal

SPEC = SandboxSpec(read_only=True)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def leases(clock: Clock) -> Iterator[Leases]:
    table = Leases(LocalBackend(), ServiceLimits(max_sandboxes=3, per_client=2), clock=clock)
    yield table
    table.close()


def test_a_lease_ends_when_it_is_not_renewed_and_its_sandbox_goes_with_it(
    leases: Leases, clock: Clock
) -> None:
    kept = leases.open("alice", "lease-kept", SPEC, ttl_s=100)
    lost = leases.open("alice", "lease-lost", SPEC, ttl_s=100)
    folder: Path = lost.made.result().get().workdir
    assert folder.is_dir()
    clock.now = 90
    assert leases.renew("alice", ["lease-kept", "lease-nobody-has"]) == ["lease-nobody-has"]
    clock.now = 101
    assert leases.expire() == 1
    assert lost.ended is not None
    lost.ended.result(60)
    assert not folder.exists()
    assert leases.of("alice") == [kept.id]
    with pytest.raises(Refusal, match="lease-lost: there is none"):
        leases.get("alice", "lease-lost")
    assert leases.expire() == 0


def test_a_command_that_runs_is_cut_with_its_lease(leases: Leases, clock: Clock) -> None:
    lease = leases.open("alice", "lease-0001", SPEC, ttl_s=10)
    command = leases.command(lease, 0, "sleep 50; true", 60.0, 100)
    clock.now = 11
    assert leases.expire() == 1
    result = command.result(60)
    assert isinstance(result.error, SandboxError) or result.value.exit_code != 0
    assert lease.ended is not None
    lease.ended.result(60)
    assert leases.backend.left() == 0


def test_a_client_neither_sees_nor_counts_what_belongs_to_another(leases: Leases) -> None:
    leases.open("alice", "lease-0001", SPEC, 100)
    with pytest.raises(Refusal) as caught:
        leases.get("bob", "lease-0001")
    assert caught.value.kind == "gone"
    leases.open("bob", "lease-0001", SPEC, 100)
    assert leases.of("bob") == ["lease-0001"]
    assert leases.count() == 2


def test_each_client_has_its_quota_and_all_together_have_the_limit(leases: Leases) -> None:
    for number in range(2):
        leases.open("alice", f"lease-{number}", SPEC, 100)
    with pytest.raises(Refusal) as caught:
        leases.open("alice", "lease-2", SPEC, 100)
    assert (caught.value.kind, str(caught.value)) == (
        "quota",
        "client 'alice' has 2 sandboxes, as many as it may have",
    )
    leases.open("bob", "lease-0", SPEC, 100)
    with pytest.raises(Refusal) as caught:
        leases.open("bob", "lease-1", SPEC, 100)
    assert caught.value.kind == "busy"
    leases.end(leases.get("alice", "lease-0")).result(60)
    leases.open("bob", "lease-1", SPEC, 100)


def test_a_repeated_request_joins_the_first_one(leases: Leases) -> None:
    lease = leases.open("alice", "lease-0001", SPEC, 100)
    assert leases.open("alice", "lease-0001", SPEC, 100) is lease
    with pytest.raises(Refusal, match="the id is taken"):
        leases.open("alice", "lease-0001", SandboxSpec(), 100)
    command = "echo x >> /dev/null; echo once >> log; cat log"
    first = leases.command(lease, 0, command, 60.0, 100)
    again = leases.command(lease, 0, command, 60.0, 100)
    assert first is again
    assert first.result(60).get().output == "once\n"
    assert leases.command(lease, 0, command, 60.0, 100).result(60).get().output == "once\n"
    assert leases.command(lease, 1, command, 60.0, 100).result(60).get().output == "once\nonce\n"
    with pytest.raises(Refusal, match="command 0 is over"):
        leases.command(lease, 0, command, 60.0, 100)


def test_a_client_that_sends_much_is_refused_and_delays_no_other(leases: Leases) -> None:
    lease = leases.open("alice", "lease-0001", SPEC, 100)
    held = threading.Event()
    first = leases.submit(lease, lambda sandbox: held.wait(120))
    waiting = [leases.submit(lease, lambda sandbox: None) for _ in range(3)]
    with pytest.raises(Refusal, match="4 requests wait for it already"):
        leases.submit(lease, lambda sandbox: None)
    other = leases.open("bob", "lease-0001", SPEC, 100)
    assert leases.command(other, 0, "echo fine", 60.0, 100).result(60).get().output == "fine\n"
    assert not first.done()
    held.set()
    for future in waiting:
        assert future.result(60).error is None


def test_while_draining_leases_go_on_and_no_new_ones_come(leases: Leases) -> None:
    lease = leases.open("alice", "lease-0001", SPEC, 100)
    leases.drain()
    with pytest.raises(Refusal, match="no new leases"):
        leases.open("alice", "lease-0002", SPEC, 100)
    assert leases.open("alice", "lease-0001", SPEC, 100) is lease
    assert leases.command(lease, 0, "echo fine", 60.0, 100).result(60).get().output == "fine\n"
    leases.close()
    assert leases.count() == 0
    leases.close()


class PoolingBackend(LocalBackend):
    """Keeps what is released warm, as the Docker backend does, and counts what there is."""

    def __init__(self) -> None:
        super().__init__()
        self.pool: list = []  # type: ignore[type-arg]
        self.most = 0

    def acquire(self, spec):  # type: ignore[no-untyped-def]
        for sandbox in self.pool:
            if sandbox.spec == spec:
                self.pool.remove(sandbox)
                return sandbox
        sandbox = super().acquire(spec)
        self.most = max(self.most, self.left())
        return sandbox

    def release(self, sandbox) -> None:  # type: ignore[no-untyped-def]
        sandbox.reset()
        sandbox.reusable = True
        self.pool.append(sandbox)


def test_warm_sandboxes_of_odd_specifications_make_room(
    clock: Clock, until: Callable[[Callable[[], bool]], None]
) -> None:
    backend = PoolingBackend()
    leases = Leases(backend, ServiceLimits(max_sandboxes=3), clock=clock)
    for number in range(12):
        spec = SandboxSpec(read_only=True, memory_mb=1000 + number % 6)
        lease = leases.open("alice", f"lease-{number:04d}", spec, 100)
        sandbox = lease.made.result(60).get()
        leases.end(lease).result(60)
    assert backend.most <= 3
    again = leases.open("alice", "lease-last", spec, 100)
    assert again.made.result(60).get() is sandbox, "the one that was used last is warm"
    leases.close()
    assert backend.left() == 0


def test_a_sandbox_that_cant_be_made_is_an_outcome(leases: Leases) -> None:
    lease = leases.open("alice", "lease-0001", SandboxSpec(image="missing"), 100)
    with pytest.raises(ValueError, match="missing"):
        lease.made.result(60).get()
    assert isinstance(leases.submit(lease, lambda sandbox: None).result(60).error, ValueError)
    leases.end(lease, "failed").result(60)
    assert leases.count() == 0
