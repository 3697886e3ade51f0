"""Metrics for Prometheus: what workers do, and the gauges of queues, which are read from the database.

A worker counts and measures what it does itself; ``sqlaqueue worker --http`` does it and serves the metrics::

    instrument(consumer)

One exporter reads the gauges for all workers, as each worker would read the same numbers. Beside other metrics::

    from prometheus_client import REGISTRY

    REGISTRY.register(QueueCollector([Email, Invoice], sessionmaker(engine)))

In a web application, sync or async, ``metrics_app()`` is an ASGI application::

    app.mount("/metrics", metrics_app([Email, Invoice], async_sessionmaker(engine)))

As a process of its own: ``sqlaqueue metrics app.models:Email app.models:Invoice --port 9187``.
"""

from __future__ import annotations

from pathlib import Path

try:
    import prometheus_client  # noqa: F401 - all modules of this folder need it
except ModuleNotFoundError as missing:
    raise ModuleNotFoundError(
        "sqlaqueue.prometheus needs prometheus_client: pip install 'sqlaqueue[prometheus]'", name=missing.name
    ) from None

from sqlaqueue.prometheus.queues import MetricsApp, QueueCollector, metrics_app
from sqlaqueue.prometheus.worker_metrics import instrument

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
