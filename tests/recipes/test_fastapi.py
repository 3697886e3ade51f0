"""The page about a FastAPI project: its files are written, and the commands of its compose.yaml run as processes."""

import contextlib
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.docs.pages import DOCS, ROOT
from tests.programs import Program, run_program, wait_until
from tests.servers import Database, Server

PAGE = (DOCS / "fastapi.md").read_text()
FILES = dict(re.findall(r"^```\w+\n# ([\w./]+)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL))
COMMANDS = [
    line for block in re.findall(r"^```sh\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL) for line in block.splitlines()
]


class Project:
    """The project of the page in a directory, with a database of its own."""

    def __init__(self, directory: Path, url: str) -> None:
        self.directory = directory
        path = f"{directory}:{ROOT}"
        self.environment = {**os.environ, "SQLAQUEUE_URL": url, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}
        self.write(*FILES.keys() - {"migrations/env.py"})

    def write(self, *names: str) -> None:
        for name in names:
            path = self.directory / name
            path.parent.mkdir(exist_ok=True)
            path.write_text(FILES[name])

    def run(self, *command: str, **variables: str) -> str:
        """Run a program until it ends, as it has to: with 0."""
        done = run_program(*command, directory=self.directory, environment=self.environment | variables)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def start(self, *command: str) -> Program:
        return Program(*command, directory=self.directory, environment=self.environment)


def answers(ask: Callable[[], httpx.Response]) -> bool:
    with contextlib.suppress(httpx.TransportError):
        return ask().status_code == httpx.codes.NOT_FOUND
    return False


@pytest.mark.once
def test_the_project_of_the_page_does_a_job(database: Database, tmp_path: Path, unused_tcp_port: int) -> None:
    project = Project(tmp_path, database.url())
    services: dict[str, Any] = yaml.safe_load(FILES["compose.yaml"])["services"]
    # The page's order: Alembic writes a directory, of which the page replaces one file.
    for command in ("alembic init migrations", 'alembic revision --autogenerate -m "reports"', "alembic upgrade head"):
        assert command in COMMANDS
    project.run("alembic", "init", "migrations")
    project.write("migrations/env.py")
    project.run("alembic", "revision", "--autogenerate", "-m", "reports")
    project.run(*services["migrate"]["command"])
    project.run("alembic", "check")
    port = [str(unused_tcp_port) if part == "8000" else part for part in services["web"]["command"]]
    with contextlib.ExitStack() as stack:
        web = project.start(*port)
        stack.callback(web.clear)
        client = stack.enter_context(httpx.Client(base_url=f"http://127.0.0.1:{unused_tcp_port}", timeout=60))
        wait_until(lambda: answers(lambda: client.get("/reports/1")), lambda: web.output, seconds=120)
        key = client.post("/reports", params={"customer": "Ada"}).raise_for_status().json()["id"]
        assert client.get(f"/reports/{key}").json() == {"status": "pending", "percent": 0, "text": None}
        worker = project.start(*services["worker"]["command"])
        stack.callback(worker.clear)
        seen = set[int]()

        def is_done() -> bool:
            report = client.get(f"/reports/{key}").json()
            seen.add(report["percent"])
            return bool(report["status"] == "completed")

        wait_until(is_done, lambda: worker.output)
        # The progress is seen before the end.
        assert seen & {20, 40, 60, 80}
        assert client.get(f"/reports/{key}/end").json() == {"status": "completed"}
        assert client.get(f"/reports/{key}").json()["text"] == "All orders of Ada"
        assert client.get("/reports/99/end").json() == {"status": "gone"}
        assert "All orders of Ada" in project.run("sqlaqueue", "job", "app.jobs:consumer", str(key))
        worker.signal()
        assert worker.end() == 0, worker.output
        web.signal()
        web.end()
        assert "Traceback" not in web.output + worker.output


@pytest.mark.once
def test_the_test_of_the_page_passes(server: Server, tmp_path: Path) -> None:
    project = Project(tmp_path, "postgresql+psycopg://127.0.0.1:1/no_server")
    conftest = tmp_path / "tests" / "conftest.py"
    # The server of this run in place of an embedded one.
    own = f'\n\n@pytest.fixture(scope="session")\ndef sqlaqueue_server_url():\n    return {server.url()!r}\n'
    conftest.write_text(conftest.read_text() + own)
    # A new process: one that is forked has imported what pytest rewrites.
    command = [sys.executable, "-m", "pytest", "-W", "error", "-p", "no:faker", "-p", "no:cacheprovider"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=project.environment, check=False)
    assert "1 passed" in done.stdout, done.stdout + done.stderr


@pytest.mark.once
def test_the_worker_has_time_to_stop() -> None:
    grace = re.search(r"grace=(\d+)", FILES["app/jobs.py"])
    assert grace is not None
    stop = yaml.safe_load(FILES["compose.yaml"])["services"]["worker"]["stop_grace_period"]
    assert int(stop.removesuffix("s")) >= int(grace[1]) + 30


@pytest.mark.once
def test_one_extra_is_enough() -> None:
    """What the project of the page installs has what its files import."""
    dependencies = tomllib.loads(FILES["pyproject.toml"])["project"]["dependencies"]
    assert dependencies == ["fastapi", "sqlaqueue[standard]", "uvicorn"]
    with (ROOT / "pyproject.toml").open("rb") as file:
        extras = tomllib.load(file)["project"]["optional-dependencies"]
    assert {"alembic", "async", "cli", "psycopg"} <= set(re.findall(r"\w+", extras["standard"][0]))
