"""What the verbs in steps do with many jobs, with duplicates, and with the criteria of a program."""

from datetime import timedelta
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.orm import Session, mapped_column, with_loader_criteria

from sqlaqueue import Unique, cancel, claim, requeue, rescue
from sqlaqueue.postgresql.side_tables import CONTROL
from sqlaqueue.queue.spec import clock
from tests.engines.conftest import Sessions
from tests.models import make_job

pytestmark = pytest.mark.once


def site() -> Any:
    return mapped_column(sa.String(20), primary_key=True, default="a")


def key() -> Any:
    return mapped_column(sa.String(20))


Job = make_job(attributes={"tenant": mapped_column(sa.Integer, default=0)})
Pair = make_job(attributes={"site": site()}, attempt_history=timedelta(days=1))
Single = make_job(attributes={"site": site(), "key": key()}, unique=Unique("key"))
Mail = make_job(attributes={"key": key()}, unique=Unique("key"))
MANY = 16_500
"""Keys of two columns that have more values than SQLite takes as parameters of a statement, which is 32,766."""


def test_a_cancellation_is_requested_for_the_jobs_of_the_programs_criteria(sessions: Sessions) -> None:
    maker = sessions(Job)
    with maker() as session:
        session.add_all([Job(tenant=1), Job(tenant=2)])
        session.commit()
        assert len(session.scalars(claim(Job, 2)).all()) == 2
        session.commit()

    class OfTenant(Session):
        pass

    @event.listens_for(OfTenant, "do_orm_execute")
    def limit(state: Any) -> None:
        state.statement = state.statement.options(with_loader_criteria(Job, Job.tenant == 1))

    with OfTenant(maker.kw["bind"]) as session:
        assert session.scalars(cancel(Job)).all() == []
        session.commit()
    with maker() as session:
        control = Job.metadata.tables[CONTROL]
        assert session.scalar(sa.select(sa.func.count()).select_from(control)) == 1


@pytest.mark.few(1)
@pytest.mark.parametrize("model", [Pair, Single], ids=["history", "unique"])
def test_many_jobs_with_a_key_of_two_columns_are_changed(sessions: Sessions, model: Any) -> None:
    with sessions(model)() as session:
        if session.get_bind().dialect.name == "sqlite":
            # As SQLite is built by default; some systems allow more.
            driver: Any = session.connection().connection.driver_connection
            driver.setlimit(9, 32_766)
        names = ["key"] if model is Single else []
        rows = [{"id": number, "site": "a", **dict.fromkeys(names, str(number))} for number in range(MANY)]
        session.connection().execute(sa.insert(model.__table__), rows)
        assert len(session.execute(cancel(model)).all()) == MANY
        assert len(session.execute(requeue(model)).all()) == MANY
        expired = {"status": "processing", "lease_expires_at": clock() - timedelta(hours=1), "attempts": 1}
        session.connection().execute(sa.update(model.__table__).values(expired))
        assert len(session.execute(rescue(model)).all()) == MANY


def test_jobs_with_duplicates_are_cancelled_by_few_statements(sessions: Sessions) -> None:
    with sessions(Mail)() as session:
        for status in ("failed", "pending"):
            session.add_all(Mail(key=str(number), status=status) for number in range(250))
            session.flush()
        sent: list[str] = []
        event.listen(session.connection(), "before_cursor_execute", lambda *given: sent.append(given[2]))
        failed = sa.select(Mail).where(Mail.status == "failed")
        assert [came_back for _, came_back in session.execute(requeue(failed))] == [False] * 250
        assert len(sent) < 20
        told = {job.key: job.last_error for job in session.scalars(sa.select(Mail).where(Mail.status == "cancelled"))}
        pending = session.scalars(sa.select(Mail).where(Mail.status == "pending"))
        assert told == {job.key: f"duplicate of job {job.id}" for job in pending}
