"""The audit of actions: a line for each, also for those that fail."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import anyio
import pytest
import sqlalchemy as sa

from sqlaqueue import admin
from sqlaqueue.web.data import bulk
from sqlaqueue.web.database import Database
from tests.web.jobs_of import add, fail_jobs, states
from tests.web.models import Queues

FORM = {"Content-Type": "application/x-www-form-urlencoded"}


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    caplog.set_level(logging.INFO, "sqlaqueue.audit")
    return lambda: [each.getMessage() for each in caplog.records if each.name == "sqlaqueue.audit"]


async def test_a_connection_that_is_lost_after_the_change(
    client_of: Any, engine: sa.Engine, queues: Queues, lines: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    cancel = admin.cancel

    def lost(session: Any, *given: Any, **options: Any) -> Any:
        cancel(session, *given, **options)
        session.execute(sa.select(sa.func.pg_terminate_backend(sa.func.pg_backend_pid())))

    monkeypatch.setattr(bulk.admin, "cancel", lost)
    add(engine, queues.Email(recipient="a"))
    assert (await client_of().post("/queues/email/actions/cancel", data={"key": "1"})).status_code == 503
    assert states(engine, queues.Email) == {"1": "cancelled"}
    assert lines() == ["user='ada' action=cancel queue='email' keys=['1'] error='OperationalError'"]


@pytest.mark.parametrize("path", ["cancel", "edit", "pause", "resume"])
async def test_a_request_that_is_cancelled(
    client_of: Any, queues: Queues, lines: Any, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    async def never(*_: Any, **__: Any) -> None:
        await anyio.sleep_forever()

    monkeypatch.setattr(Database, "write", never)
    with anyio.move_on_after(0.2):
        await client_of().post(f"/queues/email/actions/{path}", content="key=1", headers=FORM)
    (line,) = lines()
    assert line.startswith(f"user='ada' action={path} queue='email'")
    assert line.endswith("error='CancelledError'")


async def test_a_paused_queue_that_cannot_be_paused(client_of: Any, engine: sa.Engine, lines: Any) -> None:
    with engine.begin() as connection:
        connection.exec_driver_sql("DROP TABLE sqlaqueue_control")
    assert (await client_of().post("/queues/email/actions/pause", content="", headers=FORM)).status_code == 503
    assert lines() == ["user='ada' action=pause queue='email' error='ProgrammingError'"]


async def test_a_value_of_a_filter_is_no_further_condition(
    client_of: Any, engine: sa.Engine, queues: Queues, lines: Any
) -> None:
    add(engine, *(queues.Email(recipient="a&state=failed b") for _ in range(2)))
    fail_jobs(engine, queues.Email, 1)
    form = {"all": "1", "f.recipient": "a&state=failed b", "until": "2100-01-01T00:00:00+00:00"}
    assert (await client_of().post("/queues/email/actions/purge", data=form)).status_code == 303
    assert lines() == [
        "user='ada' action=purge queue='email' count=1 keys=['1'] filter='f.recipient=a%26state%3Dfailed b'"
    ]
