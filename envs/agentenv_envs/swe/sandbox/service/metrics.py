"""Prometheus metrics of a service: of all clients together, so that no client learns of another."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

__all__ = ["Metrics"]

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 1800)


class Metrics:
    """The metrics, in a registry of their own; names begin with `agentenv_sandbox_`."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        prefix = "agentenv_sandbox_"
        self.leases = Gauge(f"{prefix}leases", "Leases now", registry=self.registry)
        self.warm = Gauge(f"{prefix}warm", "Warm sandboxes that nobody holds", registry=self.registry)
        self.capacity = Gauge(f"{prefix}capacity", "Sandboxes that may be there", registry=self.registry)
        self.draining = Gauge(f"{prefix}draining", "1 while no new leases are given", registry=self.registry)
        self.ended = Counter(
            f"{prefix}leases_ended", "Leases that ended", ["how"], registry=self.registry
        )  # released, expired, failed, drained
        self.refused = Counter(f"{prefix}refused", "Requests refused", ["type"], registry=self.registry)
        self.commands = Counter(f"{prefix}commands", "Commands run", ["how"], registry=self.registry)
        self.making = Histogram(
            f"{prefix}making_seconds", "Making a sandbox", registry=self.registry, buckets=_SECONDS
        )
        self.command = Histogram(
            f"{prefix}command_seconds", "Running a command", registry=self.registry, buckets=_SECONDS
        )

    def text(self) -> bytes:
        """All of them in Prometheus's text format."""
        return generate_latest(self.registry)
