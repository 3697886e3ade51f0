"""Row-level security on the job table: tenants see their jobs, and a Consumer without a policy does not start."""

from __future__ import annotations

import re
import time

import pytest
import sqlalchemy as sa
from sqlalchemy.exc import ProgrammingError
from sqlalchemy.orm import Session, sessionmaker

from sqlaqueue import Consumer, admin, reconcile
from sqlaqueue.exc import ConfigurationError
from tests.privileges.conftest import Letter, Note, Roles
from tests.privileges.test_roles import count

pytestmark = pytest.mark.once


@pytest.fixture
def secured(roles: Roles) -> Roles:
    """Enable row-level security, with a policy by which the enqueueing role sees its tenant's jobs."""
    roles.grant_web()
    roles.execute(*roles.grants_of_worker())
    name = roles.table.name
    roles.execute(
        f"ALTER TABLE {name} ENABLE ROW LEVEL SECURITY",
        f"GRANT SELECT ON {name} TO web",
        f"CREATE POLICY own ON {name} TO web USING (tenant = current_setting('app.tenant'))",
    )
    return roles


def enqueue(roles: Roles, tenant: str, *, as_tenant: str | None = None) -> list[str]:
    """Enqueue a job as a tenant, and return the tenants of all jobs that it sees."""
    with Session(roles.engine("web")) as session:
        session.execute(sa.select(sa.func.set_config("app.tenant", as_tenant or tenant, sa.true())))
        job = roles.Job(tenant=tenant)
        session.add(job)
        session.flush()
        if roles.Job is Letter:
            session.add(Note(about=job.id))
        seen = list(session.scalars(sa.select(roles.Job.tenant)))
        session.commit()
        return seen


def serve(roles: Roles) -> list[str]:
    """Let a Consumer drain the queue, and return the tenants of its jobs."""
    served: list[str] = []
    engine = roles.engine("worker")
    Consumer(roles.Job, lambda session, job: served.append(job.tenant), sessionmaker(engine)).drain()
    return sorted(served)


def test_tenants_see_their_own_jobs_and_a_consumer_all(secured: Roles) -> None:
    secured.execute(f"CREATE POLICY all_jobs ON {secured.table.name} TO worker USING (true)")
    assert enqueue(secured, "a") == ["a"]
    assert enqueue(secured, "b") == ["b"]
    with pytest.raises(ProgrammingError, match="violates row-level security"):
        enqueue(secured, "a", as_tenant="b")
    assert serve(secured) == ["a", "b"]


def test_a_consumer_that_bypasses_policies(secured: Roles) -> None:
    secured.execute("ALTER ROLE worker BYPASSRLS")
    enqueue(secured, "a")
    enqueue(secured, "b")
    assert serve(secured) == ["a", "b"]


def test_a_consumer_without_a_policy_does_not_start(secured: Roles) -> None:
    enqueue(secured, "a")
    with pytest.raises(ConfigurationError, match="row-level security hides every row") as refused:
        serve(secured)
    assert count(secured, secured.table.name) == 1
    # The statement in the error is the fix.
    secured.execute(*re.findall(r"CREATE POLICY .*? \(true\)", str(refused.value)))
    assert serve(secured) == ["a"]


def test_a_policy_that_hides_every_row_is_told(secured: Roles, caplog: pytest.LogCaptureFixture) -> None:
    """Such as one whose setting the worker does not make; a queue without jobs is empty for every role."""

    def told() -> list[str]:
        caplog.clear()
        assert serve(secured) == []
        with Session(secured.engine("worker")) as session:
            found = [each.summary for each in admin.doctor(session, secured.Job) if each.code == "hidden_rows"]
        logged = [record.getMessage() for record in caplog.records if record.event == "rows_hidden"]
        assert len(found) == len(logged)
        return logged

    table = secured.table.name
    secured.execute(f"CREATE POLICY tenant ON {table} TO worker USING (tenant = current_setting('app.tenant', true))")
    assert told() == []
    enqueue(secured, "a")
    # A backend that ends writes its statistics at once; an idle one waits for ten seconds.
    secured.database.kill_backends()
    with secured.database.connect() as connection:
        deadline = time.monotonic() + 60
        while connection.execute(f"SELECT pg_stat_get_live_tuples('{table}'::regclass)".encode()).fetchone() == (0,):
            assert time.monotonic() < deadline
            connection.execute("SELECT pg_stat_clear_snapshot()")
            time.sleep(0.05)
    [warning] = told()
    assert f"no row of {table}, which has 1 or so" in warning
    secured.execute(f"CREATE POLICY all_jobs ON {table} TO worker USING (true)")
    assert serve(secured) == ["a"]
    assert told() == []


def test_a_policy_for_select_alone_is_not_enough(secured: Roles) -> None:
    """Without a policy for UPDATE no row can be locked, so claims return nothing."""
    secured.execute(f"CREATE POLICY reads ON {secured.table.name} FOR SELECT TO worker USING (true)")
    with pytest.raises(ConfigurationError, match="FOR UPDATE TO worker_") as refused:
        serve(secured)
    assert "FOR SELECT" not in str(refused.value)


@pytest.mark.parametrize("kind", ["delete_returning", "existing_messages"])
def test_a_hidden_job_keeps_its_message(secured: Roles) -> None:
    """A Consumer of one tenant does not see the jobs of others, whose messages look orphaned."""
    secured.execute(f"CREATE POLICY one ON {secured.table.name} TO worker USING (tenant = 'a')")
    enqueue(secured, "a")
    enqueue(secured, "b")
    messages = "note" if secured.kind == "existing_messages" else "sqlaqueue_message_orders"
    assert serve(secured) == ["a"]
    with Session(secured.engine("worker")) as session:
        assert session.scalars(reconcile(secured.Job)).all() == []
        session.commit()
    assert count(secured, messages) == 1
    # A role that sees all rows deletes orphaned messages.
    with secured.database.connect() as connection:
        connection.execute("SET session_replication_role = replica")
        connection.execute(f"DELETE FROM {secured.table.name} WHERE tenant = 'b'".encode())
    secured.execute("ALTER ROLE worker BYPASSRLS")
    with Session(secured.engine("worker")) as session:
        assert session.scalars(reconcile(secured.Job)).all() == [2]
        session.commit()
    assert count(secured, messages) == 0
