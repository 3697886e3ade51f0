"""Arguments of verbs from which no correct statement can be made."""

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
def test_a_number_of_jobs_that_is_none(n: Any) -> None:
    with pytest.raises(StatementError, match=r"claim\(Email, .*: give the number of jobs as an integer from 1 on"):
        claim(Email, n)


NO_QUEUES = {
    "Customer is not a queue; let it inherit from sqlaqueue.QueueMixin": Customer,
    "Abstract is abstract and has no table; use one of its mapped subclasses": Abstract,
    "Unmapped is not mapped; map it": Unmapped,
    "is not a mapped class": "email",
}


@pytest.mark.parametrize("said", NO_QUEUES)
@pytest.mark.parametrize("verb", [lambda model: claim(model, 1), rescue, reconcile, purge])
def test_what_is_no_queue(verb: Any, said: str) -> None:
    with pytest.raises(NotAQueueError, match=said):
        verb(NO_QUEUES[said])


@pytest.mark.parametrize("verb", [cancel, requeue, complete, retry, fail, release, extend])
@pytest.mark.parametrize("job", [5, "email", None, Customer(id=1)])
def test_what_is_no_job(verb: Any, job: Any) -> None:
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
    r"the to-many join Order\.lines yields a job several times; use exists": sa.select(Order).join(Order.lines),
    "a full outer join yields a job several times": sa.select(Order).join(Order.customer, full=True),
    "no condition connects the tables email and orders": sa.select(Order).where(Email.id == 1),
    "no condition connects the tables customer and orders": sa.select(Order).where(Customer.vip),
}


@pytest.mark.parametrize("said", SELECTS)
def test_a_select_that_cannot_be_claimed_from(said: str) -> None:
    with pytest.raises(StatementError, match=said):
        claim(SELECTS[said], 1)


def test_filters_that_look_like_it_and_are_right(session: Session) -> None:
    """To-one joins, outer ones too, and conditions that reach a third table by way of a second."""
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
def test_moments_without_a_zone(on: str, session: Session) -> None:
    naive = datetime(2030, 1, 1)  # noqa: DTZ001 - that is the point
    model: Any = Order if on == "batch_select" else Email
    name = model.__name__
    with pytest.raises(StatementError, match=rf"{name}\.run_at = datetime.*give a datetime with tzinfo"):
        model(run_at=naive)
    job = model(run_at=datetime(2020, 1, 1, tzinfo=UTC))
    with pytest.raises(StatementError, match=rf"{name}\.run_at = datetime"):
        job.run_at = naive
    session.add(job)
    session.flush()
    [claimed] = session.scalars(claim(model, 1)).all()
    with pytest.raises(StatementError, match=rf"{name}\.run_at has a time zone; give a datetime with tzinfo"):
        retry(claimed, at=naive)
    with pytest.raises(StatementError, match="give one of the two"):
        retry(claimed, at=datetime.now(UTC), delay=1)


@pytest.mark.parametrize("lease", [-1, "5", float("inf")])
def test_leases_that_are_none(lease: Any, session: Session) -> None:
    session.add(Email())
    session.flush()
    jobs = session.scalars(claim(Email, 1)).all()
    with pytest.raises(ConfigurationError, match="lease="):
        extend(jobs, lease=lease)


@pytest.mark.parametrize("states", [(), ("pending",), ("done",), "failed"])
def test_states_that_nobody_purges(states: Any) -> None:
    with pytest.raises(StatementError, match="only finished jobs can be purged"):
        purge(Order, states=states)


@pytest.mark.parametrize("limit", [0, True, "5"])
def test_limits_that_are_none(limit: Any) -> None:
    with pytest.raises(StatementError, match=r"purge\(limit=.*: give an integer from 1 on"):
        purge(Order, limit=limit)


ENDS = {"complete": complete, "retry": retry, "fail": fail, "release": release, "extend": extend}


@pytest.mark.parametrize("verb", ENDS)
def test_a_job_that_no_claim_handed_out(verb: str, session: Session) -> None:
    job = Order()
    session.add(job)
    session.flush()
    with pytest.raises(NotClaimedError, match=rf"{verb}\(\): Order \(\d+,\) was not handed out by a claim"):
        ENDS[verb](job)


@pytest.mark.parametrize("verb", ENDS)
@pytest.mark.parametrize("end", ["commit", "rollback", "close"])
def test_a_job_whose_transaction_has_ended(verb: str, end: str, engine: sa.Engine) -> None:
    with Session(engine) as session:
        session.add(Order())
        session.commit()
        jobs = session.scalars(claim(Order, 1)).all()
        getattr(session, end)()
        with pytest.raises(NotClaimedError, match=rf"{verb}\(\): the transaction that held Order .* claim it anew"):
            ENDS[verb](jobs)


@pytest.mark.parametrize("verb", [cancel, requeue])
def test_a_job_that_is_not_stored_yet(verb: Any) -> None:
    with pytest.raises(StatementError, match="this Order is not in the database yet; add it to a session and flush"):
        verb(Order())
