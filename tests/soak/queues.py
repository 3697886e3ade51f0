"""The queues of a soak, each with other features, and the tables by which the effect of each job is checked.

A trigger adds each job to ``soak_expected`` in the transaction that inserts it, however it is inserted. Its handler
adds a row to ``soak_effect`` in the transaction that ends it. Both are deleted when they are matched, so that they stay
small.
"""

import zlib
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import sqlalchemy as sa
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, relationship

from sqlaqueue import (
    ConcurrencyLimit,
    Constant,
    Fail,
    FairShare,
    FunctionMixin,
    InOrder,
    QueueConfig,
    QueueMixin,
    RateLimit,
    Schedule,
    Unique,
)

LEASE = 10.0
"""Seconds; a process is paused for longer than this."""

KEPT: dict[str, Any] = {
    "lease": LEASE,
    # Enough that no fault exhausts them.
    "max_attempts": 50,
    "retry": Constant(1),
    "retention": {"completed": timedelta(minutes=1), "failed": timedelta(hours=1), "cancelled": timedelta(minutes=2)},
    "statistics": True,
}
"""What all queues have."""


class Base(DeclarativeBase):
    pass


class Work(QueueMixin, Base):
    """A job whose ``kind`` says what its handler does, see :func:`act`."""

    __abstract__ = True

    id: Mapped[int] = mapped_column(sa.BigInteger, primary_key=True)
    kind: Mapped[str]
    customer: Mapped[int]


class Mail(Work):
    """Leased, with limits, a rate, and a history."""

    __tablename__ = "mail"
    __queue__ = QueueConfig(
        flow_control=[ConcurrencyLimit(4, per="customer"), RateLimit(60, every=1, per="customer", burst=120)],
        attempt_history=timedelta(minutes=5),
        extra_columns=("started_at", "traceparent"),
        **KEPT,
    )


class Reminder(Work):
    """Leased and unique; customers alternate."""

    __tablename__ = "reminder"
    __queue__ = QueueConfig(unique=Unique("customer", "kind"), flow_control=[FairShare("customer")], **KEPT)


class Step(Work):
    """Leased, one after another for each customer; completed jobs are deleted."""

    __tablename__ = "step"
    __queue__ = QueueConfig(
        flow_control=[InOrder("customer", by="id")],
        on_complete="delete",
        **{**KEPT, "retention": {"cancelled": timedelta(minutes=2)}},
    )


class Entry(Work):
    """Held by its row, several at once."""

    __tablename__ = "entry"
    __queue__ = QueueConfig(strategy="batch_select", **KEPT)


class Letter(Work):
    """Held by its message, and inserted by a schedule as well."""

    __tablename__ = "letter"
    __queue__ = QueueConfig(strategy="delete_returning", attempt_history=timedelta(minutes=5), **KEPT)


class Import(QueueMixin, Base):
    """A batch, which runs when its rows have ended."""

    __tablename__ = "import"
    __queue__ = QueueConfig(waits_for="rows", **KEPT)

    id: Mapped[int] = mapped_column(sa.BigInteger, primary_key=True)
    rows: Mapped[list["Row"]] = relationship(back_populates="batch", passive_deletes=True)


class Row(QueueMixin, Base):
    """A member of a batch."""

    __tablename__ = "row"
    __queue__ = QueueConfig(**KEPT)

    id: Mapped[int] = mapped_column(sa.BigInteger, primary_key=True)
    import_id: Mapped[int] = mapped_column(sa.ForeignKey("import.id", ondelete="CASCADE"), index=True)
    batch: Mapped[Import] = relationship(back_populates="rows")


class Call(FunctionMixin, Base):
    """A call of a function; the operator waits for its result."""

    __tablename__ = "call"
    __queue__ = QueueConfig(**KEPT)


@Call.task(name="add")
def add(session: Session, one: int, other: int) -> int:
    return one + other


WORK: tuple[type[Work], ...] = (Mail, Reminder, Step, Entry, Letter)
QUEUES: tuple[type[Any], ...] = (*WORK, Import, Row, Call)


def schedules() -> list[Schedule]:
    """Return the schedules, with new objects for each process."""
    values = {"kind": "plain", "customer": 0}
    return [
        Schedule("pulse", Letter, every=timedelta(seconds=2), values=values),
        Schedule("round", Letter, cron="* * * * *", values=values, jitter=5),
    ]


# The tables of schedules belong to the metadata from here on.
schedules()

# -- the check of effects ----------------------------------------------------------------------------------------------

CHECK = """
CREATE TABLE soak_expected (queue text, job bigint, at timestamptz DEFAULT clock_timestamp(), PRIMARY KEY (queue, job));
CREATE TABLE soak_effect (queue text, job bigint, due timestamptz, at timestamptz DEFAULT clock_timestamp());
CREATE FUNCTION soak_expect() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO soak_expected (queue, job) VALUES (TG_ARGV[0], NEW.id);
    RETURN NULL;
END $$;
"""

TRIGGER = """
CREATE TRIGGER soak_expect AFTER INSERT ON "{table}" FOR EACH ROW EXECUTE FUNCTION soak_expect('{table}')
"""

EFFECT = sa.text("INSERT INTO soak_effect (queue, job, due) VALUES (:queue, :job, :due)")


def create_tables(engine: sa.Engine) -> None:
    """Create the queues, and the tables and triggers of the check."""
    Base.metadata.create_all(engine)
    with engine.begin() as connection:
        connection.exec_driver_sql(CHECK)
        for model in QUEUES:
            connection.exec_driver_sql(TRIGGER.format(table=model.__tablename__))


def effects_of(jobs: list[Any]) -> list[dict[str, Any]]:
    """Return the parameters of `EFFECT`. Jobs that have to wait for other jobs do not count in the latency."""
    found = []
    for job in jobs:
        due = None if isinstance(job, Import | Step) else job.run_at
        found.append({"queue": job.__tablename__, "job": job.id, "due": due})
    return found


# -- handlers ----------------------------------------------------------------------------------------------------------
KINDS = {"plain": 90, "flaky": 4, "broken": 1, "later": 5}
"""What handlers do, with how many of a hundred jobs are of that kind; ``later`` is for jobs that are not due yet."""


def act(job: Any) -> None:
    """Do what the kind of a job says: a flaky one fails at first, a broken one until it is mended and requeued."""
    match getattr(job, "kind", "plain"):
        case "flaky" if job.attempts < 2:
            raise RuntimeError("the first attempt fails")
        case "broken":
            raise Fail("broken until it is mended")
    # Some work of a Python program: microseconds, as long as a handler of a typical test.
    zlib.crc32(b"x" * 20_000)


Handler = Callable[[Any, Any], Any]


def handle(session: Session, job: Any) -> None:
    session.execute(EFFECT, effects_of([job]))
    act(job)


def handle_several(session: Session, jobs: list[Any]) -> None:
    session.execute(EFFECT, effects_of(jobs))
    for job in jobs:
        act(job)


def handle_call(session: Session, job: Call) -> Any:
    session.execute(EFFECT, effects_of([job]))
    return Call.run(session, job)


async def handle_async(session: Any, job: Any) -> None:
    await session.execute(EFFECT, effects_of([job]))
    act(job)


async def handle_several_async(session: Any, jobs: list[Any]) -> None:
    await session.execute(EFFECT, effects_of(jobs))
    for job in jobs:
        act(job)
