"""``admin.explain_job()`` of jobs that other transactions hold, whose message is missing, or whose worker died."""

from __future__ import annotations

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session

from sqlaqueue import admin, rescue
from tests.admin.models import HELD, Setup, claimed


def test_a_locked_job(setup: Setup) -> None:
    """Whatever transaction has locked it; the explanation itself keeps no lock."""
    setup.add(setup.model(id=1))
    setup.add_consumer("web:1", claimed=2)
    with Session(setup.engine) as session, setup.engine.connect() as other:
        admin.explain_job(session, setup.model, 1)
        other.exec_driver_sql("SELECT FROM job WHERE id = 1 FOR UPDATE NOWAIT")
        [reason] = admin.explain_job(session, setup.model, 1).reasons
        assert reason.code == "locked"
        assert "(web:1 had claimed jobs that were not running" in reason.text
        other.rollback()
        assert admin.explain_job(session, setup.model, 1).reasons[0].code == "ready"


@pytest.mark.parametrize("kind", ["delete_returning", "existing_messages"])
def test_a_locked_message(engine: sa.Engine, kind: str) -> None:
    setup = Setup.of(engine, kind)
    setup.add(setup.model(id=1))
    setup.add_consumer()
    table = "message" if kind == "existing_messages" else "sqlaqueue_message_job"
    with Session(engine) as session, engine.connect() as other:
        other.exec_driver_sql(f"SELECT FROM {table} FOR UPDATE")
        assert [reason.code for reason in admin.explain_job(session, setup.model, 1).reasons] == ["locked"]
        other.rollback()
        admin.explain_job(session, setup.model, 1)
        other.exec_driver_sql(f"SELECT FROM {table} FOR UPDATE NOWAIT")


@pytest.mark.parametrize("kind", HELD)
def test_a_job_that_runs_in_a_transaction(engine: sa.Engine, kind: str) -> None:
    setup = Setup.of(engine, kind)
    setup.add(setup.model(id=1))
    with Session(engine) as worker:
        [job] = claimed(worker, setup.model)
        assert setup.codes() == ["locked"]
        assert "or that of a worker which has claimed it" in setup.text("locked")
        setup.add_consumer("web:7", running=[["1"]])
        assert setup.codes() == ["running"]
        assert "The Consumer web:7 runs it" in setup.text("running")
        if kind != "rows_are_messages":
            here = admin.explain_job(worker, job)
            assert [reason.code for reason in here.reasons] == ["running"]
            assert "The transaction of this session has claimed it" in here.reasons[0].text


def test_a_role_that_may_not_lock(engine: sa.Engine) -> None:
    setup = Setup.of(engine, "batch_select")
    setup.add(setup.model(id=1))
    setup.add_consumer()
    with Session(engine) as session, engine.connect() as other:
        other.exec_driver_sql("SELECT FROM job FOR UPDATE")
        session.connection().exec_driver_sql("SET TRANSACTION READ ONLY")
        [reason] = admin.explain_job(session, setup.model, 1).reasons
        assert reason.code == "ready"
        assert "locked it is not known" in reason.text
        # The transaction is still usable.
        assert session.scalar(sa.select(1)) == 1
    with Session(engine.execution_options(isolation_level="AUTOCOMMIT")) as session:
        [reason] = admin.explain_job(session, setup.model, 1).reasons
        assert "locked it is not known" in reason.text


@pytest.mark.parametrize("kind", ["delete_returning", "existing_messages"])
def test_a_job_without_a_message(engine: sa.Engine, kind: str) -> None:
    setup = Setup.of(engine, kind)
    setup.add(setup.model(id=1))
    setup.add_consumer()
    setup.execute(f"DELETE FROM {'message' if kind == 'existing_messages' else 'sqlaqueue_message_job'}")
    assert setup.codes() == ["no_message"]
    text = setup.text("no_message")
    assert ("reconcile(), which" if kind == "delete_returning" else "the application inserts") in text
    if kind == "delete_returning":
        with Session(engine) as session:
            assert admin.reconcile(session, setup.model) == 1
        assert setup.codes() == ["ready"]


def test_a_quarantined_job_with_a_lease(engine: sa.Engine) -> None:
    setup = Setup.of(engine, "update_status")
    setup.add(setup.model(id=1))
    setup.add_consumer()
    with Session(engine) as session:
        claimed(session, setup.model)
        session.commit()
        setup.execute("UPDATE job SET lease_expires_at = now()")
        session.execute(rescue(setup.model)).all()
        session.commit()
    assert setup.codes() == ["quarantined"]


@pytest.mark.parametrize("kind", HELD)
def test_a_quarantined_job_in_the_crash_journal(engine: sa.Engine, kind: str) -> None:
    setup = Setup.of(engine, kind)
    setup.add(setup.model(id=1))
    setup.add_consumer()
    journal = "INSERT INTO sqlaqueue_crash_journal (id, queue, keys, starts) VALUES (gen_random_uuid(), 'job', "
    setup.execute(journal + """'["2"]', 1)""")
    assert setup.codes() == ["ready"]
    setup.execute(journal + """'["1"]', 1)""")
    assert setup.codes() == ["quarantined"]
    # A running batch has written its keys as well.
    with Session(engine) as worker:
        claimed(worker, setup.model)
        assert setup.codes() == ["locked"]
