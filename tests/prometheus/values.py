"""What collectors and texts say: values of gauges by name and labels."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import sqlalchemy as sa
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families
from sqlalchemy.orm import sessionmaker

from sqlaqueue.prometheus import QueueCollector
from sqlaqueue.prometheus.worker_metrics import WorkerMetrics

Values = dict[tuple[str, ...], float]

STATEMENT_TIMEOUT = 30.0
"""Seconds that a statement may take on a machine that does much else."""

_workers = CollectorRegistry()
WorkerMetrics(_workers)
WORKER_METRICS = {family.name: family.type for family in _workers.collect()}
"""The metrics of workers, as the families are named, with their types."""


def collect(engine: sa.Engine, *models: Any, **options: Any) -> Values:
    """Return the values of a collector by the gauge's name, without its prefix, and the values of its labels."""
    options = {"statement_timeout": STATEMENT_TIMEOUT, **options}
    registry = CollectorRegistry()
    registry.register(QueueCollector(models, sessionmaker(engine), **options))
    return values(registry.collect())


def parse(text: str) -> Values:
    """Return the same from the text format."""
    return values(text_string_to_metric_families(text))


def values(families: Iterable[Any]) -> Values:
    found: Values = {}
    for family in families:
        for sample in family.samples:
            key = (sample.name.removeprefix("sqlaqueue_"), *sample.labels.values())
            assert key not in found, "a series is exported twice"
            found[key] = sample.value
    return found
