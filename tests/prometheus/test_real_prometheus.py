"""A real Prometheus scrapes an exporter, and promtool checks what is exported and shipped."""

from __future__ import annotations

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

from sqlaqueue.prometheus import alerts
from tests.cli.conftest import MODELS, Shop, shop
from tests.cli.shop.models import Email
from tests.programs import Program, wait_until

__all__ = ["shop"]

PATH = f"{os.environ.get('PATH', os.defpath)}:/usr/local/bin:/usr/bin"
PROMETHEUS, PROMTOOL = (shutil.which(name, path=PATH) for name in ("prometheus", "promtool"))

pytestmark = [
    pytest.mark.once,
    pytest.mark.skipif(
        PROMETHEUS is None or PROMTOOL is None,
        reason="prometheus and promtool are not on the PATH: apt-get install prometheus",
    ),
]

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


def test_when_alerts_fire(tmp_path: Path) -> None:
    """A job that has been due for five minutes fires then, and a failing database is not hidden by another one."""
    (tmp_path / "alerts.yml").write_text(alerts())
    (tmp_path / "rules.yml").write_text(RULES)
    promtool("test", "rules", str(tmp_path / "rules.yml"))


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
