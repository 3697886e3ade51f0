"""Metrics for Prometheus."""

from __future__ import annotations

try:
    import prometheus_client  # noqa: F401 - all modules of this folder need it
except ModuleNotFoundError as missing:
    msg = "sqlaqueue.prometheus needs prometheus_client: pip install 'sqlaqueue[prometheus]'"
    raise ModuleNotFoundError(msg, name=missing.name) from None

from sqlaqueue.prometheus.worker_metrics import instrument

__all__ = ["instrument"]
