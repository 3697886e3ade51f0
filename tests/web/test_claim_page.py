"""The plan of a claim: executed and rolled back, beside running workers."""

from __future__ import annotations

import html
from typing import Any

import httpx
import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session, sessionmaker

from sqlaqueue import Limit, claim
from sqlaqueue.mapping.mixin import spec_of
from sqlaqueue.web import Dashboard
from sqlaqueue.web.data.queues import ClaimPlan, measure_claim, plan_claim, read_horizon, read_tables
from tests.admin.models import Setup
from tests.unique.models import KINDS
from tests.web.conftest import client, everything
from tests.web.queue_data import counting_statements, reading_role


def measured(setup: Setup) -> ClaimPlan:
    with Session(setup.engine) as session:
        found = measure_claim(session, spec_of(setup.model))
        assert isinstance(found, ClaimPlan)
        # What it has locked is free, though the transaction goes on.
        with Session(setup.engine) as other:
            assert len(other.scalars(claim(setup.model, 10)).all()) == 3
            other.rollback()
        return found


@pytest.mark.each_value
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        *((kind, {}) for kind in KINDS),
        # Existing messages have no flow control.
        *((kind, {"limits": [Limit(2, per="key")]}) for kind in KINDS if kind != "existing_messages"),
    ],
)
def test_a_measured_claim_leaves_nothing_behind(engine: sa.Engine, kind: str, options: Any) -> None:
    setup = Setup.of(engine, kind, unique=None, **options)
    setup.add(*(setup.model(key=str(number)) for number in range(3)))
    with engine.connect() as connection:
        rows = connection.execute(sa.select(setup.model.__table__)).all()
    found = measured(setup)
    assert found.is_measured
    assert found.claimed == 1
    assert found.plan.execution_milliseconds is not None
    assert found.plan.root.buffers.used > 0
    assert found.plan.root.buffers.used == max(node.buffers.used for node in found.plan.root.nodes())
    with engine.connect() as connection:
        assert connection.execute(sa.select(setup.model.__table__)).all() == rows


def test_jobs_that_others_have_locked_are_not_waited_for(engine: sa.Engine) -> None:
    setup = Setup.of(engine, "batch_select", unique=None)
    setup.add(setup.model(), setup.model())
    with Session(engine) as worker, Session(engine) as session:
        worker.scalars(claim(setup.model, 2)).all()
        found = measure_claim(session, spec_of(setup.model))
        assert isinstance(found, ClaimPlan)
        assert found.claimed == 0


def test_a_plan_needs_no_execution(engine: sa.Engine) -> None:
    setup = Setup.of(engine, "update_status", unique=None)
    setup.add(setup.model())
    with Session(engine) as session:
        session.execute(sa.text("SET TRANSACTION READ ONLY"))
        found = plan_claim(session, spec_of(setup.model))
    assert isinstance(found, ClaimPlan)
    assert (found.is_measured, found.claimed) == (False, None)
    assert "ix_job_queue_claim" in found.indexes
    assert found.plan.sql.startswith("WITH")


def test_a_claim_without_its_index_reads_the_whole_table(engine: sa.Engine) -> None:
    setup = Setup.of(engine, "update_status", unique=None)
    setup.execute(
        "INSERT INTO job (status, priority, run_at, attempts, max_attempts, created_at) "
        "SELECT 'pending', 0, now(), 0, 5, now() FROM generate_series(1, 3000)"
    )
    setup.execute("DROP INDEX ix_job_queue_claim")
    setup.execute("ANALYZE job")
    with Session(engine) as session:
        found = measure_claim(session, spec_of(setup.model))
    assert isinstance(found, ClaimPlan)
    assert found.whole_tables == ["job"]


async def page_of(setup: Setup, engine: sa.Engine | None = None) -> httpx.Response:
    dashboard = Dashboard([setup.model], sessionmaker(engine or setup.engine), access=everything)
    response = await client(dashboard).get("/queues/job/claim")
    assert response.status_code == 200, response.text
    return response


@pytest.mark.parametrize("kind", KINDS)
async def test_the_page_shows_buffers_tables_and_indexes(engine: sa.Engine, kind: str) -> None:
    setup = Setup.of(engine, kind, unique=None)
    setup.add(setup.model())
    page = html.unescape((await page_of(setup)).text)
    assert 'class="problem"' not in page
    assert "<dt>Buffers</dt>" in page
    assert "Executed by EXPLAIN (ANALYZE, BUFFERS)" in page
    assert "public.job" in page


async def test_missing_and_invalid_indexes_of_claims_are_shown_with_their_fix(engine: sa.Engine) -> None:
    setup = Setup.of(engine, "update_status", unique=None)
    assert "What is wrong with the indexes" not in (await page_of(setup)).text
    setup.execute("DROP INDEX ix_job_queue_claim")
    setup.execute("UPDATE pg_index SET indisvalid = false WHERE indexrelid = 'ix_job_queue_lease'::regclass")
    setup.execute("CREATE INDEX mine ON job (attempts)")
    setup.execute("UPDATE pg_index SET indisvalid = false WHERE indexrelid = 'mine'::regclass")
    page = html.unescape((await page_of(setup)).text)
    findings, _, plan = page.partition("Plan of a claim")
    assert "CREATE INDEX CONCURRENTLY ix_job_queue_claim" in findings
    assert "REINDEX INDEX CONCURRENTLY" in findings
    assert "ix_job_queue_lease" in findings
    assert "mine" not in findings, "it is no index of claims"
    assert "<dt>Buffers</dt>" in plan


async def test_a_missing_index_of_messages_is_shown(engine: sa.Engine) -> None:
    setup = Setup.of(engine, "delete_returning", unique=None)
    setup.execute("DROP INDEX ix_sqlaqueue_message_job_claim")
    assert "ix_sqlaqueue_message_job_claim" in (await page_of(setup)).text.partition("Plan of a claim")[0]


async def test_many_viewers_claim_once(engine: sa.Engine) -> None:
    setup = Setup.of(engine, "update_status", unique=None)
    dashboard = Dashboard([setup.model], sessionmaker(engine), access=everything)
    with counting_statements(engine) as sent:
        async with client(dashboard) as browser:
            for _ in range(3):
                assert (await browser.get("/queues/job/claim")).status_code == 200
    assert len([each for each in sent if each.startswith("EXPLAIN (ANALYZE")]) == 1


async def test_a_role_that_may_not_claim_sees_why(engine: sa.Engine) -> None:
    setup = Setup.of(engine, "update_status", unique=None)
    with reading_role(engine) as limited:
        page = (await page_of(setup, limited)).text
    assert "The claim was not executed, so there are no buffers" in page
    assert "no right to read this" in page
    assert "public.job" in page


async def test_a_locked_table_ends_the_claim(engine: sa.Engine) -> None:
    setup = Setup.of(engine, "update_status", unique=None)
    with engine.connect() as connection:
        connection.exec_driver_sql("LOCK TABLE job IN ACCESS EXCLUSIVE MODE")
        page = (await page_of(setup)).text
        connection.rollback()
    assert "A table is locked by another session" in page
    assert "Who keeps dead rows" in page


async def test_who_keeps_dead_rows_is_named_without_statements(engine: sa.Engine) -> None:
    setup = Setup.of(engine, "update_status", unique=None)
    with engine.connect() as connection:
        connection.exec_driver_sql("SELECT pg_current_xact_id(), 'the secret'")
        pid = connection.exec_driver_sql("SELECT pg_backend_pid()").scalar_one()
        with Session(engine) as session:
            horizon = read_horizon(session, spec_of(setup.model))
        page = (await page_of(setup)).text
    assert [each.doing for each in horizon.holders] == ["idle in transaction"]
    assert horizon.holders[0].since is not None
    assert f"Session {pid} (role postgres" in page
    assert "the secret" not in page


def test_tables_of_messages_and_the_history_are_read(engine: sa.Engine) -> None:
    setup = Setup.of(engine, "delete_returning", unique=None, attempt_history=86400)
    with Session(engine) as session:
        names = [each.statistics.name for each in read_tables(session, spec_of(setup.model))]
    assert names == ["public.job", "public.sqlaqueue_message_job", "public.sqlaqueue_attempt"]
