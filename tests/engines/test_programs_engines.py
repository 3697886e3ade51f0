"""Queues in the programs that others write: engines with options, names of any kind, claims within statements."""

from __future__ import annotations

from datetime import UTC, date, datetime, timedelta, timezone
from typing import TYPE_CHECKING, Any

import pytest
import sqlalchemy as sa
from sqlalchemy.dialects import postgresql
from sqlalchemy.exc import StatementError
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from sqlaqueue import QueueConfig, QueueMixin, Unique, claim, complete, enqueue, retry

if TYPE_CHECKING:
    from tests.engines.conftest import Place

pytestmark = pytest.mark.once


class Base(DeclarativeBase):
    pass


class Percent(QueueMixin, Base):
    """Names that need quotes, and have what the drivers take for parameters."""

    __tablename__ = "Jobs in %s"
    __queue__ = QueueConfig(unique=Unique("customer"))

    id: Mapped[int] = mapped_column("Key %s", primary_key=True)
    customer: Mapped[str] = mapped_column("the Customer's %x", sa.String(20))


class Visit(QueueMixin, Base):
    """A key of several columns, with names of their own."""

    __tablename__ = "visit"

    day: Mapped[date] = mapped_column("visit_day", primary_key=True)
    at: Mapped[datetime] = mapped_column("visit_at", sa.DateTime(timezone=True), primary_key=True)
    place: Mapped[str] = mapped_column("visit_place", sa.String(20), primary_key=True)


class Local(QueueMixin, Base):
    __tablename__ = "local"
    __queue__ = QueueConfig(columns={"run_at": "at"})

    id: Mapped[int] = mapped_column(primary_key=True)
    at: Mapped[datetime] = mapped_column(sa.DateTime)


class Note(Base):
    __tablename__ = "note"

    id: Mapped[int] = mapped_column(primary_key=True)
    at: Mapped[datetime] = mapped_column(sa.DateTime)


def test_an_engine_with_options_is_prepared_with_the_one_it_was_made_from(place: Place) -> None:
    engine = sa.create_engine(place.url)
    with_options = engine.execution_options(yield_per=None)
    place.prepare(with_options)
    for each in (engine, with_options, engine.execution_options(stream_results=False)):
        Base.metadata.create_all(each)
        with Session(each) as session:
            session.add(Percent(customer="ada"))
            session.commit()
            (job,) = session.scalars(claim(Percent, 1)).all()
            session.execute(complete([job]))
            session.commit()
    engine.dispose()


def test_a_claim_within_a_statement(place: Place) -> None:
    engine = place.engine()
    Base.metadata.create_all(engine)
    with Session(engine) as session:
        session.add(Percent(customer="ada"))
        session.commit()
        (job,) = session.scalars(sa.select(Percent).from_statement(claim(Percent, 1))).all()
        assert job.status == "processing"
    engine.dispose()


def test_names_with_percent_signs(place: Place) -> None:
    engine = place.engine()
    Base.metadata.create_all(engine)
    with Session(engine) as session:
        found = enqueue(session, [Percent(customer=name) for name in ("ada", "bob", "ada")])
        assert [each.created for each in found] == [True, True, False]
        enqueue(session, [Percent(customer="ada")], on_twin="replace")
        session.commit()
        jobs = session.scalars(claim(Percent, 2)).all()
        session.commit()
        assert session.scalars(complete(jobs[:1])).all() == [jobs[0].id]
        session.execute(retry(jobs[1:]))
        session.commit()
        assert [job.status for job in jobs] == ["completed", "pending"]
        changed = sa.update(Percent).where(Percent.id == jobs[1].id).values(customer="eve").returning(Percent)
        assert [job.customer for job in session.scalars(changed)] == ["eve"]
        key = {"index_elements": [Percent.__table__.c["Key %s"]]}
        row = {"Key %s": jobs[1].id, "the Customer's %x": "zoe"}
        insert: Any = postgresql.insert(Percent.__table__).values(row)
        session.execute(insert.on_conflict_do_update(set_={"the Customer's %x": insert.excluded[1]}, **key))
        assert session.scalar(sa.select(Percent.customer).where(Percent.id == jobs[1].id)) == "zoe"
    engine.dispose()


def test_a_key_of_several_columns_with_names_of_their_own(place: Place) -> None:
    engine = place.engine()
    Base.metadata.create_all(engine)
    with Session(engine) as session:
        moment = datetime(2026, 1, 1, tzinfo=UTC)
        session.add_all([Visit(day=date(2026, 1, n), at=moment, place="here") for n in (1, 2)])
        session.commit()
        jobs = session.scalars(claim(Visit, 2)).all()
        session.commit()
        assert session.scalars(complete(jobs[:1])).all() == [(jobs[0].day, moment, "here")]
        session.execute(retry(jobs[1:]))
        session.commit()
        assert session.scalars(sa.select(Visit.status).order_by(Visit.day)).all() == ["completed", "pending"]
    engine.dispose()


def test_a_lock_in_a_programs_cte_is_refused(place: Place) -> None:
    """MariaDB locks no rows there. What the program has written must not pass for a statement without rows."""
    engine = place.engine()
    Base.metadata.create_all(engine)
    picked = sa.select(Percent.id).with_for_update(skip_locked=True).limit(1).cte("picked")
    wanted = sa.select(picked.c[0])
    with Session(engine) as session:
        session.add(Percent(customer="ada"))
        session.commit()
        for statement in (
            sa.update(Percent).where(Percent.id.in_(wanted)).values(customer="bob").returning(Percent.id),
            sa.select(Percent.id).where(Percent.id.in_(wanted)),
        ):
            if engine.dialect.name == "sqlite":
                assert session.scalars(statement).all() == [1]
                continue
            with pytest.raises(StatementError, match="the CTE picked changes or locks rows of a queue, which mariadb"):
                session.execute(statement)
            session.rollback()
    engine.dispose()


def test_a_moment_with_a_time_zone_in_a_queues_column_without_one(place: Place) -> None:
    """It is compared with the clock in UTC. A column of another table has what the driver makes of it."""
    engine = place.engine()
    Base.metadata.create_all(engine)
    local = datetime.now(timezone(timedelta(hours=5)))
    with Session(engine) as session:
        session.add_all(
            [Local(at=local - timedelta(seconds=1)), Local(at=local + timedelta(minutes=5)), Note(at=local)]
        )
        session.commit()
        (job,) = session.scalars(claim(Local, 2)).all()
        session.execute(retry([job], at=local + timedelta(minutes=1)))
        session.commit()
        assert session.scalar(claim(Local, 1)) is None
        wanted = sa.select(sa.func.count()).where(Local.at <= local + timedelta(minutes=2))
        assert session.scalar(wanted) == 1
        assert session.scalar(sa.select(Note.at)).hour == local.hour
    engine.dispose()
