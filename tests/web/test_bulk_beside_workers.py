"""Cancel and delete by filter while four processes run the jobs: nothing is lost, run twice, or run after its end."""

from __future__ import annotations

import logging
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from html import unescape
from pathlib import Path
from typing import Any

import httpx
import pytest
import sqlalchemy as sa

from tests.servers import Database
from tests.unique.models import create, make_job
from tests.web import worker
from tests.web.jobs_of import KINDS, add

pytestmark = pytest.mark.once

SIZE, GROUPS, PROCESSES = 250, 8, 4
ALWAYS = ("update_status", "delete_returning")
JOBS = SIZE * GROUPS


@contextmanager
def workers(url: str, kind: str) -> Iterator[None]:
    """Run jobs in four processes."""
    command = [sys.executable, "-m", worker.__name__, url, kind]
    started = [
        subprocess.Popen(command, cwd=Path(__file__).parents[2], stderr=subprocess.PIPE, text=True)
        for _ in range(PROCESSES)
    ]
    try:
        yield
    finally:
        for process in started:
            process.send_signal(signal.SIGTERM)
        errors = [process.communicate(timeout=60)[1] for process in started]
    assert [process.returncode for process in started] == [0] * PROCESSES, errors
    assert [error for error in errors if "Traceback" in error] == []


async def act_on_all(browser: httpx.AsyncClient, action: str, **filters: str) -> None:
    """Look at the preview, and do what it offers."""
    page = await browser.get("/queues/job/confirm", params={"all": "1", "action": action, **filters})
    assert page.status_code == 200, page.text
    found = re.findall(r'<input type="hidden" name="([^"]*)" value="([^"]*)">', page.text)
    form = {unescape(name): unescape(value) for name, value in found}
    if form:  # there are such jobs
        answer = await browser.post(f"/queues/job/actions/{action}", data=form)
        assert answer.status_code == 303, answer.text


def fill(engine: sa.Engine, model: Any) -> None:
    create(engine, model)
    with engine.begin() as connection:
        connection.exec_driver_sql(worker.RAN)


def enqueue(engine: sa.Engine, model: Any, group: int) -> None:
    """Enqueue a group of jobs. However fast the workers are, some of each group but the first are left to cancel."""
    first, later = group * SIZE + 1, datetime.now(UTC) + timedelta(hours=1)
    jobs = [model(id=number, note=str(group)) for number in range(first, first + SIZE)]
    for job in jobs[-50:] if group else ():
        job.run_at = later
    add(engine, *jobs)


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize(
    "kind", [each if each in ALWAYS else pytest.param(each, marks=pytest.mark.thorough) for each in KINDS]
)
async def test_nothing_is_lost(
    engine: sa.Engine, shared: Database, kind: str, client_of: Any, caplog: pytest.LogCaptureFixture
) -> None:
    model = make_job(kind, unique=None)
    fill(engine, model)
    enqueue(engine, model, 0)
    caplog.set_level(logging.INFO, "sqlaqueue.audit")

    def scalar(statement: str) -> Any:
        with engine.connect() as connection:
            return connection.scalar(sa.text(statement))

    def gone(group: int) -> tuple[datetime, set[int]]:
        """Return which of the jobs that were enqueued have no row any more, and a time after that."""
        with engine.connect() as connection:
            left = set(connection.scalars(sa.text("SELECT id FROM job")))
            now = connection.scalar(sa.text("SELECT clock_timestamp()"))
        assert now is not None
        return now, set(range(1, (group + 1) * SIZE + 1)) - left

    reported: list[tuple[datetime, set[int]]] = []
    async with client_of(model) as browser:
        with workers(shared.url(), kind):
            until(lambda: scalar("SELECT count(*) FROM ran") > PROCESSES)
            for group in range(1, GROUPS):
                enqueue(engine, model, group)
                await act_on_all(browser, "cancel", state="pending", **{"f.note": str(group)})
                for state in ("cancelled", "completed") if kind != "rows_are_messages" else ("cancelled",):
                    await act_on_all(browser, "purge", state=state)
                reported.append(gone(group))
            until(lambda: scalar(UNFINISHED[kind]) == 0)
    audits: list[Any] = [record for record in caplog.records if record.name == "sqlaqueue.audit"]
    counts = {action: sum(each.count for each in audits if each.action == action) for action in ("cancel", "purge")}
    with engine.connect() as connection:
        ran = connection.execute(sa.text("SELECT id, attempt, at FROM ran")).all()
    # Each job was either run or cancelled; of those that were asked to stop some had not begun. None was run twice in
    # one attempt.
    asked = sum(each.facts.get("asked", 0) for each in audits)
    assert counts["cancel"] <= JOBS - len({row.id for row in ran}) <= counts["cancel"] + asked
    assert len({(row.id, row.attempt) for row in ran}) == len(ran)
    assert counts["cancel"] >= 50 * (GROUPS - 1)
    # What was deleted had been run before, or never.
    late = [(row.id, row.at, moment) for moment, ids in reported for row in ran if row.id in ids and row.at > moment]
    assert late == []
    assert counts["purge"] > 0


UNFINISHED = {
    kind: "SELECT count(*) FROM job"
    + ("" if kind == "rows_are_messages" else " WHERE status IN ('pending', 'processing')")
    for kind in KINDS
}
