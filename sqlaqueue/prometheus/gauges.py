"""The gauges of queues: their names, labels and meanings."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from prometheus_client.core import GaugeMetricFamily


@dataclass(frozen=True)
class Gauge:
    """A gauge."""

    name: str
    meaning: str
    labels: tuple[str, ...] = ("queue",)


JOBS = Gauge(
    "sqlaqueue_jobs",
    "Jobs by state. Pending and processing jobs are counted up to a limit; finished ones only if the exporter is asked "
    "to count them.",
    ("queue", "state"),
)
DUE_JOBS = Gauge("sqlaqueue_due_jobs", "Pending jobs whose time has come, counted up to a limit.")
OLDEST_DUE_JOB_AGE = Gauge(
    "sqlaqueue_oldest_due_job_age_seconds", "Time since which the oldest due job has been due, 0 if no job is due."
)
RUNNING_JOBS = Gauge(
    "sqlaqueue_running_jobs",
    "Jobs that workers have claimed; under a strategy that holds a transaction, those whose handlers were running at "
    "the last heartbeats.",
)
EXPIRED_LEASES = Gauge(
    "sqlaqueue_expired_leases", "Running jobs whose lease has expired, and that were not rescued yet."
)
CONSUMERS = Gauge("sqlaqueue_consumers", "Consumers that are alive.")
CONSUMERS_LISTENING = Gauge("sqlaqueue_consumers_listening", "Live Consumers that receive notifications.")
PAUSED = Gauge("sqlaqueue_paused", "Whether the queue is paused: 1 if it is, otherwise 0.")
KEYS_AT_LIMIT = Gauge(
    "sqlaqueue_keys_at_limit", "Keys with as many running jobs as their limit is, up to ten of each limit."
)
MISSING_INDEXES = Gauge("sqlaqueue_missing_indexes", "Indexes of the queue that the database lacks.")
SCHEDULE_LATE = Gauge(
    "sqlaqueue_schedule_late_seconds",
    "Time for which a schedule has been overdue; 0 within its grace, and while it is paused.",
    ("queue", "schedule"),
)
SCHEDULE_PAUSED = Gauge(
    "sqlaqueue_schedule_paused", "Whether the schedule is paused: 1 if it is, otherwise 0.", ("queue", "schedule")
)
SCRAPE_SUCCESS = Gauge("sqlaqueue_scrape_success", "Whether all gauges of the queue could be read: 1 or 0.")
SCRAPE_DURATION = Gauge("sqlaqueue_scrape_duration_seconds", "Time that it took to read the gauges of the queue.")

GAUGES = (
    JOBS,
    DUE_JOBS,
    OLDEST_DUE_JOB_AGE,
    RUNNING_JOBS,
    EXPIRED_LEASES,
    CONSUMERS,
    CONSUMERS_LISTENING,
    PAUSED,
    KEYS_AT_LIMIT,
    MISSING_INDEXES,
    SCHEDULE_LATE,
    SCHEDULE_PAUSED,
    SCRAPE_SUCCESS,
    SCRAPE_DURATION,
)
"""All gauges, in the order in which they are exported."""


@dataclass(frozen=True)
class Sample:
    """A value of a gauge, with the values of its labels."""

    gauge: Gauge
    labels: tuple[str, ...]
    value: float


def families(samples: Iterable[Sample]) -> Iterator[GaugeMetricFamily]:
    """Yield each gauge with its samples; a gauge without samples as well."""
    made = {each: GaugeMetricFamily(each.name, each.meaning, labels=each.labels) for each in GAUGES}
    for sample in samples:
        made[sample.gauge].add_metric(sample.labels, sample.value)
    yield from made.values()
