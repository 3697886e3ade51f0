"""Verbs refuse arguments for which no correct statement exists."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, aliased, mapped_column, relationship

from sqlaqueue import (
    QueueConfig,
    QueueMixin,
    cancel,
    claim,
    complete,
    extend,
    fail,
    purge,
    reconcile,
    release,
    requeue,
    rescue,
    retry,
)
from sqlaqueue.exc import ConfigurationError, NotAQueueError, NotClaimedError, StatementError
from tests.servers import Server


class Base(DeclarativeBase):
    pass


class Customer(Base):
    __tablename__ = "customer"
    id: Mapped[int] = mapped_column(primary_key=True)
    vip: Mapped[bool] = mapped_column(default=False)


class Order(QueueMixin, Base):
    __tablename__ = "orders"
    __queue__ = QueueConfig(strategy="batch_select")
    id: Mapped[int] = mapped_column(primary_key=True)
    customer_id: Mapped[int | None] = mapped_column(sa.ForeignKey(Customer.id))
    customer: Mapped[Customer | None] = relationship()
    lines: Mapped[list[Line]] = relationship()


class Line(Base):
    __tablename__ = "line"
    id: Mapped[int] = mapped_column(primary_key=True)
    order_id: Mapped[int] = mapped_column(sa.ForeignKey(Order.id))


class Email(QueueMixin, Base):
    __tablename__ = "email"
    id: Mapped[int] = mapped_column(primary_key=True)


class Abstract(QueueMixin, Base):
    __abstract__ = True


class Unmapped(QueueMixin):
    pass


@pytest.fixture(scope="module")
def engine(server: Server) -> Iterator[sa.Engine]:
    with server.database() as database:
        engine = sa.create_engine(database.url())
        Base.metadata.create_all(engine)
        yield engine
        engine.dispose()


@pytest.fixture
def session(engine: sa.Engine) -> Iterator[Session]:
    with Session(engine) as session:
        yield session


@pytest.mark.parametrize("n", [0, -1, True, 2.0, "2", None, sa.literal(2)])
def test_claiming_an_invalid_number_of_jobs_is_refused(n: Any) -> None:
    with pytest.raises(StatementError, match=r"claim\(Email, .*: the number of jobs must be an integer of 1 or more"):
        claim(Email, n)


NOT_QUEUES = {
    "Customer is not a queue; let it inherit from sqlaqueue.QueueMixin": Customer,
    "Abstract is abstract and has no table; use one of its mapped subclasses": Abstract,
    "Unmapped is not mapped; map it": Unmapped,
    "is not a mapped class": "email",
}


@pytest.mark.parametrize("said", NOT_QUEUES)
@pytest.mark.parametrize("verb", [lambda model: claim(model, 1), rescue, reconcile, purge])
def test_a_class_that_is_not_a_queue_is_refused(verb: Any, said: str) -> None:
    with pytest.raises(NotAQueueError, match=said):
        verb(NOT_QUEUES[said])


@pytest.mark.parametrize("verb", [cancel, requeue, complete, retry, fail, release, extend])
@pytest.mark.parametrize("job", [5, "email", None, Customer(id=1)])
def test_an_argument_that_is_not_a_job_is_refused(verb: Any, job: Any) -> None:
    with pytest.raises(NotAQueueError, match=rf"{verb.__name__}\(\) takes"):
        verb(job)


SELECTS = {
    "select exactly one queue class": sa.select(Order, Email),
    "select exactly one queue class, ": sa.select(Order.id),
    "DISTINCT cannot be combined": sa.select(Order).distinct(),
    "GROUP BY cannot be combined": sa.select(Order).group_by(Order.id),
    "HAVING cannot be combined": sa.select(Order).having(sa.func.count() > 1),
    "LIMIT cannot be combined": sa.select(Order).limit(5),
    "OFFSET cannot be combined": sa.select(Order).offset(5),
    "ORDER BY cannot be combined": sa.select(Order).order_by(Order.id),
    "FOR UPDATE cannot be combined": sa.select(Order).with_for_update(),
    r"the to-many join Order\.lines returns a job more than once; use exists": sa.select(Order).join(Order.lines),
    "a full outer join returns a job more than once": sa.select(Order).join(Order.customer, full=True),
    "no condition connects the tables email and orders": sa.select(Order).where(Email.id == 1),
    "no condition connects the tables customer and orders": sa.select(Order).where(Customer.vip),
}


@pytest.mark.parametrize("said", SELECTS)
def test_a_select_whose_rows_cannot_be_locked_is_refused(said: str) -> None:
    with pytest.raises(StatementError, match=said):
        claim(SELECTS[said], 1)


def test_joins_that_yield_each_job_once_are_accepted(session: Session) -> None:
    """To-one joins, outer joins, and conditions that connect a third table through a second."""
    session.add(Order(customer=Customer(vip=True), lines=[Line(), Line()]))
    session.flush()
    line, customer = aliased(Line), aliased(Customer)
    for jobs in (
        sa.select(Order).outerjoin(Order.customer).where(Customer.vip),
        sa.select(Order).where(Order.customer_id == customer.id, customer.vip),
        sa.select(Order).where(sa.exists().where(line.order_id == Order.id)),
        sa.select(Order).where(Order.lines.any(), Order.customer.has(vip=True)),
        sa.select(Order).where(Order.customer_id == customer.id, line.order_id == Order.id),
    ):
        with session.begin_nested() as savepoint:
            assert len(session.scalars(claim(jobs, 5)).all()) == 1
            savepoint.rollback()


@pytest.mark.parametrize("on", ["batch_select", "update_status"])
def test_a_datetime_without_time_zone_is_refused(on: str, session: Session) -> None:
    naive = datetime(2030, 1, 1)  # noqa: DTZ001 - what the test is about
    model: Any = Order if on == "batch_select" else Email
    name = model.__name__
    with pytest.raises(StatementError, match=rf"{name}\.run_at = datetime.*use a datetime with tzinfo"):
        model(run_at=naive)
    job = model(run_at=datetime(2020, 1, 1, tzinfo=UTC))
    with pytest.raises(StatementError, match=rf"{name}\.run_at = datetime"):
        job.run_at = naive
    session.add(job)
    session.flush()
    [claimed] = session.scalars(claim(model, 1)).all()
    with pytest.raises(StatementError, match=rf"{name}\.run_at has a time zone; use a datetime with tzinfo"):
        retry(claimed, at=naive)
    with pytest.raises(StatementError, match="give one of the two"):
        retry(claimed, at=datetime.now(UTC), delay=1)


@pytest.mark.parametrize("lease", [-1, "5", float("inf")])
def test_an_invalid_lease_is_refused(lease: Any, session: Session) -> None:
    session.add(Email())
    session.flush()
    jobs = session.scalars(claim(Email, 1)).all()
    with pytest.raises(ConfigurationError, match="lease="):
        extend(jobs, lease=lease)


@pytest.mark.parametrize("states", [(), ("pending",), ("done",), "failed"])
def test_purging_unfinished_states_is_refused(states: Any) -> None:
    with pytest.raises(StatementError, match="only finished jobs can be purged"):
        purge(Order, states=states)


@pytest.mark.parametrize("limit", [0, True, "5"])
def test_an_invalid_purge_limit_is_refused(limit: Any) -> None:
    with pytest.raises(StatementError, match=r"purge\(limit=.*: the limit must be an integer of 1 or more"):
        purge(Order, limit=limit)


SETTLING = {"complete": complete, "retry": retry, "fail": fail, "release": release, "extend": extend}


@pytest.mark.parametrize("verb", SETTLING)
def test_settling_a_job_that_was_not_claimed_is_refused(verb: str, session: Session) -> None:
    job = Order()
    session.add(job)
    session.flush()
    with pytest.raises(NotClaimedError, match=rf"{verb}\(\): Order \d+ was not claimed"):
        SETTLING[verb](job)


@pytest.mark.parametrize("verb", SETTLING)
@pytest.mark.parametrize("end", ["commit", "rollback", "close"])
def test_settling_after_the_transaction_ended_is_refused(verb: str, end: str, engine: sa.Engine) -> None:
    with Session(engine) as session:
        session.add(Order())
        session.commit()
        jobs = session.scalars(claim(Order, 1)).all()
        getattr(session, end)()
        with pytest.raises(
            NotClaimedError, match=rf"{verb}\(\): the transaction that held Order .* claim the job again"
        ):
            SETTLING[verb](jobs)


@pytest.mark.parametrize("verb", [cancel, requeue])
def test_a_job_without_a_row_is_refused(verb: Any) -> None:
    with pytest.raises(StatementError, match="this Order is not in the database yet; add it to a session and flush"):
        verb(Order())
