"""travel() lets time pass for what is stored."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, sessionmaker

from sqlaqueue import QueueConfig, QueueMixin, claim, pause, purge, rescue
from sqlaqueue.exc import ConfigurationError
from sqlaqueue.queue.names import CONSUMERS, CONTROL, CRASH_JOURNAL
from sqlaqueue.testing import crash, drain, travel
from tests.testing.app import App, send
from tests.testing.models import Base, HeldEmail, LeasedEmail, MessageEmail, OwnMessage


class Elsewhere(DeclarativeBase):
    """Models whose tables are not in the database."""


class Unmade(QueueMixin, Elsewhere):
    __tablename__ = "unmade"
    id: Mapped[int] = mapped_column(primary_key=True)


class Likeness(QueueMixin, Elsewhere):
    """Mapped to a table of the database, as by the models of another test."""

    __tablename__ = "leased_email"
    id: Mapped[int] = mapped_column(primary_key=True)


class Stranger(QueueMixin, Elsewhere):
    """Mapped to a table of the same name with other columns."""

    __tablename__ = "held_email"
    __queue__ = QueueConfig(columns={"run_at": "due"})
    id: Mapped[int] = mapped_column(primary_key=True)


def test_a_table_of_several_classes_travels_once(engine: sa.Engine) -> None:
    now = datetime.now(UTC)
    with Session(engine) as session:
        session.add_all([one := LeasedEmail(to="a@b", run_at=now), two := HeldEmail(to="a@b", run_at=now)])
        travel(session, 60)
        assert (now - one.run_at, now - two.run_at) == (timedelta(minutes=1), timedelta(minutes=1))


@pytest.mark.each_value
def test_a_job_becomes_due(app: App) -> None:
    email = app.add(run_at=datetime.now(UTC) + timedelta(hours=1))
    assert app.drain() == 0
    before = email.run_at
    app.travel(timedelta(minutes=59))
    assert before - email.run_at == timedelta(minutes=59)
    assert app.drain() == 0
    app.travel(60)
    assert app.drain() == 1


def test_pending_changes_are_kept(leased: App) -> None:
    email = leased.add()
    email.to = "bob@example.com"
    leased.travel(60)
    assert email.to == "bob@example.com"


def test_all_queues_travel(engine: sa.Engine) -> None:
    later = datetime.now(UTC) + timedelta(hours=1)
    with Session(engine) as session:
        session.add_all([model(to="a@b", run_at=later) for model in (LeasedEmail, HeldEmail, MessageEmail, OwnMessage)])
        travel(session, timedelta(hours=1))
        assert sum(drain(session, model, send) for model in (LeasedEmail, HeldEmail, MessageEmail, OwnMessage)) == 4


def test_a_lease_expires(engine: sa.Engine) -> None:
    with Session(engine) as session:
        session.add(LeasedEmail(to="a@b"))
        assert len(session.scalars(claim(LeasedEmail, 1)).all()) == 1
        travel(session, timedelta(minutes=4))
        assert session.scalars(rescue(LeasedEmail)).all() == []
        travel(session, timedelta(minutes=1))
        assert len(session.scalars(rescue(LeasedEmail)).all()) == 1


@pytest.mark.each_value
def test_finished_jobs_grow_old(app: App) -> None:
    def fail(session: Session, email: object) -> None:
        raise ValueError

    app.add()
    assert app.drain(fail, scheduled=True) == 2
    day = timedelta(days=1)
    purged = purge(app.model, states=["failed"], older_than=day)
    assert app.scalars(purged) == []
    app.travel(day)
    assert len(app.scalars(purged)) == 1


def test_the_librarys_own_tables_travel(engine: sa.Engine) -> None:
    now = sa.func.now()
    control, consumer, journal = (Base.metadata.tables[name] for name in (CONTROL, CONSUMERS, CRASH_JOURNAL))
    with Session(engine) as session:
        session.execute(pause(LeasedEmail))
        session.add(email := HeldEmail(to="a@b"))
        crash(session, email)
        session.execute(
            sa.insert(consumer).values(
                id="1",
                queue="q",
                host="h",
                pid=1,
                version="1",
                listening=False,
                running=[],
                heartbeat_at=now,
                expires_at=now,
            )
        )
        travel(session, timedelta(hours=2))
        for column in (control.c.created_at, journal.c.created_at, consumer.c.heartbeat_at, consumer.c.expires_at):
            (moment,) = session.scalars(sa.select(column)).all()
            assert timedelta(hours=2) <= datetime.now(UTC) - moment < timedelta(hours=3)


def test_instances_of_other_transactions_are_not_read(engine: sa.Engine) -> None:
    sessions = sessionmaker(engine)
    with sessions() as session, sessions() as other:
        mine = LeasedEmail(to="a@b")
        session.add(mine)
        travel(session, 60)
        assert other.scalars(sa.select(LeasedEmail)).all() == []


def test_a_unique_constraint_with_a_time(engine: sa.Engine) -> None:
    now = datetime.now(UTC)
    with Session(engine) as session:
        session.execute(sa.text('CREATE UNIQUE INDEX one_per_hour ON leased_email ("to", run_at)'))
        for hours in range(3):
            session.add(LeasedEmail(to="a@b", run_at=now - timedelta(hours=hours)))
            session.flush()
        travel(session, timedelta(hours=1))
        moved = session.scalars(sa.select(LeasedEmail.run_at).order_by(LeasedEmail.run_at.desc())).all()
        assert moved == [now - timedelta(hours=hours) for hours in (1, 2, 3)]


def test_a_week_has_as_many_hours_when_the_clocks_change(engine: sa.Engine) -> None:
    run_at = datetime(2027, 3, 30, tzinfo=UTC)
    with Session(engine) as session:
        session.execute(sa.text("SET LOCAL timezone = 'Europe/Berlin'"))
        session.add(email := LeasedEmail(to="a@b", run_at=run_at))
        travel(session, timedelta(days=7))
        assert run_at - email.run_at == timedelta(hours=168)


def test_an_instance_that_a_statement_has_deleted(engine: sa.Engine) -> None:
    with Session(engine) as session:
        session.add(email := LeasedEmail(to="a@b"))
        session.flush()
        session.execute(sa.delete(LeasedEmail).execution_options(synchronize_session=False))
        travel(session, 5)
        assert email.to == "a@b"
        assert email not in session


def test_more_than_a_hundred_years(engine: sa.Engine) -> None:
    with Session(engine) as session, pytest.raises(ConfigurationError, match="moves at most a hundred years at a time"):
        travel(session, timedelta(days=36526))


@pytest.mark.parametrize("delta", [-1, timedelta(seconds=-1), "1 hour"])
def test_time_cannot_go_back(engine: sa.Engine, delta: object) -> None:
    with Session(engine) as session, pytest.raises(ConfigurationError, match=r"travel\(delta\) must be seconds"):
        travel(session, delta)  # type: ignore[arg-type]  # that is the mistake
