"""The example of docs/containers: its processes run as Compose and Kubernetes start them, each as process 1."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
import sqlalchemy as sa
import yaml

from tests.programs import ROOT, wait_until
from tests.servers import Database

pytestmark = pytest.mark.once

EXAMPLE = ROOT / "docs" / "containers"
PAGE = ROOT / "docs" / "deploy.md"

ENGINE = """
import os, signal, sys
try:
    os.unshare(os.CLONE_NEWPID)
except PermissionError:
    pass  # The program is then no process 1, but all else is the same.
child = os.posix_spawnp(sys.argv[1], sys.argv[1:], os.environ)
signal.signal(signal.SIGTERM, lambda *_: os.kill(child, signal.SIGTERM))
signal.signal(signal.SIGUSR1, lambda *_: os.kill(child, signal.SIGKILL))
code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
sys.exit(code if code >= 0 else 128 - code)
"""
"""Runs a program as process 1 of a namespace of its own, and exits with the code that Docker shows."""


class Process:
    def __init__(self, command: list[str], home: Path, environment: dict[str, str]) -> None:
        self.output = home / f"output-{time.monotonic_ns()}"
        with self.output.open("w") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-c", ENGINE, *command],
                cwd=home,
                env=environment,
                stdout=output,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
            )

    @property
    def text(self) -> str:
        return self.output.read_text()

    def says(self, message: str) -> None:
        """Wait until the program has printed a text."""
        wait_until(lambda: message in self.text or self.process.poll() is not None)
        assert message in self.text, self.text

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.code()

    def kill(self) -> int:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGUSR1)
        return self.code()

    def code(self) -> int:
        return self.process.wait(60)


class Services:
    """The services of compose.yaml, as processes on a copy of the example, with ports of their own."""

    def __init__(self, home: Path, url: str) -> None:
        self.home = home
        self.services: dict[str, Any] = yaml.safe_load((EXAMPLE / "compose.yaml").read_text())["services"]
        self.ports = {port: free_port() for port in ("8000", "9188", "8420")}
        self.environment = {
            **os.environ,
            "SQLAQUEUE_URL": url,
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONPATH": f"{home}:{ROOT}",
            "PYTHONUNBUFFERED": "1",
        }

    def start(self, name: str) -> Process:
        return self.execute(self.services[name]["command"])

    def execute(self, command: list[str]) -> Process:
        given = [re.sub("|".join(self.ports), lambda found: self.ports[found[0]], part) for part in command]
        return Process(given, self.home, self.environment)

    def ask(self, method: str, port: str, path: str) -> Any:
        return httpx.request(method, f"http://127.0.0.1:{self.ports[port]}{path}").raise_for_status().json()


def free_port() -> str:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return str(listener.getsockname()[1])


@pytest.fixture
def services(database: Database, tmp_path: Path) -> Services:
    home = tmp_path / "app"
    shutil.copytree(EXAMPLE, home, ignore=shutil.ignore_patterns("__pycache__"))
    return Services(home, database.url())


@pytest.mark.thorough
def test_the_services_of_compose(services: Services) -> None:
    revision = services.execute(["alembic", "revision", "--autogenerate", "--message", "invoices"])
    early = services.start("worker")
    assert revision.code() == 0, revision.text
    assert early.code() == 3, early.text
    assert "lacks" in early.text
    migration = services.start("migrate")
    assert migration.code() == 0, migration.text
    with ExitStack() as stack:
        running = dict[str, Process]()
        for name in ("web", "worker", "scheduler", "dashboard"):
            running[name] = services.start(name)
            stack.callback(running[name].kill)
        running["web"].says("Application startup complete")
        running["worker"].says("started, update_status")
        running["scheduler"].says("monthly")
        running["dashboard"].says(services.ports["8420"])
        invoice = services.ask("POST", "8000", "/orders?customer=ada")["invoice"]
        wait_until(lambda: services.ask("GET", "8000", f"/invoices/{invoice}")["status"] == "completed")
        assert services.ask("GET", "8000", f"/invoices/{invoice}")["number"] == f"ada-{invoice}"
        # The check that Docker executes.
        _, *check = services.services["worker"]["healthcheck"]["test"]
        health = services.execute(check)
        assert health.code() == 0, health.text
        assert services.ask("GET", "9188", "/ready")["ready"]
        page = httpx.get(f"http://localhost:{services.ports['8420']}", follow_redirects=True)
        assert "invoice" in page.text
        # Process 1 receives no signal that it does not handle.
        for name, process in running.items():
            assert process.stop() == 0, (name, process.text)
        assert json.loads(running["worker"].text.splitlines()[-1])["message"] == "queue invoice: stopped"
        worker = services.start("worker")
        stack.callback(worker.kill)
        worker.says("started, update_status")
        assert worker.kill() == 137


@pytest.mark.parametrize("engine", ["postgresql"], indirect=True)
def test_the_manifests_of_kubernetes(services: Services, engine: sa.Engine) -> None:
    """Their commands are those of Compose; a pod has as long to stop as a worker may take; KEDA counts what is due."""
    manifests = list(yaml.safe_load_all((EXAMPLE / "kubernetes.yaml").read_text()))
    pods = {
        each["metadata"]["name"]: each["spec"]["template"]["spec"] for each in manifests if "template" in each["spec"]
    }
    known = [service.get("command") for service in services.services.values()]
    assert all(container["command"] in known for pod in pods.values() for container in pod["containers"])
    grace = re.search(r"grace=(\d+)", (EXAMPLE / "shop" / "queues.py").read_text())
    assert grace is not None
    # A worker that has to end handlers takes up to 30 seconds more.
    longest = int(grace[1]) + 30
    assert pods["shop-worker"]["terminationGracePeriodSeconds"] >= longest
    assert int(services.services["worker"]["stop_grace_period"].removesuffix("s")) >= longest
    shown = re.search(r"^```yaml\n(apiVersion: keda.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert shown is not None
    assert yaml.safe_load(shown[1]) == manifests[-1]
    (trigger,) = manifests[-1]["spec"]["triggers"]
    with engine.begin() as connection:
        connection.exec_driver_sql("CREATE TABLE invoice (status text, run_at timestamptz)")
        connection.exec_driver_sql(
            "INSERT INTO invoice VALUES ('pending', now()), ('pending', now() + interval '1 h'), ('completed', now())"
        )
        assert connection.exec_driver_sql(trigger["metadata"]["query"]).scalar_one() == 1
