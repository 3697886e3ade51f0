"""The page of all schedules."""

from __future__ import annotations

import html
import re
from datetime import timedelta
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session

from sqlaqueue import Schedule
from sqlaqueue.schedules.schedule import schedule_groups
from sqlaqueue.schedules.store import declare
from sqlaqueue.web import Access
from tests.web.queue_data import counting_statements

CODE = "<script>alert(1)</script>"


@pytest.fixture
def execute(queues: Any, engine: sa.Engine) -> Any:
    """Declare schedules of two queues, and return a function that executes SQL."""
    schedules = [
        Schedule("nightly", queues.Invoice, cron="0 3 * * *", timezone="Europe/Berlin", values={"note": "the secret"}),
        Schedule("heartbeat", queues.Email, every=timedelta(minutes=5), values={"recipient": "ada@example.com"}),
    ]
    groups = schedule_groups(schedules, "test")
    queues.metadata.create_all(engine)
    with Session(engine) as session:
        for group in groups:
            declare(session, group)
        session.commit()

    def run(statement: str) -> None:
        with engine.begin() as connection:
            connection.execute(sa.text(statement))

    return run


async def page_of(client_of: Any, **options: Any) -> str:
    response = await client_of(**options).get("/schedules")
    assert response.status_code == 200, response.text
    assert CODE not in response.text
    return html.unescape(response.text)


async def test_schedules_of_all_queues(client_of: Any, execute: Any) -> None:
    execute("UPDATE sqlaqueue_schedule SET next_tick = '2126-01-01 02:00+00' WHERE name = 'nightly'")
    page = await page_of(client_of)
    assert page.index(">heartbeat<") < page.index(">nightly<")
    assert "at 03:00 every day, Europe/Berlin" in page
    assert 'datetime="2126-01-01T02:00:00+00:00"' in page
    # The two after it.
    assert 'datetime="2126-01-02T02:00:00+00:00"' in page
    assert "the secret" in page
    # No process has looked at the other one.
    assert "not begun" in page


async def test_states(client_of: Any, execute: Any) -> None:
    execute(
        "UPDATE sqlaqueue_schedule SET next_tick = now() - interval '2 hours', last_error = 'no_values: ' "
        "WHERE name = 'nightly'"
    )
    execute("UPDATE sqlaqueue_schedule SET paused_at = now() WHERE name = 'heartbeat'")
    page = await page_of(client_of)
    for text in ("late by 2 h", ">error<", "no_values: ", ">paused<"):
        assert text in page
    assert ">on time<" not in page


@pytest.mark.parametrize(
    ("act", "shown"),
    [(True, 2), ({"invoice": ["schedule"]}, 1), ({"invoice": ["pause"]}, 0), (False, 0)],
)
async def test_buttons_are_offered_to_whom_they_are_allowed(client_of: Any, execute: Any, act: Any, shown: int) -> None:
    page = await page_of(client_of, access=lambda _: Access(read=True, act=act))
    assert page.count("Run now") == shown
    if shown:
        assert 'action="./schedules/run"' in page
        assert '<input type="hidden" name="queue" value="invoice">' in page


async def test_schedules_of_other_queues_are_not_shown(client_of: Any, execute: Any) -> None:
    page = await page_of(client_of, access=lambda _: Access(read=["email"]))
    assert "heartbeat" in page
    assert "nightly" not in page


async def test_redacted_values_are_not_shown(client_of: Any, execute: Any) -> None:
    execute("UPDATE sqlaqueue_schedule SET last_error = 'the secret: x' WHERE name = 'nightly'")
    page = await page_of(client_of, redact=["Invoice.note", "last_error"])
    assert "the secret" not in page
    assert page.count("redacted") == 2
    assert "ada@example.com" in page


async def test_names_are_no_code(client_of: Any, execute: Any) -> None:
    execute(f"UPDATE sqlaqueue_schedule SET name = '{CODE}', last_error = '{CODE}' WHERE name = 'nightly'")
    assert CODE in await page_of(client_of)


async def test_without_tables_there_are_no_schedules(client_of: Any, engine: sa.Engine) -> None:
    with counting_statements(engine) as sent:
        page = await page_of(client_of)
    assert "No schedules" in page
    # The queues share one table, which is looked for once.
    assert len([each for each in sent if "to_regclass" in each]) == 1


async def test_a_locked_table_is_said(client_of: Any, execute: Any, engine: sa.Engine) -> None:
    with engine.connect() as connection:
        connection.exec_driver_sql("LOCK TABLE sqlaqueue_schedule IN ACCESS EXCLUSIVE MODE")
        page = await page_of(client_of)
        connection.rollback()
    assert "A table is locked by another session" in page or "Reading this took too long" in page
    assert "No schedules" not in page


@pytest.mark.parametrize("name", ["a/b", "..", ".", "%2f", "~x", "a?b#c", "\u00fc \\", CODE])
async def test_a_schedule_of_any_name_can_be_paused(client_of: Any, execute: Any, engine: sa.Engine, name: str) -> None:
    with engine.begin() as connection:
        connection.execute(sa.text("UPDATE sqlaqueue_schedule SET name = :name WHERE name = 'nightly'"), {"name": name})
    browser = client_of()
    page = await browser.get("/schedules")
    fields = [html.unescape(each) for each in re.findall(r'name="schedule" value="([^"]*)"', page.text)]
    assert name in fields
    response = await browser.post("/schedules/pause", data={"queue": "invoice", "schedule": name})
    assert response.status_code == 303, response.text
    with engine.connect() as connection:
        paused = sa.text("SELECT name FROM sqlaqueue_schedule WHERE paused_at IS NOT NULL")
        assert connection.scalars(paused).all() == [name]
