"""The dashboard and the alert rules name metrics that exist."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from sqlaqueue.prometheus import alerts, dashboard
from sqlaqueue.prometheus.queues import GAUGES
from tests.prometheus.values import WORKER_METRICS

pytestmark = pytest.mark.once

SUFFIXES = {"counter": ["_total"], "gauge": [""], "histogram": ["_bucket", "_sum", "_count"]}
EXPORTED = {each.name for each in GAUGES} | {
    f"{name}{suffix}" for name, kind in WORKER_METRICS.items() for suffix in SUFFIXES[kind]
}
ROOT = Path(__file__).parents[2]


def panels() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(dashboard())["panels"]
    return found


def names(text: str) -> set[str]:
    return set(re.findall(r"\bsqlaqueue_\w+", text))


def rules() -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load(alerts())["groups"] for rule in group["rules"]]


def test_the_dashboard_names_only_exported_metrics_and_shows_all_of_them() -> None:
    shown = names("".join(target["expr"] for panel in panels() for target in panel.get("targets", ())))
    assert shown - EXPORTED == set()
    families = {re.sub(r"_(total|bucket)$", "", name) for name in shown}
    assert families == {each.name for each in GAUGES} | set(WORKER_METRICS)
    [_, queue] = json.loads(dashboard())["templating"]["list"]
    assert names(queue["query"]["query"]) - EXPORTED == set()


def test_the_panels_of_the_dashboard() -> None:
    assert len({panel["id"] for panel in panels()}) == len(panels())
    taken: set[tuple[int, int]] = set()
    for panel in panels():
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        cells = {(place["x"] + column, place["y"] + row) for column in range(place["w"]) for row in range(place["h"])}
        assert not cells & taken, panel["title"]
        taken |= cells
        if panel["type"] != "row":
            assert panel["title"]
            assert panel["description"].endswith(".")
            assert panel["datasource"]["uid"] == "${datasource}"
            assert all(target["expr"].count("(") == target["expr"].count(")") for target in panel["targets"])


def test_the_alerts_name_only_exported_metrics() -> None:
    assert len(rules()) >= 7
    for rule in rules():
        used = names(rule["expr"])
        assert used, rule
        assert used - EXPORTED == set()
        assert rule["annotations"].keys() == {"summary", "description"}
        assert rule["labels"]["severity"] in {"warning", "critical"}


def test_the_alerts_keep_the_job() -> None:
    """Queues of one name in several databases are told apart by it."""
    for rule in rules():
        for labels in re.findall(r"(?:by|on) \(([^)]*)\)", rule["expr"]):
            assert labels.startswith("job, queue"), rule["alert"]


def test_a_wrong_name_is_found() -> None:
    assert names("rate(sqlaqueue_job{}[1m])") - EXPORTED == {"sqlaqueue_job"}


@pytest.mark.parametrize("name", ["docs/prometheus.md"])
def test_the_page_lists_all_gauges(name: str) -> None:
    rows = re.findall(r"^\| `(sqlaqueue_\w+)`", (ROOT / name).read_text(), re.MULTILINE)
    assert {row for row in rows if not row.startswith("sqlaqueue_worker")} == {each.name for each in GAUGES}


def test_the_page_lists_all_alerts() -> None:
    page = (ROOT / "docs" / "prometheus.md").read_text()
    assert [rule["alert"] for rule in rules()] == re.findall(r"^\| `(Sqlaqueue\w+)`", page, re.MULTILINE)


def test_names_follow_the_conventions() -> None:
    for each in GAUGES:
        assert each.name.startswith("sqlaqueue_")
        assert not each.name.endswith(("_total", "_count", "_sum", "_bucket", "_info", "_ms", "_minutes"))
        assert each.meaning.endswith(".")
