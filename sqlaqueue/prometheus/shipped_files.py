"""The Grafana dashboard and the alert rules that are installed with the package."""

from __future__ import annotations

from pathlib import Path

_HERE = Path(__file__).parent


def dashboard() -> str:
    """Return the Grafana dashboard, as the JSON that Grafana imports."""
    return (_HERE / "dashboard.json").read_text(encoding="utf-8")


def alerts() -> str:
    """Return the alert rules, as a rule file of Prometheus in YAML."""
    return (_HERE / "alerts.yml").read_text(encoding="utf-8")
