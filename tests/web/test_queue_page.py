"""The page of one queue."""

from __future__ import annotations

import html
import re
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import sessionmaker

from sqlaqueue import Limit
from sqlaqueue.mapping.mixin import spec_of
from sqlaqueue.web import Access, Dashboard
from tests.admin.models import Setup
from tests.unique.models import KINDS
from tests.web.conftest import client, everything
from tests.web.queue_data import HISTORY, attempt, counting_rows, counting_statements, fill, finish, no_table_is_small

CODE = "<script>alert(1)</script>"


async def page_of(setup: Setup, path: str = "queues/job", *, status: int = 200, **options: Any) -> str:
    """Return the page of a queue, without entities."""
    given = {"access": everything, **options}
    dashboard = Dashboard([setup.model], sessionmaker(setup.engine), **given)
    response = await client(dashboard).get(f"/{path}")
    assert response.status_code == status, response.text
    assert CODE not in response.text
    return html.unescape(response.text)


@pytest.mark.each_value
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("options", [{}, HISTORY], ids=["plain", "history"])
async def test_each_strategy_has_a_page(engine: sa.Engine, kind: str, options: Any) -> None:
    setup = Setup.of(engine, kind, unique=None, **options)
    setup.add(*(setup.model() for _ in range(3)))
    if options:
        attempt(setup, "completed", 10, 20)
    for span in ("hour", "day"):
        page = await page_of(setup, f"queues/job?span={span}")
        assert 'class="problem"' not in page
        assert re.search(r'<dt>Due</dt><dd><a href="[^"]+">3</a></dd>', page)
        assert ('id="throughput-chart"' in page) == bool(options)
        assert "sqlaqueue worker tests.unique.models:make_job.<locals>.Job=MODULE:HANDLER" in page


async def test_an_empty_queue_says_how_to_begin(engine: sa.Engine) -> None:
    page = await page_of(Setup.of(engine, "update_status", unique=None, **HISTORY))
    for text in (
        "session.add(Job(...))",
        "No Consumer runs",
        "Nothing has ended within the last hour",
        "No failed jobs",
    ):
        assert text in page


async def test_without_a_history_the_page_says_what_to_configure(engine: sa.Engine, monkeypatch: Any) -> None:
    no_table_is_small(monkeypatch)
    page = await page_of(Setup.of(engine, "update_status", unique=None))
    assert "QueueConfig(..., attempt_history=timedelta(days=14))" in page
    assert "CREATE INDEX CONCURRENTLY ix_job_finished ON public.job (status, finished_at)" in page


async def test_failures_lead_to_the_jobs(engine: sa.Engine) -> None:
    setup = Setup.of(engine, "update_status", unique=None)
    finish(setup, "failed", 10, error="smtp.Refused: 550")
    finish(setup, "failed", 10)
    page = await page_of(setup)
    assert 'href="../queues/job/jobs?state=failed&error=smtp.Refused"' in page
    # The list has no filter for jobs without an error.
    assert 'href="../queues/job/jobs?state=failed">without an error</a>' in page


async def test_consumers_lead_to_what_they_run(engine: sa.Engine) -> None:
    setup = Setup.of(engine, "update_status", unique=None)
    setup.add_consumer(running=[["9223372036854775807"], ["2"]])
    setup.add_consumer("web:2", running=[[str(number)] for number in range(100, 130)], listening=False)
    page = await page_of(setup)
    assert 'href="../queues/job/job?key=9223372036854775807">9223372036854775807</a>' in page
    assert "and 10 more" in page
    assert "only polls" in page


async def test_texts_of_the_database_are_no_code(engine: sa.Engine) -> None:
    setup = Setup.of(engine, "update_status", unique=None, limits=[Limit(1, per="key")], **HISTORY)
    finish(setup, "failed", 10, error=f"{CODE}: x")
    finish(setup, "failed", 10, error=f"ValueError: {CODE}")
    attempt(setup, "failed", 10, error=CODE)
    setup.add_consumer(CODE, running=[[CODE]])
    setup.add(setup.model(key=CODE))
    setup.execute(
        "UPDATE job SET status = 'processing', lease_expires_at = now() + interval '1 min', "
        "lease_token = gen_random_uuid() WHERE key IS NOT NULL"
    )
    page = await page_of(setup)
    assert f"key {CODE}" in page


async def test_redacted_columns_are_not_shown(engine: sa.Engine) -> None:
    setup = Setup.of(engine, "update_status", unique=None, limits=[Limit(1, per="key")])
    finish(setup, "failed", 10, error="ValueError: the secret")
    setup.add(setup.model(key="the secret"))
    setup.execute(
        "UPDATE job SET status = 'processing', lease_expires_at = now() + interval '1 min', "
        "lease_token = gen_random_uuid() WHERE key IS NOT NULL"
    )
    assert "the secret" in await page_of(setup)
    page = await page_of(setup, redact=["key", "last_error"])
    assert "the secret" not in page
    assert "key redacted" in page
    assert "The texts of errors are redacted." in page


@pytest.mark.parametrize(
    ("access", "shown"),
    [
        (Access(read=True, act=True), True),
        (Access(read=True, act={"job": ["pause"]}), True),
        (Access(read=True, act={"job": ["requeue"]}), False),
        (Access(read=True), False),
    ],
)
async def test_pausing_is_offered_to_whom_it_is_allowed(engine: sa.Engine, access: Access, *, shown: bool) -> None:
    setup = Setup.of(engine, "update_status", unique=None)
    page = await page_of(setup, access=lambda _: access)
    assert ('action="../queues/job/actions/pause"' in page) == shown
    setup.execute("INSERT INTO sqlaqueue_control (queue, key) VALUES (:queue, '[]')", queue=spec_of(setup.model).name)
    page = await page_of(setup, access=lambda _: access)
    assert ('action="../queues/job/actions/resume"' in page) == shown
    assert "No job begins until the queue is resumed." in page


@pytest.mark.parametrize(
    ("path", "status"),
    [("queues/job?span=year", 400), ("queues/job?span=", 400), ("queues/jobs", 404), ("queues/~x", 404)],
)
async def test_wrong_addresses(engine: sa.Engine, path: str, status: int) -> None:
    page = await page_of(Setup.of(engine, "update_status", unique=None), path, status=status)
    if status == 400:
        assert "span=" in page


async def test_a_queue_that_may_not_be_read_is_as_unknown_as_another(client_of: Any) -> None:
    browser = client_of(access=lambda _: Access(read=["invoice"]))
    hidden, unknown = [await browser.get(f"/queues/{name}") for name in ("email", "nothing")]
    assert (hidden.status_code, hidden.text) == (404, unknown.text)


@pytest.mark.parametrize("table", ["sqlaqueue_attempt", "sqlaqueue_consumer", "sqlaqueue_control"])
async def test_a_missing_side_table_hides_its_panel_only(engine: sa.Engine, table: str) -> None:
    setup = Setup.of(engine, "update_status", unique=None, **HISTORY)
    finish(setup, "failed", 10, error="ValueError: x")
    setup.execute(f"DROP TABLE {table} CASCADE")
    page = await page_of(setup)
    assert "A table is missing." in page
    assert "<dt>Pending</dt>" in page
    assert ">ValueError</a>" in page


async def test_a_page_of_a_large_table_reads_few_rows(engine: sa.Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    no_table_is_small(monkeypatch)
    limits = {
        "queues.COUNT_LIMIT": 100,
        "past.LIMIT": 100,
        "past.COUNTED": 100,
        "past.GROUPED": 100,
        "past.SAMPLE": 100,
        "past.JOINED": 100,
    }
    for name, limit in limits.items():
        monkeypatch.setattr(f"sqlaqueue.web.data.{name}", limit)
    monkeypatch.setattr("sqlaqueue.web.data.past.read_throughput.__kwdefaults__", {"limit": 100, "source": None})
    setup = Setup.of(engine, "update_status", unique=None, **HISTORY)
    fill(setup, 5000)
    setup.execute(
        "INSERT INTO sqlaqueue_attempt (queue, key, attempt, started_at, ended_at, outcome) "
        "SELECT 'job', jsonb_build_array(id), 1, finished_at, finished_at, status FROM job"
    )
    setup.execute("ANALYZE")
    with counting_rows(engine) as reads, counting_statements(engine) as sent:
        page = await page_of(setup)
    assert "These are the newest 100" in page
    assert (reads.by_scan["job"], reads.by_scan["sqlaqueue_attempt"]) == (0, 0)
    assert reads.by_index["job"] <= 110
    assert reads.by_index["sqlaqueue_attempt"] <= 410
    assert len(sent) <= 50
