"""The recipe for web servers, run as it is written: a real server starts, does a job and ends in order."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import psycopg
import pytest
import sqlalchemy as sa

from tests.docs.pages import ROOT, SNIPPET
from tests.programs import wait_until
from tests.servers import Database

PAGE = (ROOT / "docs" / "recipes" / "web-servers.md").read_text()
SECTIONS = {section.partition("\n")[0]: section for section in re.split(r"^## ", PAGE, flags=re.MULTILINE)}
QUEUE, ASYNCIO = "The queue", "The Consumer for FastAPI, Starlette and Litestar"

RUN_AS_A_TASK = """
import asyncio, json

async def app(scope, receive, send):
    if scope["type"] == "lifespan":
        await receive()
        task = asyncio.create_task(consumer.run())
        await send({"type": "lifespan.startup.complete"})
        await receive()
        consumer.stop()
        await task
        await engine.dispose()
        await send({"type": "lifespan.shutdown.complete"})
    else:
        key = int(scope["path"].rpartition("/")[2]) if scope["method"] == "GET" else None
        said = await (enqueue("ada") if key is None else status_of(key))
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": json.dumps(said).encode()})
"""
"""A server whose lifespan runs the Consumer as a task; the server handles the signal, and stops the Consumer."""


def blocks(section: str, database: Database) -> list[str]:
    found = [match[3] for match in SNIPPET.finditer(SECTIONS[section]) if match[2] == "python"]
    for driver in ("psycopg", "asyncpg"):
        url = repr(database.url(driver))  # type: ignore[arg-type] # one of the drivers
        found = [code.replace(f'"postgresql+{driver}://localhost/app"', url) for code in found]
    return found


def write_app(path: Path, section: str, database: Database) -> list[str]:
    """Write the files of a section, and return the command that serves them."""
    (queue,), asyncio = blocks(QUEUE, database), blocks(ASYNCIO, database)
    if section == "Flask":
        app, hooks = blocks(section, database)
        (path / "gunicorn.conf.py").write_text(hooks)
        (path / "app.py").write_text(queue + app)
        return ["gunicorn", "--bind"]
    app = RUN_AS_A_TASK if section == "run()" else "".join(blocks(section, database))
    (path / "app.py").write_text(queue + "".join(asyncio) + app)
    return ["uvicorn", "--port"]


def ask(port: int, path: str, method: str = "GET") -> Any:
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", method=method)
    with urllib.request.urlopen(request, timeout=30) as response:  # noqa: S310 - as above
        return json.load(response)


def create_tables(section: str, database: Database) -> None:
    namespace: dict[str, Any] = {}
    exec(compile(blocks(QUEUE, database)[0], "queue", "exec", dont_inherit=True), namespace)  # noqa: S102 - the recipe's
    engine = sa.create_engine(database.url())
    namespace["Base"].metadata.create_all(engine)
    engine.dispose()


@pytest.mark.once
@pytest.mark.parametrize("section", ["FastAPI", "Starlette", "Litestar", "Flask", "run()"])
def test_a_server_does_jobs_and_ends_in_order(
    section: str, database: Database, tmp_path: Path, unused_tcp_port: int
) -> None:
    create_tables(section, database)
    program, option = write_app(tmp_path, section, database)
    address = f"127.0.0.1:{unused_tcp_port}" if program == "gunicorn" else str(unused_tcp_port)
    log = tmp_path / "log"

    def starts() -> bool:
        assert process.poll() is None, log.read_text()
        try:
            return ask(unused_tcp_port, "/emails/0") == {"status": None}
        except (urllib.error.URLError, ConnectionError):
            return False

    with (
        log.open("w") as output,
        database.connect() as connection,
        subprocess.Popen(
            [sys.executable, "-m", program, "app:app", option, address], cwd=tmp_path, stdout=output, stderr=output
        ) as process,
    ):
        try:
            wait_until(starts, "a server that answers", seconds=120)
            key = ask(unused_tcp_port, "/emails?to=ada@example.com", "POST")["id"]
            wait_until(lambda: ask(unused_tcp_port, f"/emails/{key}") == {"status": "completed"})
            # Its first heartbeat may come after the job.
            wait_until(lambda: count_consumers(connection) == 1)
            process.send_signal(signal.SIGTERM)
            process.wait(120)
        finally:
            process.kill()
    said = log.read_text()
    # uvicorn ends by the signal that it was sent, after everything else.
    assert process.returncode == (0 if program == "gunicorn" else -signal.SIGTERM), said
    if program == "uvicorn":
        assert "Application shutdown complete" in said
    assert "Traceback" not in said
    with database.connect() as connection:
        assert count_consumers(connection) == 0


@pytest.mark.once
def test_a_server_without_its_tables_does_not_start(database: Database, tmp_path: Path, unused_tcp_port: int) -> None:
    program, option = write_app(tmp_path, "Starlette", database)
    done = subprocess.run(
        [sys.executable, "-m", program, "app:app", option, str(unused_tcp_port)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 3
    assert "DatabaseNotReadyError" in done.stderr
    assert "Application startup failed" in done.stderr


def count_consumers(connection: psycopg.Connection) -> int:
    (row,) = connection.execute("SELECT count(*) FROM sqlaqueue_consumer").fetchall()
    return int(row[0])
