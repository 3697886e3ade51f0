"""Metrics for Prometheus: what workers do, and the gauges of queues, which are read from the database.

A worker counts and measures what it does itself; ``sqlaqueue worker --http`` does it and publishes the metrics::

    instrument(consumer)

One exporter reads the gauges for all workers, as each worker would read the same numbers. Together with other metrics::

    from prometheus_client import REGISTRY

    REGISTRY.register(QueueCollector([Email, Invoice], sessionmaker(engine)))

In a web application, sync or async, ``metrics_app()`` is an ASGI application::

    app.mount("/metrics", metrics_app([Email, Invoice], async_sessionmaker(engine)))

As a process of its own: ``sqlaqueue metrics app.models:Email app.models:Invoice --port 9187``.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

try:
    from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram
except ModuleNotFoundError as missing:
    raise ModuleNotFoundError(
        "sqlaqueue.prometheus needs prometheus_client: pip install 'sqlaqueue[prometheus]'", name=missing.name
    ) from None

from sqlaqueue.consumer.base import ConsumerBase
from sqlaqueue.consumer.core.events import EventName, JobEvent, PollEvent, is_attempt
from sqlaqueue.prometheus.queues import MetricsApp, QueueCollector, metrics_app
from sqlaqueue.telemetry.around import check_consumer, surround, waits_of

__all__ = ["MetricsApp", "QueueCollector", "alerts", "dashboard", "instrument", "metrics_app"]


_HERE = Path(__file__).parent


def dashboard() -> str:
    """Return the Grafana dashboard, as the JSON that Grafana imports.

    ::

        Path("sqlaqueue.json").write_text(dashboard())
    """
    return (_HERE / "dashboard.json").read_text(encoding="utf-8")


def alerts() -> str:
    """Return the alert rules, as a rule file of Prometheus in YAML.

    ::

        Path("sqlaqueue.rules.yml").write_text(alerts())
    """
    return (_HERE / "alerts.yml").read_text(encoding="utf-8")


# -- workers -----------------------------------------------------------------------------------------------------------
# What the Consumers of this process have done. Gauges that are read from the database are not among it: each worker
# would read the same, see QueueCollector.

_OUTCOMES: tuple[EventName, ...] = ("completed", "retried", "failed", "cancelled", "released")
_RUNS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 900, 3600)
_WAITS = (0.01, 0.05, 0.1, 0.5, 1, 5, 15, 60, 300, 900, 3600, 21600, 86400)
_CLAIMS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
"""Upper bounds of the buckets, in seconds."""


def instrument(consumer: ConsumerBase, *, registry: CollectorRegistry = REGISTRY) -> None:
    """Count and measure what a Consumer or an AsyncConsumer does; a second call for the same registry has no effect.

    Call it before the Consumer runs. Several Consumers share the metrics of a registry, distinguished by ``queue``.

    ::

        consumer = Consumer(Email, send, sessions)
        instrument(consumer)
        consumer.run()

    :param consumer: a Consumer or an AsyncConsumer.
    :param registry: exports the metrics; the default registry of ``prometheus_client`` by default.
    :raises ConfigurationError: for anything but a Consumer.
    """
    check_consumer(consumer, "instrument")
    metrics = _known.get(registry)
    if metrics is None:
        metrics = _known[registry] = WorkerMetrics(registry)
    metrics.add(consumer)


class WorkerMetrics:
    def __init__(self, registry: CollectorRegistry) -> None:
        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"sqlaqueue_worker_{name}", text, ["queue", *labels], registry=registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"sqlaqueue_worker_{name}", text, ["queue"], buckets=buckets, registry=registry)

        self._jobs = counter("jobs", "Ended attempts of jobs, by outcome.", "outcome")
        self._runs = histogram("job_duration_seconds", "Seconds that a handler's call took.", _RUNS)
        self._waits = histogram("job_wait_seconds", "Seconds from when a job was due to its handler's call.", _WAITS)
        self._claims = histogram("claim_duration_seconds", "Seconds that a claim took, with its commit.", _CLAIMS)
        self._polls = counter("claims", "Claims, by whether they found jobs.", "result")
        self._in_flight = Gauge(
            "sqlaqueue_worker_jobs_in_flight",
            "Jobs whose handler runs.",
            ["queue"],
            registry=registry,
            # Of several processes with one endpoint: the sum over those that live.
            multiprocess_mode="livesum",
        )
        self._rescued = counter("jobs_rescued", "Jobs that were rescued, as their lease had expired.")
        self._lost = counter("leases_lost", "Results that were refused, as the lease had expired before.")
        self._consumers: WeakSet[ConsumerBase] = WeakSet()

    def add(self, consumer: ConsumerBase) -> None:
        if consumer in self._consumers:
            return
        self._consumers.add(consumer)
        queue = consumer.queue
        # Looking them up for each job would take longer than counting. They are exported as zero from the start: a
        # counter that appears with its first event has no increase.
        counters: dict[EventName, Counter] = {name: self._jobs.labels(queue, name) for name in _OUTCOMES}
        counters |= {"rescued": self._rescued.labels(queue), "lease_lost": self._lost.labels(queue)}
        polls = {found: self._polls.labels(queue, "found" if found else "empty") for found in (True, False)}
        claims, waits = self._claims.labels(queue), self._waits.labels(queue)
        runs, in_flight = self._runs.labels(queue), self._in_flight.labels(queue)

        @contextmanager
        def around_call(argument: Any) -> Iterator[None]:
            jobs = argument if isinstance(argument, list) else [argument]
            for waited in waits_of(jobs):
                waits.observe(waited)
            in_flight.inc(len(jobs))
            began = time.perf_counter()
            try:
                yield
            finally:
                in_flight.dec(len(jobs))
                runs.observe(time.perf_counter() - began)

        def polled(event: PollEvent) -> None:
            polls[event.jobs > 0].inc()
            claims.observe(event.duration)

        def ended(event: JobEvent) -> None:
            if is_attempt(event):
                counters[event.name].inc()

        surround(consumer, around_call)
        consumer.on("polled", polled)
        for name in counters:
            consumer.on(name, ended)


_known: WeakKeyDictionary[CollectorRegistry, WorkerMetrics] = WeakKeyDictionary()
