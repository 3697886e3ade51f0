"""The dashboard and the alert rules name metrics that exist, promtool accepts them, and a real Prometheus scrapes."""

import json
import os
import re
import shutil
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from sqlaqueue.prometheus import alerts, dashboard
from sqlaqueue.prometheus.queues import GAUGES
from tests.cli.conftest import MODELS, Shop, shop, shop_template
from tests.cli.shop.models import Email
from tests.programs import Program, wait_until
from tests.prometheus.conftest import WORKER_METRICS

__all__ = ["shop", "shop_template"]

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


def test_the_page_lists_all_gauges() -> None:
    rows = re.findall(r"^\| `(sqlaqueue_\w+)`", (ROOT / "docs" / "log-events.md").read_text(), re.MULTILINE)
    assert {row for row in rows if not row.startswith("sqlaqueue_worker")} == {each.name for each in GAUGES}


def test_the_page_lists_all_alerts() -> None:
    page = (ROOT / "docs" / "monitor.md").read_text()
    assert [rule["alert"] for rule in rules()] == re.findall(r"^\| `(Sqlaqueue\w+)`", page, re.MULTILINE)


def test_names_follow_the_conventions() -> None:
    for each in GAUGES:
        assert each.name.startswith("sqlaqueue_")
        assert not each.name.endswith(("_total", "_count", "_sum", "_bucket", "_info", "_ms", "_minutes"))
        assert each.meaning.endswith(".")


# -- a real Prometheus scrapes an exporter, and promtool checks what is exported and shipped -----------------------

PATH = f"{os.environ.get('PATH', os.defpath)}:/usr/local/bin:/usr/bin"
PROMETHEUS, PROMTOOL = (shutil.which(name, path=PATH) for name in ("prometheus", "promtool"))
needs_prometheus = pytest.mark.skipif(
    PROMETHEUS is None or PROMTOOL is None,
    reason="prometheus and promtool are not on the PATH: apt-get install prometheus",
)

CONFIGURATION = """
global:
  scrape_interval: 1s
  evaluation_interval: 1s
rule_files: [alerts.yml]
scrape_configs:
  - job_name: sqlaqueue
    static_configs: [{targets: ["%s"]}]
"""


def promtool(*arguments: str, given: str | None = None) -> str:
    assert PROMTOOL is not None
    done = subprocess.run(
        [PROMTOOL, *arguments], input=given, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


@needs_prometheus
def test_promtool_accepts_the_alert_rules(tmp_path: Path) -> None:
    (tmp_path / "alerts.yml").write_text(alerts())
    assert "8 rules found" in promtool("check", "rules", str(tmp_path / "alerts.yml"))


RULES = """
rule_files: [alerts.yml]
evaluation_interval: 1m
tests:
  - interval: 1m
    input_series:
      - {series: 'sqlaqueue_oldest_due_job_age_seconds{job="a", queue="email"}', values: "0+60x20"}
      - {series: 'sqlaqueue_schedule_late_seconds{job="a", queue="email", schedule="s"}', values: "0+60x20"}
      - {series: 'sqlaqueue_worker_jobs_total{job="a", queue="email", outcome="failed"}', values: "0+1x60"}
      - {series: 'sqlaqueue_worker_jobs_total{job="a", queue="email", outcome="completed"}', values: "0+1x60"}
      - {series: 'sqlaqueue_worker_jobs_total{job="b", queue="email", outcome="failed"}', values: "0x60"}
      - {series: 'sqlaqueue_worker_jobs_total{job="b", queue="email", outcome="completed"}', values: "0+100x60"}
    promql_expr_test: []
    alert_rule_test:
      - {alertname: SqlaqueueOldestJobTooOld, eval_time: 5m, exp_alerts: []}
      - alertname: SqlaqueueOldestJobTooOld
        eval_time: 6m
        exp_alerts:
          - exp_labels: {job: a, queue: email, severity: warning}
            exp_annotations:
              summary: "Jobs of queue email wait too long"
              description: "The oldest due job has waited for 6m 0s: add workers, or look for what holds the jobs back."
      - {alertname: SqlaqueueScheduleLate, eval_time: 5m, exp_alerts: []}
      - alertname: SqlaqueueScheduleLate
        eval_time: 6m
        exp_alerts:
          - exp_labels: {job: a, queue: email, schedule: s, severity: warning}
            exp_annotations:
              summary: "Schedule s is late"
              description: "It has been overdue for 6m 0s: no process fires it, or it cannot be fired; see sqlaqueue
                schedules show."
      - alertname: SqlaqueueManyFailures
        eval_time: 30m
        exp_alerts:
          - exp_labels: {job: a, queue: email, severity: warning}
            exp_annotations:
              summary: "Many jobs of queue email fail"
              description: "50% of the jobs that ended have failed for good: see sqlaqueue failed."
"""


@needs_prometheus
def test_when_alerts_fire(tmp_path: Path) -> None:
    """A job that has been due for five minutes fires then, and a failing database is not hidden by another one."""
    (tmp_path / "alerts.yml").write_text(alerts())
    (tmp_path / "rules.yml").write_text(RULES)
    promtool("test", "rules", str(tmp_path / "rules.yml"))


@needs_prometheus
def test_promtool_has_no_objection_to_the_metrics(shop: Shop) -> None:
    shop.add(Email())
    text = shop.ok("metrics", f"{MODELS}:Email", f"{MODELS}:Letter", "--once", "--statement-timeout", "30s")
    assert promtool("check", "metrics", given=text) == ""


@contextmanager
def prometheus(target: str, directory: Path, port: int) -> Iterator[str]:
    """Run a Prometheus that scrapes ``target``; yield its address."""
    assert PROMETHEUS is not None
    (directory / "prometheus.yml").write_text(CONFIGURATION % target)
    (directory / "alerts.yml").write_text(alerts())
    options = {
        "config.file": directory / "prometheus.yml",
        "storage.tsdb.path": directory / "data",
        "web.listen-address": f"127.0.0.1:{port}",
    }
    command = [PROMETHEUS, *(f"--{name}={value}" for name, value in options.items())]
    with (
        (directory / "log").open("w") as log,
        subprocess.Popen(command, stdout=log, stderr=log, cwd=directory) as process,
    ):
        try:
            yield f"http://127.0.0.1:{port}/api/v1"
        finally:
            process.terminate()


def ask(address: str, path: str, **parameters: str) -> Any:
    """Return what the HTTP API answers; None while it does not."""
    try:
        with urllib.request.urlopen(f"{address}/{path}?{urllib.parse.urlencode(parameters)}", timeout=30) as answer:  # noqa: S310 - it is at 127.0.0.1
            return json.load(answer)["data"]
    except (urllib.error.URLError, ConnectionError):
        return None


def query(address: str, expression: str) -> dict[str, float]:
    found = ask(address, "query", query=expression)
    return {row["metric"].get("queue", ""): float(row["value"][1]) for row in found["result"]} if found else {}


def address_of(exporter: Program) -> str:
    exporter.wait_for("metrics: serving ")
    return re.findall(r"serving http://([^/]+)/metrics", exporter.output)[0]


@needs_prometheus
def test_prometheus_scrapes_an_exporter(shop: Shop, tmp_path: Path, unused_tcp_port: int) -> None:
    shop.add(*(Email() for _ in range(3)))
    command = ("metrics", f"{MODELS}:Email", f"{MODELS}:Letter", "--port", "0", "--max-age", "0")
    exporter = shop.start(*command, "--statement-timeout", "30s")
    with prometheus(address_of(exporter), tmp_path, unused_tcp_port) as address:
        depth = 'sqlaqueue_jobs{state="pending"}'
        wait_until(lambda: query(address, depth) == {"email": 3, "letter": 0}, (tmp_path / "log").read_text)
        shop.add(Email())
        wait_until(lambda: query(address, depth)["email"] == 4)
        assert query(address, 'up{job="sqlaqueue"}') == {"": 1}
        # The rule about a queue without workers has been evaluated on these gauges.
        wait_until(lambda: pending_alerts(address) == {("SqlaqueueNoConsumers", "email")})


def pending_alerts(address: str) -> set[tuple[str, str]]:
    return {(each["labels"]["alertname"], each["labels"].get("queue", "")) for each in ask(address, "alerts")["alerts"]}
