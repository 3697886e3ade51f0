"""Type checks: queues and their attributes, claims, verbs, enqueue(), and what operators call."""

import enum
import uuid
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, assert_type

from sqlalchemy import ColumnElement, Select, select
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker
from sqlalchemy.orm import (
    DeclarativeBase,
    InstrumentedAttribute,
    Mapped,
    MappedAsDataclass,
    Session,
    mapped_column,
    relationship,
    selectinload,
    sessionmaker,
)
from sqlmodel import Field, SQLModel

from sqlaqueue import (
    AsyncConsumer,
    ConcurrencyLimit,
    Consumer,
    Enqueued,
    FairShare,
    FunctionMixin,
    InOrder,
    QueueConfig,
    QueueMixin,
    RateLimit,
    States,
    Unique,
    async_enqueue,
    cancel,
    claim,
    complete,
    enqueue,
    extend,
    fail,
    purge,
    queue_column,
    reconcile,
    release,
    requeue,
    rescue,
    retry,
)
from sqlaqueue.admin import (
    AsyncQueueAdmin,
    AsyncScheduleAdmin,
    Cancelled,
    JobFilter,
    JobInfo,
    QueueAdmin,
    Requeued,
    ScheduleAdmin,
    ScheduleInfo,
    Stats,
)
from sqlaqueue.strategies.update_status import UpdateStatus


class Base(DeclarativeBase):
    pass


class User(Base):
    __tablename__ = "user"

    id: Mapped[int] = mapped_column(primary_key=True)


class Email(QueueMixin, Base):
    __tablename__ = "email"
    __queue__ = QueueConfig(strategy="update_status", max_attempts=5, states=States(completed="sent"))

    id: Mapped[int] = mapped_column(primary_key=True)
    to: Mapped[str]
    user: Mapped[User] = relationship()


def claims_are_of_the_model(session: Session) -> None:
    assert_type(session.execute(claim(Email, 10)).scalars().all(), Sequence[Email])
    assert_type(session.scalars(claim(Email, 10)).all(), Sequence[Email])
    assert_type(session.scalars(claim(Email, 1)).one_or_none(), Email | None)


def a_select_keeps_its_type(session: Session) -> None:
    some = select(Email).join(Email.user).where(User.id == 1, Email.to != "")
    assert_type(session.execute(claim(some, 10)).scalars().all(), Sequence[Email])
    assert_type(session.scalars(claim(some, 10).options(selectinload(Email.user))).all(), Sequence[Email])


async def claims_are_the_same_when_async(session: AsyncSession) -> None:
    assert_type((await session.execute(claim(Email, 10))).scalars().all(), Sequence[Email])
    assert_type((await session.scalars(claim(select(Email), 10))).all(), Sequence[Email])


def a_claim_takes_no_further_conditions() -> None:
    claim(Email, 10).where(Email.id == 1)  # type: ignore[attr-defined] # what the test is about


def verbs_take_one_or_many(session: Session) -> None:
    emails = session.scalars(claim(Email, 10)).all()
    session.execute(complete(emails))
    session.execute(complete(emails[0]))
    session.execute(retry(emails, delay=timedelta(minutes=1), error=ValueError("no")))
    session.execute(retry(emails[0], at=datetime.now(UTC), error="no"))
    session.execute(fail(emails, error="no"))
    session.execute(release(emails, delay=5))
    session.execute(extend(emails, lease=60.0))
    session.scalars(cancel(select(Email).where(Email.to == ""))).all()
    session.scalars(requeue(Email)).all()
    session.scalars(rescue(Email)).all()
    session.scalars(reconcile(Email)).all()
    session.scalars(purge(Email, older_than=timedelta(days=7), states=["completed"], limit=500)).all()


# -- type checks: enqueue() and async_enqueue() --------------------------------------------------------------------


class Reminder(QueueMixin, Base):
    __tablename__ = "reminder"
    __queue__ = QueueConfig(unique=Unique("to"))

    id: Mapped[int] = mapped_column(primary_key=True)
    to: Mapped[str]


def enqueueing(session: Session) -> None:
    assert_type(enqueue(session, Reminder(to="a")), list[Enqueued[Reminder]])
    assert_type(enqueue(session, [Reminder(to="a")], on_duplicate="replace"), list[Enqueued[Reminder]])
    assert_type(enqueue(session, (Reminder(to=name) for name in "ab")), list[Enqueued[Reminder]])
    for job, created in enqueue(session, {Reminder(to="a")}):
        assert_type(job, Reminder)
        assert_type(created, bool)


async def async_enqueueing(session: AsyncSession) -> None:
    assert_type(await async_enqueue(session, Reminder(to="a")), list[Enqueued[Reminder]])
    [email] = await async_enqueue(session, [Reminder(to="a")])
    assert_type(email.job, Reminder)


# -- type checks: functions as jobs --------------------------------------------------------------------------------


class Call(FunctionMixin, Base):
    __tablename__ = "call"


@Call.task
def send_report(session: Session, to: str, *, pages: int = 1) -> int:
    return len(to) + pages


@Call.task(name="later", max_attempts=3)
async def send_later(session: AsyncSession, to: str) -> str:
    return to


def functions_keep_their_types(session: Session) -> None:
    assert_type(send_report.enqueue(session, "ada", pages=3), Call)
    assert_type(send_report.options(delay=timedelta(hours=1), priority=5).enqueue(session, to="ada"), Call)
    assert_type(send_report(session, "ada"), int)
    assert_type(send_report.enqueue(session, "ada").function, str | Any)
    send_report.enqueue(session)  # type: ignore[call-arg] # the argument is missing
    send_report.enqueue(session, "ada", pages="3")  # type: ignore[arg-type] # it is no integer
    send_report.enqueue(session, "ada", page=3)  # type: ignore[call-arg] # there is no such parameter
    send_report.enqueue("ada")  # type: ignore[call-arg, arg-type] # the session is missing
    send_report.options(prioritiy=3)  # type: ignore[call-arg] # there is no such option
    Consumer(Call, Call.run, sessionmaker())


async def coroutine_functions_keep_their_types(session: AsyncSession) -> None:
    assert_type(send_later.enqueue(session, "ada"), Call)
    assert_type(await send_later(session, "ada"), str)
    AsyncConsumer(Call, Call.async_run, async_sessionmaker())


# -- type checks: flow control ------------------------------------------------------------------------------------


def rules_are_given_in_a_list(tenant_limit: Select[tuple[int]]) -> None:
    QueueConfig(flow_control=[ConcurrencyLimit(2, per="customer_id")])
    QueueConfig(
        flow_control=[
            ConcurrencyLimit(tenant_limit, per=("tenant_id", "kind")),
            RateLimit(10, every=timedelta(seconds=1), burst=20),
            InOrder("document_id", on_failure="block"),
            FairShare("customer_id", weight=3),
        ]
    )
    limits = [ConcurrencyLimit(2), ConcurrencyLimit(10, per="host")]
    rules = [*limits, InOrder("document_id")]
    QueueConfig(flow_control=limits)
    QueueConfig(flow_control=(*rules, RateLimit(10, every=1)))
    QueueConfig(flow_control=InOrder("document_id"))  # type: ignore[arg-type] # no list
    QueueConfig(flow_control=[Unique("document_id")])  # type: ignore[list-item] # no rule
    InOrder("document_id", on_failure="stop")  # type: ignore[arg-type] # no such answer


# -- type checks: queue attributes that are added, adopted and declared --------------------------------------------


class DataclassBase(MappedAsDataclass, DeclarativeBase):
    pass


class Phase(enum.Enum):
    PENDING = "p"
    COMPLETED = "c"


def attributes_are_typed(email: Email) -> None:
    assert_type(email.status, str | Any)
    assert_type(email.priority, int | Any)
    assert_type(email.run_at, datetime | Any)
    assert_type(email.last_error, str | Any | None)
    assert_type(email.lease_token, uuid.UUID | Any | None)
    email.last_error = email.priority  # type: ignore[assignment] # what the test is about
    email.priority = "high"  # type: ignore[assignment] # what the test is about
    email.finished_at.isoformat()  # type: ignore[union-attr] # it may be None


def expressions_are_typed(session: Session) -> None:
    select(Email).where(Email.status == "failed", Email.priority > 3, Email.run_at.is_(None)).order_by(Email.run_at)
    assert_type(session.scalars(select(Email.status)).one(), str)
    assert_type(session.scalars(select(Email.priority)).one(), int)


class Order(QueueMixin, Base):
    __tablename__ = "orders"

    id: Mapped[int] = mapped_column(primary_key=True)
    status: Mapped[int]
    queue_status: Mapped[str] = queue_column("status")
    importance: Mapped[int] = queue_column("priority")


def declared_attributes_are_typed(order: Order) -> None:
    assert_type(order.queue_status, str)
    assert_type(order.status, int)
    assert_type(Order.queue_status, InstrumentedAttribute[str])
    assert_type(Order.queue_status == "failed", ColumnElement[bool])
    order.importance = "high"  # type: ignore[assignment] # what the test is about


class Traced(QueueMixin, Base):
    __tablename__ = "traced"
    __queue__ = QueueConfig(extra_columns=("started_at", "traceparent"), columns={"traceparent": "trace"})

    id: Mapped[int] = mapped_column(primary_key=True)
    started_at: Mapped[datetime | None]
    trace: Mapped[str | None]


def annotated_attributes_are_typed(session: Session, traced: Traced) -> None:
    assert_type(traced.started_at, datetime | None)
    assert_type(traced.trace, str | None)
    assert_type(session.scalars(select(Traced.started_at)).one(), datetime | None)
    QueueConfig(extra_columns=["claimed_by"], strategy="batch_select")
    QueueConfig(extra_columns=("status",))  # type: ignore[arg-type] # not optional
    QueueConfig(extra_columns="started_at")  # type: ignore[arg-type] # no tuple


def strategies_have_names(strategy: UpdateStatus) -> None:
    QueueConfig(strategy="update_status")
    QueueConfig(strategy=strategy)
    QueueConfig(strategy="updatestatus")  # type: ignore[arg-type] # no such strategy


class Parcel(QueueMixin, Base):
    __tablename__ = "parcel"
    __queue__ = QueueConfig(adopt={"status": "status", "attempts": "attempts", "run_at": "run_at"})

    id: Mapped[int] = mapped_column(primary_key=True)
    status: Mapped[Phase]
    attempts: Mapped[int | None]
    run_at: Mapped[datetime | None]
    priority: Mapped[str]
    max_attempts: Mapped[int]


class Stated(QueueMixin, Base):
    __tablename__ = "stated"

    id: Mapped[int] = mapped_column(primary_key=True)
    status: Mapped[Phase] = queue_column("status")


def adopted_attributes_are_typed(parcel: Parcel, stated: Stated) -> None:
    assert_type(parcel.status, Phase)
    assert_type(parcel.attempts, int | None)
    assert_type(parcel.run_at, datetime | None)
    assert_type(parcel.priority, str)
    assert_type(stated.status, Phase)
    assert_type(Stated.status, InstrumentedAttribute[Phase])


class Letter(QueueMixin, DataclassBase):
    __tablename__ = "letter"

    id: Mapped[int] = mapped_column(primary_key=True, init=False)
    to: Mapped[str]
    queue_status: Mapped[str] = queue_column("status")


class Newsletter(Letter):
    topic: Mapped[str] = mapped_column(default="")


class Text(QueueMixin, SQLModel, table=True):
    id: int | None = Field(default=None, primary_key=True)
    to: str
    queue_status: str = queue_column("status")


class AdoptedText(QueueMixin, SQLModel, table=True):
    __queue__ = QueueConfig(adopt={"status": "status", "attempts": "attempts"})

    id: int | None = Field(default=None, primary_key=True)
    status: str = "pending"
    attempts: int | None = None


def constructors_take_the_attributes(moment: datetime) -> None:
    Email(to="a", priority=3, run_at=moment)
    Letter("a", priority=3, run_at=moment, max_attempts=None)
    Newsletter("a", topic="b", priority=3)
    assert_type(Letter("a").priority, int | Any)
    Letter("a", prioritiy=3)  # type: ignore[call-arg] # there is no such attribute
    Text(to="a", priority=3, run_at=moment, queue_status="pending")
    AdoptedText(status="new", attempts=None)
    assert_type(Text(to="a").run_at, datetime | Any)
    assert_type(Text(to="a").queue_status, str)
    Text(to="a", prioritiy=3)  # type: ignore[call-arg] # there is no such attribute


def operators_know_what_they_get(session: Session) -> None:
    admin = QueueAdmin(session, Email)
    assert_type(admin.stats(finished=False), Stats)
    assert_type(admin.jobs(JobFilter(states=("failed",))), list[JobInfo])
    assert_type(admin.requeue(select(Email)), Requeued)
    admin.stats(finnished=True)  # type: ignore[call-arg] # there is no such parameter
    assert_type(ScheduleAdmin(session, Email).list(), list[ScheduleInfo])
    AsyncQueueAdmin(session, Email)  # type: ignore[arg-type] # it is no AsyncSession


async def async_operators_know_what_they_get(session: AsyncSession) -> None:
    admin = AsyncQueueAdmin(session, Email)
    assert_type(await admin.stats(finished=False), Stats)
    assert_type(await admin.cancel(5, limit=1), Cancelled)
    await admin.stats(finnished=True)  # type: ignore[call-arg] # there is no such parameter
    assert_type(await AsyncScheduleAdmin(session, Email).list(), list[ScheduleInfo])
    QueueAdmin(session, Email)  # type: ignore[arg-type] # it is no Session
