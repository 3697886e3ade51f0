"""A worker of a queue with an attempt history needs the privileges of docs/privileges.md, and no others."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, sessionmaker

from sqlaqueue import Consumer, QueueConfig, QueueMixin, admin, claim
from sqlaqueue.consumer.maintenance.cleanup import delete_batch
from sqlaqueue.consumer.maintenance.state import Walk
from sqlaqueue.exc import DatabaseNotReadyError
from tests.contexts import settings_of
from tests.privileges.conftest import Roles, of_page
from tests.servers import Server

pytestmark = pytest.mark.once


class Base(DeclarativeBase):
    pass


class Ticket(QueueMixin, Base):
    __tablename__ = "ticket"
    __queue__ = QueueConfig(attempt_history=timedelta(days=14))
    id: Mapped[int] = mapped_column(primary_key=True)


@pytest.fixture
def roles(server: Server) -> Iterator[Roles]:
    with server.database() as database:
        roles = Roles(database, "update_status")
        try:
            Base.metadata.create_all(roles.engine("owner"))
            others = [grant.replace(" email ", " ticket ") for grant in of_page("### `update_status`")]
            roles.execute(*others, *of_page("## Attempt history"))
            yield roles
        finally:
            roles.close()


def test_a_worker_needs_what_the_page_says(roles: Roles) -> None:
    roles.execute("INSERT INTO ticket DEFAULT VALUES", "INSERT INTO ticket DEFAULT VALUES")
    engine = roles.engine("worker")
    assert Consumer(Ticket, lambda session, job: None, sessionmaker(engine)).drain() == 2
    roles.execute("UPDATE sqlaqueue_attempt SET ended_at = now() - interval '15 days' WHERE key = '[1]'")
    with Session(engine) as session:
        assert len(delete_batch(session, settings_of(Ticket), Walk("attempt", timedelta(days=14)))[0]) == 1
        assert [one.outcome for one in admin.attempts(session, Ticket, 2)] == ["completed"]


def test_a_worker_may_rescue(roles: Roles) -> None:
    roles.execute("INSERT INTO ticket DEFAULT VALUES")
    with Session(roles.engine("worker")) as session:
        assert len(session.scalars(claim(Ticket, 1)).all()) == 1
        session.commit()
        roles.execute("UPDATE ticket SET lease_expires_at = now() - interval '1 second'")
        assert admin.rescue(session, Ticket) == 1


@pytest.mark.parametrize("right", ["SELECT", "INSERT", "UPDATE", "DELETE"])
def test_a_missing_privilege_is_named(roles: Roles, right: str) -> None:
    columns = " (ended_at)" if right == "UPDATE" else ""
    roles.execute(f"REVOKE {right}{columns} ON sqlaqueue_attempt FROM worker")
    consumer = Consumer(Ticket, lambda session, job: None, sessionmaker(roles.engine("worker")))
    with pytest.raises(DatabaseNotReadyError, match=rf"GRANT {right}( \(ended_at\))? ON TABLE sqlaqueue_attempt"):
        consumer.drain()


def test_a_role_that_enqueues_needs_nothing(roles: Roles) -> None:
    roles.execute(
        "GRANT INSERT ON ticket TO web", "GRANT SELECT (id, status, priority, run_at, attempts) ON ticket TO web"
    )
    roles.execute("GRANT SELECT (created_at) ON ticket TO web", "GRANT USAGE ON SEQUENCE ticket_id_seq TO web")
    with Session(roles.engine("web")) as session:
        session.add(Ticket())
        session.commit()
        with pytest.raises(sa.exc.ProgrammingError, match="permission denied for table sqlaqueue_attempt"):
            session.execute(sa.text("SELECT 1 FROM sqlaqueue_attempt"))
