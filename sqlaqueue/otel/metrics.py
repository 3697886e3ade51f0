"""The metrics of a Consumer; what can be read from the database is not among them."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from opentelemetry.metrics import Meter

from sqlaqueue.consumer.errors import kind_of
from sqlaqueue.consumer.events import JobEvent, PollEvent, is_attempt
from sqlaqueue.otel.conventions import DURATION_BUCKETS, attributes
from sqlaqueue.telemetry.attempts import attempt_of, waits_of


class ConsumerMetrics:
    """Measures Consumers.

    :param meter: the meter of OpenTelemetry.
    """

    def __init__(self, meter: Meter) -> None:
        def seconds(name: str, description: str) -> Any:
            return meter.create_histogram(
                name, "s", description, explicit_bucket_boundaries_advisory=list(DURATION_BUCKETS)
            )

        self._operations = seconds("messaging.client.operation.duration", "Duration of claims and settlements.")
        self._process = seconds("messaging.process.duration", "Duration of a handler's call.")
        self._waits = seconds("sqlaqueue.job.wait.duration", "Time from when a job was due to its handler's call.")
        self._consumed = meter.create_counter("messaging.client.consumed.messages", "{message}", "Claimed jobs.")
        self._attempts = meter.create_counter("sqlaqueue.job.attempts", "{attempt}", "Ended attempts, by outcome.")
        self._polls = meter.create_counter("sqlaqueue.polls", "{poll}", "Polls, by whether they found jobs.")
        self._rescued = meter.create_counter("sqlaqueue.jobs.rescued", "{job}", "Jobs whose lease had expired.")
        self._lost = meter.create_counter("sqlaqueue.leases.lost", "{job}", "Refused results of expired leases.")
        self._running = meter.create_up_down_counter("sqlaqueue.jobs.running", "{job}", "Jobs whose handler runs.")

    @contextmanager
    def call(self, jobs: Sequence[Any]) -> Iterator[None]:
        """Measure a handler's call."""
        queue, error = attempt_of(jobs[0]).queue, None
        destination = {"messaging.destination.name": queue}
        for waited in waits_of(jobs):
            self._waits.record(waited, destination)
        self._running.add(len(jobs), destination)
        began = time.perf_counter()
        try:
            yield
        except BaseException as raised:
            error = kind_of(raised)
            raise
        finally:
            took = time.perf_counter() - began
            self._running.add(-len(jobs), destination)
            self._process.record(took, attributes(queue, "process", "process", error__type=error))

    def polled(self, event: PollEvent) -> None:
        """Measure a poll."""
        destination = {"messaging.destination.name": event.queue}
        self._polls.add(1, {**destination, "sqlaqueue.poll.result": "found" if event.jobs else "empty"})
        self._operations.record(event.duration, attributes(event.queue, "receive", "receive"))
        if event.jobs:
            self._consumed.add(event.jobs, attributes(event.queue, "receive", "receive"))

    def ended(self, event: JobEvent) -> None:
        """Count the end of an attempt."""
        destination = {"messaging.destination.name": event.queue}
        if event.name == "rescued":
            self._rescued.add(1, destination)
        elif event.name == "lease_lost":
            self._lost.add(1, destination)
        elif is_attempt(event):
            self._attempts.add(1, {**destination, "sqlaqueue.outcome": event.name})
