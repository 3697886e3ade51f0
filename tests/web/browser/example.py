"""The queues of a shop with jobs in every state, the same ones each time: what the browser tests and screenshots show.

Moments are relative to the time of the database, so that ages are the same as well.
"""

import contextlib
import random
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from decimal import Decimal
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, relationship, sessionmaker

from sqlaqueue import ConcurrencyLimit, QueueConfig, QueueMixin, Schedule
from sqlaqueue.mapping.mixin import spec_of
from sqlaqueue.queue.names import ATTEMPT, CONSUMERS
from sqlaqueue.schedules.recurrence import Recurrence
from sqlaqueue.schedules.schedule import schedule_groups
from sqlaqueue.schedules.store import declare
from sqlaqueue.web import Access, AuditMixin, Dashboard
from sqlaqueue.web.dashboard import GET
from sqlaqueue.web.data.undo import roles_of
from tests.servers import Database
from tests.web.conftest import serving


class Base(DeclarativeBase):
    pass


class Customer(Base):
    __tablename__ = "customer"

    id: Mapped[int] = mapped_column(primary_key=True)
    name: Mapped[str]


class Email(QueueMixin, Base):
    """Leases, an attempt history, statistics, the time of the start."""

    __tablename__ = "email"
    __queue__ = QueueConfig(
        strategy="update_status",
        attempt_history=timedelta(days=14),
        statistics=True,
        extra_columns=("started_at",),
    )

    id: Mapped[int] = mapped_column(sa.BigInteger, primary_key=True)
    customer_id: Mapped[int] = mapped_column(sa.ForeignKey("customer.id"), index=True)
    customer: Mapped[Customer] = relationship()
    to: Mapped[str]
    subject: Mapped[str]
    is_urgent: Mapped[bool] = mapped_column(default=False)


class Invoice(QueueMixin, Base):
    """Two jobs of a customer at once."""

    __tablename__ = "invoice"
    __queue__ = QueueConfig(
        strategy="update_status", flow_control=[ConcurrencyLimit(2, per="customer_id")], max_attempts=3
    )

    id: Mapped[int] = mapped_column(primary_key=True)
    customer_id: Mapped[int] = mapped_column(sa.ForeignKey("customer.id"))
    customer: Mapped[Customer] = relationship()
    amount: Mapped[Decimal] = mapped_column(sa.Numeric(10, 2))


class Thumbnail(QueueMixin, Base):
    """Messages in a table beside the jobs."""

    __tablename__ = "thumbnail"
    __queue__ = QueueConfig(strategy="delete_returning")

    id: Mapped[int] = mapped_column(primary_key=True)
    path: Mapped[str]
    width: Mapped[int]


class Report(QueueMixin, Base):
    """Scheduled, with arguments as JSON."""

    __tablename__ = "report"
    __queue__ = QueueConfig(strategy="batch_select", max_attempts=2, attempt_history=timedelta(days=14))

    id: Mapped[uuid.UUID] = mapped_column(primary_key=True, default=uuid.uuid4)
    kind: Mapped[str]
    arguments: Mapped[dict[str, Any]] = mapped_column(JSONB, default=dict)


class OperatorAction(AuditMixin, Base):
    __tablename__ = "operator_action"


QUEUES: list[type[Any]] = [Email, Invoice, Thumbnail, Report]
SCHEDULES = [
    Schedule("nightly-sales", Report, cron="0 3 * * *", timezone="Europe/Berlin", values={"kind": "sales"}),
    Schedule("stock-every-quarter", Report, cron="*/15 * * * *", values={"kind": "stock"}, skip_unfinished=True),
    Schedule("weekly-digest", Report, cron="30 7 * * 1", timezone="America/New_York", values={"kind": "digest"}),
    Schedule("heartbeat", Report, every=timedelta(minutes=5), values={"kind": "health"}, catch_up="skip"),
]
NAMES = ("Ada", "Grace", "Edsger", "Barbara", "Donald", "Frances", "Niklaus", "Radia", "Tony", "Margaret")
SUBJECTS = ("Your order has shipped", "Welcome", "Your invoice", "Reset your password", "We miss you")
ERRORS = (
    "ConnectionRefusedError: [Errno 111] Connection refused: smtp.example.com:587",
    "SMTPRecipientsRefused: 550 5.1.1 mailbox unavailable",
    "TimeoutError: no answer within 10 seconds",
)
TRACEBACK = """Traceback (most recent call last):
  File "/app/mail.py", line 42, in send
    smtp.sendmail(SENDER, [email.to], body)
  File "/usr/lib/python3.13/smtplib.py", line 906, in sendmail
    raise SMTPRecipientsRefused(senderrs)
{error}
"""


def fill(session: Session) -> None:
    Base.metadata.create_all(session.connection())
    now: datetime = session.execute(sa.select(sa.func.clock_timestamp())).scalar_one()
    dice = random.Random(7)
    session.add_all([Customer(id=number, name=f"{name} Ltd") for number, name in enumerate(NAMES, start=1)])
    session.flush()
    insert(session, Email, [*_finished(dice, now, 900), *_failed(dice, now), *_waiting(dice, now, 34)], _email, dice)
    running = [*_running(dice, now, 3)]
    insert(session, Email, running, _email, dice)
    insert(session, Invoice, [*_finished(dice, now, 240), *_waiting(dice, now, 18)], _invoice, dice)
    at_limit = [*_running(dice, now, 2)]
    insert(session, Invoice, at_limit, lambda _: {"customer_id": 3, "amount": Decimal("129.50")}, dice)
    insert(session, Thumbnail, [*_finished(dice, now, 400), *_waiting(dice, now, 62)], _thumbnail, dice)
    insert(session, Report, [*_finished(dice, now, 60), *_failed(dice, now)[:2]], _report, dice)
    _history(session, now)
    session.execute(sa.text(MINUTES))
    _consumers(session, now)
    _actions(session, now)
    session.commit()
    for group in schedule_groups(SCHEDULES, "fill"):
        declare(session, group)
    _ticks(session, now)
    for table in (Email, Invoice, Thumbnail, Report):
        session.execute(sa.text(f"ANALYZE {table.__tablename__}"))
    session.commit()


def insert(session: Session, model: Any, jobs: list[dict[str, Any]], columns: Any, dice: random.Random) -> None:
    roles = set(model.__mapper__.columns.keys())
    rows = [{name: value for name, value in (columns(dice) | job).items() if name in roles} for job in jobs]
    for keys in dict.fromkeys(tuple(sorted(row)) for row in rows):
        session.execute(sa.insert(model), [row for row in rows if tuple(sorted(row)) == keys])


def _email(dice: random.Random) -> dict[str, Any]:
    number = dice.randrange(len(NAMES))
    return {
        "customer_id": number + 1,
        "to": f"{NAMES[number].lower()}@example.com",
        "subject": dice.choice(SUBJECTS),
        "is_urgent": dice.random() < 0.1,
        "priority": dice.choice((0, 0, 0, 5)),
    }


def _invoice(dice: random.Random) -> dict[str, Any]:
    return {"customer_id": dice.randrange(len(NAMES)) + 1, "amount": Decimal(dice.randrange(900, 90_000)) / 100}


def _thumbnail(dice: random.Random) -> dict[str, Any]:
    return {"path": f"/media/{dice.randrange(10**6):06}.jpg", "width": dice.choice((64, 320, 1280))}


def _report(dice: random.Random) -> dict[str, Any]:
    kind = dice.choice(("sales", "stock", "digest"))
    return {
        "id": uuid.UUID(int=dice.getrandbits(128), version=4),
        "kind": kind,
        "arguments": {"month": dice.randrange(1, 13), "currency": "EUR", "columns": ["net", "gross"]},
    }


def _finished(dice: random.Random, now: datetime, number: int) -> Iterator[dict[str, Any]]:
    """Yield jobs that have ended within a day, more of them lately."""
    for _ in range(number):
        end = now - timedelta(seconds=86_400 * dice.random() ** 2.2)
        start = end - timedelta(seconds=dice.lognormvariate(0, 0.8))
        created = start - timedelta(seconds=dice.lognormvariate(1, 1))
        times = {"created_at": created, "run_at": created, "started_at": start, "finished_at": end}
        yield {"status": "completed", "attempts": 1, "claimed_by": "worker-1:4711", **times}


def _failed(dice: random.Random, now: datetime) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for number in range(17):
        end = now - timedelta(minutes=7 + 23 * number)
        times = {"created_at": end - timedelta(minutes=9), "run_at": end - timedelta(minutes=1), "finished_at": end}
        error = ERRORS[number % len(ERRORS)]
        found.append({"status": "failed", "attempts": 5, "last_error": error, **times})
    found.append(
        {
            "status": "cancelled",
            "attempts": 0,
            "created_at": now - timedelta(hours=2),
            "finished_at": now,
            "run_at": now,
        }
    )
    return found


def _waiting(dice: random.Random, now: datetime, number: int) -> Iterator[dict[str, Any]]:
    """Yield pending jobs: two thirds are due, the others later."""
    for place in range(number):
        due = now - timedelta(seconds=4 * place) if place % 3 else now + timedelta(minutes=5 * place + 1)
        retried = {"attempts": 2, "last_error": ERRORS[0]} if place % 7 == 1 else {"attempts": 0, "last_error": None}
        created = min(due, now) - timedelta(seconds=5)
        yield {"status": "pending", "created_at": created, "run_at": due, **retried}


def _running(dice: random.Random, now: datetime, number: int) -> Iterator[dict[str, Any]]:
    for place in range(number):
        start = now - timedelta(seconds=2 + 3 * place)
        yield {
            "status": "processing",
            "attempts": 1,
            "created_at": start - timedelta(seconds=1),
            "run_at": start - timedelta(seconds=1),
            "started_at": start,
            "lease_token": uuid.UUID(int=dice.getrandbits(128), version=4),
            # Longer than any test: no Consumer extends it.
            "lease_expires_at": now + timedelta(hours=1),
            "claimed_by": "worker-1:4711",
        }


def _history(session: Session, now: datetime) -> None:
    """Write the attempts of all ended e-mails and reports: five of each that has failed."""
    models: list[Any] = [Email, Report]
    for model in models:
        table = Base.metadata.tables[ATTEMPT]
        rows: list[dict[str, Any]] = []
        for job in session.scalars(sa.select(model).where(model.finished_at.is_not(None))):
            end: Any = job.finished_at
            for attempt in range(1, (job.attempts or 0) + 1):
                last = attempt == job.attempts
                ended = end - timedelta(minutes=2) * (job.attempts - attempt)
                outcome = job.status if last else "retried"
                error = None if outcome == "completed" else job.last_error
                rows.append(
                    {
                        "queue": model.__tablename__,
                        "key": [job.id if isinstance(job.id, int) else str(job.id)],
                        "attempt": attempt,
                        "started_at": ended - timedelta(milliseconds=40 + 37 * (len(rows) % 50)),
                        "ended_at": ended,
                        "worker": "worker-1:4711",
                        "outcome": outcome,
                        "error": error,
                        "traceback": None if error is None else TRACEBACK.format(error=error),
                    }
                )
        session.execute(sa.insert(table), rows)


MINUTES = """
WITH minutes AS (
  SELECT minute, ago, 12 + 9 * sin(ago / 1440.0 * 6.2832) + abs(hashint4(ago)) % 7 AS jobs,
    CASE WHEN ago BETWEEN 150 AND 210 THEN 210 - ago WHEN ago BETWEEN 12200 AND 12600 THEN 40 ELSE 0 END AS late
  FROM generate_series(0, 44000) AS ago,
    LATERAL (SELECT floor(extract(epoch FROM now()) / 60)::int - ago AS minute) AS at
  WHERE ago NOT BETWEEN 25 AND 31 AND ago NOT BETWEEN 400 AND 520 AND ago NOT BETWEEN 21000 AND 23000
)
INSERT INTO sqlaqueue_minute (
  queue, minute, pending, due, oldest_due, completed, retried, failed, wait_4, wait_7, wait_13, run_5, run_6, run_9
)
SELECT 'email', minute, (40 + 9 * late + jobs)::int, (late * 9 + jobs / 3)::int, late * 6 + 2, jobs::int,
  CASE WHEN late > 0 OR ago % 5 = 0 THEN 2 END, CASE WHEN ago % 97 = 0 OR late > 30 THEN 1 END,
  (jobs * 0.7)::int, (jobs * 0.3)::int, CASE WHEN late > 5 THEN 9 END, (jobs * 0.6)::int, (jobs * 0.35)::int, 1
FROM minutes
"""
"""31 days of statistics with times without a Consumer, and with a queue that was late twice."""


def _ticks(session: Session, now: datetime) -> None:
    """Write when each schedule has fired and will fire, as if a process had fired them all day."""
    update = "UPDATE sqlaqueue_schedule SET created_at = :created, last_tick = :last, next_tick = :next"
    created = now.replace(second=0, microsecond=0) - timedelta(days=8)
    for each in SCHEDULES:
        recurrence = Recurrence(each.cron, each.every, each.timezone, created)
        last = recurrence.newest(created, now, now - timedelta(days=8), 1, 1000)[-1]
        ticks = {"name": each.name, "created": created, "last": last, "next": recurrence.after(now)}
        session.execute(sa.text(f"{update} WHERE name = :name"), ticks)
    session.execute(sa.text("UPDATE sqlaqueue_schedule SET paused_at = now() WHERE name = 'weekly-digest'"))
    session.commit()


def _actions(session: Session, now: datetime) -> None:
    """Insert what operators have done before; two of the jobs have run since."""
    roles = roles_of(spec_of(Email))
    values = ["failed", *(None for _ in roles)]
    changes = {"roles": [*roles], "jobs": [[[str(key)], values, ["pending", *values[1:]]] for key in (1, 2)]}
    rows: list[dict[str, Any]] = [
        {"action": "requeue", "count": 2, "facts": {"keys": ["1", "2"]}, "changes": changes},
        {"action": "purge", "count": 318, "facts": {"filter": "state=completed&f.subject=Welcome"}},
        {"action": "edit", "count": 1, "facts": {"keys": ["905"], "columns": ["to"], "then": "requeue"}},
        {"action": "pause", "queue": "report", "facts": {"reason": "the warehouse is being moved"}},
    ]
    for number, row in enumerate(rows, 1):
        at = now - timedelta(minutes=190 - 40 * number)
        session.add(OperatorAction(**{"user_name": ("ada", "grace")[number % 2], "queue": "email", "at": at, **row}))
    session.flush()


def _consumers(session: Session, now: datetime) -> None:
    table = Base.metadata.tables[CONSUMERS]
    emails = session.scalars(sa.select(Email.id).where(Email.status == "processing")).all()
    invoices = session.scalars(sa.select(Invoice.id).where(Invoice.status == "processing")).all()
    handlers = {"email": "send_mail", "invoice": "issue", "thumbnail": "shrink", "report": "write_report"}
    served = {"email": emails, "invoice": invoices, "thumbnail": [], "report": []}
    rows = [
        {
            "id": f"{queue}-{number}",
            "queue": queue,
            "name": "mail" if queue == "email" else None,
            "host": f"worker-{number}",
            "pid": 4710 + number,
            "version": "0.1.0",
            "listening": True,
            "running": [[str(key)] for key in keys] if number == 1 else [],
            "claimed": 0,
            "unclaimable": [{"handlers": [f"app.{handlers[queue]}"], "quiet": False}],
            "heartbeat_at": now,
            "expires_at": now + timedelta(hours=1),
            "created_at": now - timedelta(hours=5),
        }
        for queue, keys in served.items()
        for number in (1, 2)
    ]
    session.execute(sa.insert(table), rows)


# -- its dashboard --------------------------------------------------------------------------------------------------


@dataclass
class Site:
    """A dashboard that is served, and its database."""

    root: str
    engine: sa.Engine
    database: Database

    def execute(self, statement: str, **parameters: Any) -> Any:
        with self.engine.begin() as connection:
            result = connection.execute(sa.text(statement), parameters)
            return result.all() if result.returns_rows else result.rowcount

    def add(self, *jobs: Any) -> None:
        with Session(self.engine) as session:
            session.add_all(jobs)
            session.commit()


def fill_database(database: Database) -> None:
    engine = sa.create_engine(database.url())
    with Session(engine) as session:
        fill(session)
    engine.dispose()


@contextlib.contextmanager
def example_site(database: Database, **options: Any) -> Iterator[Site]:
    """Serve a dashboard of a database that is filled.

    :param options: arguments of the Dashboard; by default everything is allowed.
    """
    engine = sa.create_engine(database.url(), pool_size=10)
    try:
        given: dict[str, Any] = {"access": lambda _: Access(read=True, act=True, user="ada"), "audit": OperatorAction}
        given |= options
        dashboard = Dashboard(QUEUES, sessionmaker(engine), **given)
        with serving(dashboard) as root:
            yield Site(root, engine, database)
    finally:
        engine.dispose()


RUNNING, FAILED = 953, 905
"""E-mails of the example."""
_ALL = {
    "overview": "",
    "queue": "queues/email",
    "jobs": "queues/email/jobs",
    "jobs:due": "queues/email/jobs?state=due",
    "jobs:expired": "queues/email/jobs?state=expired",
    "job": f"queues/email/job?key={FAILED}",
    "edit": f"queues/email/edit?key={FAILED}",
    "confirm": f"queues/email/confirm?action=requeue&key={FAILED}",
    "claim": "queues/email/claim",
    "workers": "workers",
    "confirm_worker": "workers/confirm?action=quiet&queue=email&id=email-1",
    "failures": "failures",
    "search": "search?q=state:failed",
    "schedules": "schedules",
    "health": "health",
    "edit_schedule": "schedules/edit?queue=report&schedule=nightly-sales",
    "confirm_pause": "queues/email/pause",
    "audit": "audit",
    "done": "queues/email/done?id=1",
}
PAGES = {name: path for name, path in _ALL.items() if name.partition(":")[0] in GET}
"""Their paths by name."""
