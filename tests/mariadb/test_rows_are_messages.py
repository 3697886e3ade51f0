"""Rows that are their own messages on MariaDB: claims delete them, settlements insert them again or bury them."""

import asyncio
import enum
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.dialects import mysql
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, async_sessionmaker
from sqlalchemy.orm import Mapped, Session, mapped_column, sessionmaker

import sqlaqueue
from sqlaqueue import (
    AsyncConsumer,
    Cancel,
    ConcurrencyLimit,
    Consumer,
    Fail,
    QueueConfig,
    QueueMixin,
    Retry,
    Unique,
    cancel,
    claim,
    complete,
    fail,
    purge,
    release,
    requeue,
    retry,
)
from sqlaqueue.admin import QueueAdmin, doctor
from sqlaqueue.consumer import pace
from sqlaqueue.exc import ConfigurationError, StatementError
from sqlaqueue.queue.names import DEAD_LETTER
from tests.mariadb.conftest import Prepared
from tests.mariadb.models import Base, Effect, Message
from tests.mariadb.server import MariaDBServer
from tests.models import new_base
from tests.programs import DEADLINE, wait_until

pytestmark = pytest.mark.once

Sessions = sessionmaker[Session]
Letters = Base.metadata.tables[DEAD_LETTER]


def fill(sessions: Sessions, number: int, **values: Any) -> None:
    with sessions() as session:
        session.add_all([Message(id=key, **values) for key in range(1, number + 1)])
        session.commit()


def only_once(sessions: Sessions, key: int) -> None:
    """Let a job fail with its first attempt."""
    with sessions() as session:
        session.execute(sa.update(Message).where(Message.id == key).values(max_attempts=1))
        session.commit()


def waiting(sessions: Sessions) -> list[int]:
    with sessions() as session:
        return [*session.scalars(sa.select(Message.id).order_by(Message.id))]


def buried(sessions: Sessions) -> dict[int, tuple[str, str | None]]:
    with sessions() as session:
        found = session.execute(sa.select(Letters.c.key, Letters.c.state, Letters.c.error))
        return {key[0]: (state, error) for key, state, error in found}


# -- claims ------------------------------------------------------------------------------------------------------------


def test_a_claim_deletes_rows_in_claim_order(sessions: Sessions) -> None:
    with sessions() as session:
        session.add_all([Message(id=key, priority=-key, payload=f"p{key}") for key in range(1, 8)])
        session.commit()
        jobs = session.scalars(claim(Message, 3)).all()
        assert [(job.id, job.payload, job.attempts) for job in jobs] == [(7, "p7", 1), (6, "p6", 1), (5, "p5", 1)]
        assert all(sa.inspect(job).detached for job in jobs)
        assert session.scalars(sa.select(sa.func.count(Message.id))).one() == 4
        session.commit()
    assert waiting(sessions) == [1, 2, 3, 4]


def test_open_claims_have_different_rows(sessions: Sessions) -> None:
    """Neither waits for the other, and a third one finds what is left."""
    fill(sessions, 10)
    with sessions() as first, sessions() as second, sessions() as third:
        claimed = [[job.id for job in each.scalars(claim(Message, 4))] for each in (first, second, third)]
        assert claimed == [[1, 2, 3, 4], [5, 6, 7, 8], [9, 10]]
        first.rollback()
        assert [job.id for job in third.scalars(claim(Message, 2))] == [1, 2]
        second.commit()
    assert waiting(sessions) == [1, 2, 3, 4, 9, 10]


def test_a_claim_sends_few_statements(engine: sa.Engine, sessions: Sessions) -> None:
    fill(sessions, 50)
    sent = list[str]()
    event.listen(engine, "before_cursor_execute", lambda _c, _s, statement, *_: sent.append(statement))
    with sessions() as session:
        assert len(session.scalars(claim(Message, 10)).all()) == 10
    assert len(sent) == 4


@pytest.mark.parametrize("level", ["REPEATABLE READ", "SERIALIZABLE"])
def test_a_claim_at_a_strict_isolation_level(prepared: Prepared, sessions: Sessions, level: Any) -> None:
    """It returns what is in the rows now, whatever its transaction has seen before."""
    fill(sessions, 3)
    with Session(prepared(isolation_level=level)) as session, sessions() as other:
        if level == "REPEATABLE READ":
            assert len(session.scalars(sa.select(Message.id)).all()) == 3
        other.execute(sa.update(Message).where(Message.id == 1).values(payload="new"))
        other.commit()
        jobs = session.scalars(claim(Message, 2)).all()
        assert [job.payload for job in jobs] == ["new", None]
        session.execute(retry(jobs[0]))
        session.execute(fail(jobs[1]))
        session.commit()
    assert (waiting(sessions), [*buried(sessions)]) == ([1, 3], [2])


def test_a_claim_under_autocommit_is_refused(prepared: Prepared, sessions: Sessions) -> None:
    fill(sessions, 1)
    with Session(prepared(isolation_level="AUTOCOMMIT")) as session, pytest.raises(StatementError, match="AUTOCOMMIT"):
        session.scalars(claim(Message, 1)).all()
    assert waiting(sessions) == [1]


# -- settlements -------------------------------------------------------------------------------------------------------


def test_settlements(sessions: Sessions) -> None:
    fill(sessions, 6, payload="x")
    with sessions() as session:
        jobs = session.scalars(claim(Message, 5)).all()
        assert session.scalars(complete(jobs[0])).all() == [1]
        assert session.scalars(retry(jobs[1], delay=3600, error="again")).all() == [2]
        assert session.scalars(fail(jobs[2], error="no")).all() == [3]
        assert session.scalars(release(jobs[3])).all() == [4]
        # The fifth is settled by the commit.
        session.commit()
        rows = {row.id: row for row in session.scalars(sa.select(Message))}
        assert {key: (row.attempts, row.last_error, row.payload) for key, row in rows.items()} == {
            2: (1, "again", "x"),
            4: (0, None, "x"),
            6: (0, None, "x"),
        }
        assert rows[2].run_at > rows[4].run_at + timedelta(minutes=59)
        # What the transaction has settled, another one cannot settle again.
        assert session.scalars(retry(jobs[0])).all() == session.scalars(fail(jobs[4])).all() == []
    assert buried(sessions) == {3: ("failed", "no")}


def test_a_late_settlement_changes_nothing(sessions: Sessions) -> None:
    """The transaction was rolled back, and another one has completed the job, on the same connection or not."""
    fill(sessions, 2)
    with sessions() as session:
        jobs = session.scalars(claim(Message, 2)).all()
        session.rollback()
        assert [job.id for job in session.scalars(claim(Message, 1))] == [1]
        session.commit()
        for verb in (complete, retry, fail, release):
            assert session.scalars(verb(jobs)).all() == []
    assert (waiting(sessions), buried(sessions)) == ([2], {})


def test_cancel_requeue_and_purge(sessions: Sessions) -> None:
    fill(sessions, 6, payload="kept", attempts=2)
    with sessions() as session, sessions() as holder:
        held = holder.scalars(claim(Message, 2)).all()
        # The claimed jobs are asked to end, without waiting for them.
        assert sorted(session.scalars(cancel(sa.select(Message).where(Message.id != 6)))) == [3, 4, 5]
        session.commit()
        requests = sa.text("SELECT COUNT(*) FROM sqlaqueue_control WHERE queue = 'message'")
        assert session.scalar(requests) == 2
        holder.execute(fail(held))
        holder.commit()
        assert {key: state for key, (state, _) in buried(sessions).items()} == {
            1: "failed",
            2: "failed",
            3: "cancelled",
            4: "cancelled",
            5: "cancelled",
        }
        assert sorted(session.execute(requeue(sa.select(Message).where(Message.id.in_([1, 3])))).all()) == [
            (1, True),
            (3, True),
        ]
        session.commit()
        back = session.scalars(sa.select(Message).where(Message.id < 6).order_by(Message.id)).all()
        assert [(job.id, job.payload, job.attempts) for job in back] == [(1, "kept", 0), (3, "kept", 0)]
        assert len(session.scalars(purge(Message, states=["cancelled"], limit=1)).all()) == 1
        assert session.scalars(purge(Message, older_than=3600)).all() == []
        assert len(session.scalars(purge(Message)).all()) == 2
        session.commit()
    assert (waiting(sessions), buried(sessions)) == ([1, 3, 6], {})


def test_letters_that_are_locked_are_passed_over(sessions: Sessions) -> None:
    fill(sessions, 4)
    with sessions() as session, sessions() as other:
        session.execute(fail(session.scalars(claim(Message, 4)).all()))
        session.commit()
        session.execute(requeue(sa.select(Message).where(Message.id == 1)))
        assert sorted(other.scalars(purge(Message, limit=2)).all()) == [2, 3]
        assert [key for key, _ in other.execute(requeue(Message))] == [4]
        other.commit()
        session.rollback()
    assert (waiting(sessions), [*buried(sessions)]) == ([4], [1])


# -- Consumers ---------------------------------------------------------------------------------------------------------


def handle(session: Session, job: Message) -> None:
    """End a job as its payload says, after a write."""
    session.add(Effect(job=job.id, note=""))
    if job.payload == "flaky" and job.attempts == 1:
        raise Retry(delay=0)
    if job.payload == "fails":
        raise Fail("no")
    if job.payload == "is cancelled":
        raise Cancel


KINDS = ["", "flaky", "fails", "is cancelled"]
ENDED = {**dict.fromkeys(range(3, 41, 4), "failed"), **dict.fromkeys(range(4, 41, 4), "cancelled")}


def fill_all_kinds(sessions: Sessions) -> None:
    with sessions() as session:
        session.add_all([Message(id=key, payload=KINDS[(key - 1) % 4]) for key in range(1, 41)])
        session.commit()


def check_all_kinds(sessions: Sessions) -> None:
    with sessions() as session:
        # The writes of those that fail are undone.
        assert sorted(session.scalars(sa.select(Effect.job))) == [key for key in range(1, 41) if key not in ENDED]
    assert waiting(sessions) == []
    assert {key: state for key, (state, _) in buried(sessions).items()} == ENDED


def test_a_consumer(sessions: Sessions) -> None:
    fill_all_kinds(sessions)
    Consumer(Message, handle, sessions, concurrency=4).drain()
    check_all_kinds(sessions)


def test_an_async_consumer(async_engine: AsyncEngine, sessions: Sessions) -> None:
    async def handle_async(session: AsyncSession, job: Message) -> None:
        await session.run_sync(handle, job)

    fill_all_kinds(sessions)

    async def drain() -> None:
        await AsyncConsumer(Message, handle_async, async_sessionmaker(async_engine), concurrency=4).drain()
        await async_engine.dispose()

    asyncio.run(drain())
    check_all_kinds(sessions)


ENDS: dict[str, Callable[[Session], object]] = {
    "session.commit()": lambda session: session.commit(),
    "COMMIT": lambda session: session.execute(sa.text("COMMIT")),
    "COMMIT, and writes": lambda session: (session.execute(sa.text("COMMIT")), session.execute(sa.text("DO 1"))),
    "COMMIT, and a rollback": lambda session: (session.execute(sa.text("COMMIT")), session.rollback()),
    "a change of a table": lambda session: session.execute(sa.text("ANALYZE TABLE child")),
}


@pytest.mark.few(2)
@pytest.mark.parametrize("end", ENDS)
def test_a_handler_that_commits_loses_no_job(sessions: Sessions, end: str) -> None:
    """The commit has deleted the rows of the whole batch; those of the others are inserted again."""
    ran = list[int]()

    def work(session: Session, job: Message) -> None:
        ran.append(job.id)
        if job.id == 3:
            ENDS[end](session)

    fill(sessions, 6)
    only_once(sessions, 3)
    Consumer(Message, work, sessions, batch_size=10).drain()
    assert {*ran} == {1, 2, 3, 4, 5, 6}
    assert waiting(sessions) == []
    assert {key: state for key, (state, _) in buried(sessions).items()} == {3: "failed"}


def test_a_handler_that_rolls_back_brings_no_job_back_twice(sessions: Sessions) -> None:
    """Another worker has completed the others meanwhile: these must not run again."""

    def work(session: Session, job: Message) -> None:
        if job.id == 1:
            session.rollback()
            with sessions() as other:
                assert [each.id for each in other.scalars(claim(sa.select(Message).where(Message.id > 1), 9))] == [2, 3]
                other.commit()
        else:
            session.add(Effect(job=job.id, note="again"))

    fill(sessions, 3)
    only_once(sessions, 1)
    Consumer(Message, work, sessions, batch_size=10).drain()
    assert waiting(sessions) == []
    assert [*buried(sessions)] == [1]
    with sessions() as session:
        assert session.scalars(sa.select(Effect.job)).all() == []


def test_what_operators_see(sessions: Sessions) -> None:
    fill(sessions, 4, payload="shown")
    with sessions() as session:
        session.execute(fail(session.scalars(claim(Message, 2)).all(), error="no"))
        session.commit()
        admin = QueueAdmin(session, Message)
        listed = {(job.key, job.state, job.last_error) for job in admin.jobs()}
        assert listed == {(1, "failed", "no"), (2, "failed", "no"), (3, "pending", None), (4, "pending", None)}


@pytest.mark.parametrize("way", ["an INSERT", "requeue()", "plain SQL"])
def test_an_idle_consumer_is_woken(engine: sa.Engine, sessions: Sessions, way: str) -> None:
    """Its next poll would be long after the deadline of the test."""
    done = threading.Event()
    fill(sessions, 1)
    with sessions() as session:
        session.execute(fail(session.scalars(claim(Message, 1)).all()))
        session.commit()
    with Consumer(Message, lambda *_: done.set(), sessions, poll_interval=10 * DEADLINE), sessions() as session:
        time.sleep(1)
        if way == "an INSERT":
            session.add(Message(id=2))
        elif way == "requeue()":
            session.execute(requeue(Message))
        else:
            session.execute(sa.text("INSERT INTO message (id, priority, run_at) VALUES (2, 0, UTC_TIMESTAMP(6))"))
        session.commit()
        assert done.wait(DEADLINE)


def test_old_letters_are_deleted(sessions: Sessions, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pace, "RETENTION", 0.2)
    fill(sessions, 4)
    with sessions() as session:
        session.execute(fail(session.scalars(claim(Message, 3)).all()))
        session.execute(
            sa.update(Letters).where(Letters.c.key != [2]).values(created_at=Letters.c.created_at - timedelta(days=2))
        )
        session.commit()
    with Consumer(Message, lambda *_: None, sessions, poll_interval=0.1):
        wait_until(lambda: [*buried(sessions)] == [2], "the end of the others")


def test_a_retention_can_be_added_later(mariadb: MariaDBServer) -> None:
    def letters(**config: Any) -> sa.Table:
        base = new_base()

        class Task(QueueMixin, base):
            __tablename__ = "task"
            __queue__ = QueueConfig(strategy="delete_returning", rows_are_messages=True, **config)
            id: Mapped[int] = mapped_column(primary_key=True)

        return base.metadata.tables[DEAD_LETTER]

    with mariadb.database() as name:
        engine = sqlaqueue.prepare(sa.create_engine(mariadb.url(name)))
        letters().create(engine)
        (index,) = letters(retention={"failed": timedelta(days=1)}).indexes
        index.create(engine)
        engine.dispose()


@pytest.mark.parametrize("deep", [False, True])
def test_the_doctor_finds_nothing(engine: sa.Engine, sessions: Sessions, deep: bool) -> None:  # noqa: FBT001 - a parameter of the test
    fill(sessions, 2)
    with sessions() as session:
        session.execute(fail(session.scalars(claim(Message, 1)).all()))
        session.commit()
        found = [each for each in doctor(session, Message, deep=deep) if each.queue is not None]
    assert found == []


def test_a_job_that_cannot_be_claimed_leaves_the_others_alone(
    engine: sa.Engine, sessions: Sessions, caplog: pytest.LogCaptureFixture
) -> None:
    fill(sessions, 20)
    refuse = "SIGNAL SQLSTATE '45000' SET MESSAGE_TEXT = 'no'"
    with engine.begin() as connection:
        connection.exec_driver_sql(
            f"CREATE TRIGGER refuse BEFORE DELETE ON message FOR EACH ROW IF OLD.id = 5 THEN {refuse}; END IF"
        )
    try:
        assert Consumer(Message, lambda *_: None, sessions, concurrency=4).drain() == 19
        assert waiting(sessions) == [5]
        named = [record.job_key for record in caplog.records if getattr(record, "event", None) == "job_unclaimable"]
        assert named == [5]
    finally:
        with engine.begin() as connection:
            connection.exec_driver_sql("DROP TRIGGER refuse")


# -- values ------------------------------------------------------------------------------------------------------------


class Kind(enum.Enum):
    A = "a"


own = new_base()


class Typed(QueueMixin, own):
    """A column of each type, under names that SQL and JSON have to quote."""

    __tablename__ = "typed message"
    __queue__ = QueueConfig(strategy="delete_returning", rows_are_messages=True)

    tenant: Mapped[uuid.UUID] = mapped_column("Ten'ant", primary_key=True)
    name: Mapped[str] = mapped_column(sa.String(50), primary_key=True)
    text: Mapped[str | None] = mapped_column('a "text" \\ of 100%', sa.Text)
    big: Mapped[int] = mapped_column(mysql.BIGINT(unsigned=True))
    varied: Mapped[int] = mapped_column(sa.BigInteger().with_variant(mysql.BIGINT(unsigned=True), "mariadb", "mysql"))
    double: Mapped[float]
    price: Mapped[Decimal] = mapped_column(sa.Numeric(40, 3))
    data: Mapped[Any] = mapped_column(sa.JSON)
    raw: Mapped[bytes] = mapped_column(sa.LargeBinary)
    short: Mapped[bytes] = mapped_column(sa.VARBINARY(300))
    blob: Mapped[bytes] = mapped_column(mysql.LONGBLOB)
    bits: Mapped[int] = mapped_column(mysql.BIT(9))
    moment: Mapped[datetime] = mapped_column(sa.DateTime(timezone=True))
    day: Mapped[date]
    span: Mapped[timedelta]
    kind: Mapped[Kind]
    flag: Mapped[bool]
    nothing: Mapped[Any] = mapped_column(sa.JSON, nullable=True)
    twice: Mapped[int] = mapped_column(sa.Integer, sa.Computed("LENGTH(short) * 2"))


VALUES: dict[str, Any] = {
    "tenant": uuid.UUID("12345678-1234-4678-9234-567812345678"),
    "name": "ä' \\ \" %s \N{SNOWMAN}",
    "text": "'\"\\ %(x)s \n\t\x01 \U0001f600",
    "big": 2**64 - 1,
    "varied": 2**64 - 2,
    "double": 0.1 + 0.2,
    "price": Decimal("1234567890123456789012345678901234567.125"),
    "data": {"a": [1, None, "ä"], "b": {"c": True}},
    "raw": bytes(range(256)),
    "short": bytes(range(255, -1, -1)),
    "blob": bytes(range(256)) * 2,
    "bits": 0b1_1010_0101,
    "moment": datetime(2024, 2, 29, 23, 59, 59, 123456, tzinfo=UTC),
    "day": date(2024, 2, 29),
    "span": timedelta(days=1, seconds=1, microseconds=1),
    "kind": Kind.A,
    "flag": True,
    "nothing": None,
}


@pytest.fixture
def typed(mariadb: MariaDBServer) -> Iterator[Sessions]:
    with mariadb.database() as name:
        engine = sqlaqueue.prepare(sa.create_engine(mariadb.url(name)))
        own.metadata.create_all(engine)
        yield sessionmaker(engine)
        engine.dispose()


PATHS: dict[str, Callable[[Session], object]] = {
    "retry": lambda session: session.execute(retry(session.scalars(claim(Typed, 1)).all())),
    "fail and requeue": lambda session: (
        session.execute(fail(session.scalars(claim(Typed, 1)).all(), error="x")),
        session.execute(requeue(sa.select(Typed).where(Typed.big > 5, Typed.moment > VALUES["day"]))),
    ),
    "cancel and requeue": lambda session: (session.execute(cancel(Typed)), session.execute(requeue(Typed))),
}


@pytest.mark.parametrize("path", PATHS)
def test_every_value_comes_back(typed: Sessions, path: str) -> None:
    with typed() as session:
        session.add(Typed(**VALUES))
        session.commit()
        PATHS[path](session)
        session.commit()
        (job,) = session.scalars(claim(Typed, 1)).all()
        assert {name: getattr(job, name) for name in VALUES} == VALUES
        assert job.twice == 512


def state_of(admin: QueueAdmin, key: object) -> str:
    found = admin.job(key)
    assert found is not None
    return found[0].state


def test_the_state_of_a_job_with_a_key_of_two_columns(typed: Sessions) -> None:
    with typed() as session:
        admin = QueueAdmin(session, Typed)
        session.add(Typed(**VALUES))
        session.commit()
        key = (VALUES["tenant"], VALUES["name"])
        assert state_of(admin, key) == "pending"
        assert session.scalars(cancel(Typed)).all() == [key]
        session.commit()
        assert state_of(admin, key) == "cancelled"
        assert session.scalars(purge(Typed)).all() == [key]


# -- what is refused ---------------------------------------------------------------------------------------------------


REFUSED: dict[str, dict[str, Any]] = {
    r"Unique\(\.\.\.\) with rows_are_messages=True is not available on MariaDB": {"unique": Unique("customer")},
    'limits, rates and orders under strategy "delete_returning" are not available on MariaDB': {
        "flow_control": [ConcurrencyLimit(2)]
    },
}


@pytest.mark.parametrize("said", REFUSED)
def test_what_is_refused(engine: sa.Engine, said: str) -> None:
    base = new_base()

    class Task(QueueMixin, base):
        __tablename__ = "task"
        __queue__ = QueueConfig(strategy="delete_returning", rows_are_messages=True, **REFUSED[said])
        id: Mapped[int] = mapped_column(primary_key=True)
        customer: Mapped[int]

    for use in (
        lambda: base.metadata.create_all(engine),
        lambda: Session(engine).scalars(claim(Task, 1)),
        lambda: Consumer(Task, lambda *_: None, sessionmaker(engine)).drain(),
    ):
        with pytest.raises(ConfigurationError, match=rf'Task: {said}.*; use QueueConfig\(strategy="update_status"\)'):
            use()
