"""What is done with a history: ``QueueAdmin.attempts()``, ``sqlaqueue job``, deletion, ``sqlaqueue.testing``."""

import asyncio
import dataclasses
import json
from collections.abc import Iterator
from datetime import datetime, timedelta
from decimal import Decimal
from typing import Any
from uuid import UUID, uuid4

import pytest
import sqlalchemy as sa
from click.testing import CliRunner
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Session, mapped_column, sessionmaker

from sqlaqueue import Consumer, QueueConfig, QueueMixin, Snooze
from sqlaqueue.admin import AsyncQueueAdmin, Attempt, QueueAdmin
from sqlaqueue.cli import main
from sqlaqueue.consumer import pace
from sqlaqueue.consumer.maintenance import state
from sqlaqueue.consumer.maintenance.cleanup import delete_batch
from sqlaqueue.consumer.maintenance.state import BATCH, MAINTAINERS, Walk
from sqlaqueue.consumer.notifications.polls import Peers
from sqlaqueue.exc import ConfigurationError, StatementError
from sqlaqueue.testing import crash, drain, run_job, travel
from tests.contexts import settings_of
from tests.history.conftest import HistoryQueue, make_model
from tests.models import KINDS
from tests.programs import wait_until
from tests.servers import Database


@pytest.fixture(autouse=True)
def long_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a deletion pause for longer than two seconds, as it does on a loaded machine: the server would end it."""
    monkeypatch.setattr(state, "_LONGEST", 30.0)


def test_the_attempts_of_a_job_newest_first(leased: HistoryQueue) -> None:
    key, other = leased.enqueue("raise", None)
    leased.drain()
    with leased.sessions() as session:
        admin = QueueAdmin(session, leased.Job)
        failed, retried = admin.attempts(key)
        assert [failed] == admin.attempts(str(key), limit=1)
        assert [one.outcome for one in admin.attempts(other)] == ["completed"]
        assert admin.attempts(100) == []
    assert (failed.attempt, failed.outcome, failed.error) == (2, "failed", "ValueError: no address")
    assert (retried.attempt, retried.outcome) == (1, "retried")
    assert failed.traceback is not None
    assert failed.started_at is not None
    assert failed.ended_at.tzinfo is not None
    assert failed.seconds == (failed.ended_at - failed.started_at).total_seconds()
    assert retried.ended_at <= failed.started_at
    with pytest.raises(dataclasses.FrozenInstanceError):
        failed.attempt = 1  # type: ignore[misc]  # it is refused


def test_async_code(leased: HistoryQueue) -> None:
    [key] = leased.enqueue(None)
    leased.drain()

    async def read() -> list[Attempt]:
        async_engine = create_async_engine(leased.database.url("asyncpg"), poolclass=sa.NullPool)
        async with AsyncSession(async_engine) as session:
            return await AsyncQueueAdmin(session, leased.Job).attempts(key)

    (attempt,) = asyncio.run(read())
    assert attempt.outcome == "completed"


def test_wrong_arguments(database: Database) -> None:
    queue = HistoryQueue(database, "update_status")
    plain = make_model("update_status", attempt_history=None)
    with queue.sessions() as session:
        with pytest.raises(
            StatementError, match=r"QueueAdmin.attempts\(\): Job has no attempt history; enable it with"
        ):
            QueueAdmin(session, plain).attempts(1)
        with pytest.raises(StatementError, match="limit=0"):
            QueueAdmin(session, queue.Job).attempts(1, limit=0)
    with pytest.raises(ConfigurationError, match="give a Session"):
        QueueAdmin(queue.engine, queue.Job).attempts(1)  # type: ignore[arg-type]  # it is refused


class Base(DeclarativeBase):
    pass


def keyed(table: str, /, **columns: Any) -> Any:
    attributes = {
        "__tablename__": table,
        "__queue__": QueueConfig(attempt_history=60),
        **{key: mapped_column(type_, primary_key=True, autoincrement=False) for key, type_ in columns.items()},
        "__annotations__": {},
    }
    return type(table, (QueueMixin, Base), attributes)


KEYS = {
    "text": (keyed("texts", key=sa.Text()), ("a,b\"c'\\é",)),
    "bigint": (keyed("bigints", key=sa.BigInteger()), (2**62 + 1,)),
    "uuid": (keyed("uuids", key=sa.Uuid()), (UUID("12345678123456781234567812345678"),)),
    "numeric": (keyed("numerics", key=sa.Numeric(20, 5)), (Decimal("1.50000"),)),
    "time": (keyed("times", key=sa.DateTime()), (datetime(2030, 1, 2, 3, 4, 5, 6),)),  # noqa: DTZ001 - the column has none
    "enum": (keyed("enums", key=sa.Enum("a", "b", name="ab")), ("b",)),
    "char": (keyed("chars", key=sa.CHAR(5)), ("abcde",)),
    "several": (keyed("several", year=sa.Integer(), name=sa.String(20), id=sa.Uuid()), (2030, "a,b", uuid4())),
}


@pytest.mark.few(3)
@pytest.mark.parametrize("kind", KEYS)
@pytest.mark.parametrize("driver", ["psycopg", "psycopg2"])
def test_keys_of_each_type(database: Database, kind: str, driver: str) -> None:
    model, key = KEYS[kind]
    plain = sa.create_engine(database.url(driver), poolclass=sa.NullPool)
    Base.metadata.create_all(plain)
    with Session(plain) as session, session.begin():
        names = [column.key for column in sa.inspect(model).primary_key]
        session.add(model(**dict(zip(names, key, strict=True))))
    assert Consumer(model, lambda session, job: None, sessionmaker(plain)).drain() == 1
    with Session(plain) as session:
        (attempt,) = QueueAdmin(session, model).attempts(key)
        assert attempt.outcome == "completed"


# -- the command line ------------------------------------------------------------------------------------------------

TARGET = "tests.history.test_admin:Shown"
Shown = make_model("update_status", on_complete="delete")


def invoke(database: Database, *arguments: str) -> Any:
    return CliRunner().invoke(main, ["job", TARGET, *arguments, "--url", database.url()])


@pytest.fixture
def shown(database: Database) -> HistoryQueue:
    return HistoryQueue(database, "update_status", on_complete="delete")


def test_the_command_shows_attempts(shown: HistoryQueue) -> None:
    [key] = shown.enqueue("raise")
    shown.drain()
    printed = invoke(shown.database, str(key)).output
    assert f"job {key} is failed" in printed
    lines = [line.split() for line in printed.splitlines()[-3:]]
    assert lines[0] == ["queue", "attempt", "outcome", "started", "ran", "worker", "error"]
    assert [line[:3] for line in lines[1:]] == [["job", "2", "failed"], ["job", "1", "retried"]]
    assert printed.count("ValueError: no address") == 3
    found = json.loads(invoke(shown.database, str(key), "--json").output)
    assert found["attempts"] == 2
    assert [one["outcome"] for one in found["history"]] == ["failed", "retried"]
    assert found["history"][0]["traceback"].startswith("Traceback")
    assert found["history"][0]["seconds"] >= 0


def test_the_command_shows_attempts_of_a_deleted_job(shown: HistoryQueue) -> None:
    [key] = shown.enqueue(None)
    shown.drain()
    result = invoke(shown.database, str(key))
    assert result.exit_code == 0
    assert f"job {key} does not exist any more" in result.output
    assert "completed" in result.output
    found = json.loads(invoke(shown.database, str(key), "--json").output)
    assert found["row"] is None
    assert len(found["history"]) == 1
    missing = invoke(shown.database, "77")
    assert missing.exit_code == 1
    assert "there is no job 77" in missing.output


# -- old attempts are deleted, and no others -------------------------------------------------------------------------

KEPT = timedelta(days=14)


@pytest.fixture(autouse=True)
def frequent_deletions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pace, "RETENTION", 0.05)


def add(queue: HistoryQueue, number: int, days: float, name: str = "job") -> None:
    """Add attempts that ended some days ago, the first one earliest."""
    queue.execute(
        "INSERT INTO sqlaqueue_attempt (queue, key, attempt, ended_at, outcome) "
        f"SELECT '{name}', jsonb_build_array(n), 1, now() - interval '{days} days' + n * interval '1 ms', 'completed' "
        f"FROM generate_series(1, {number}) AS n"
    )


def left(queue: HistoryQueue) -> list[tuple[str, int]]:
    with queue.engine.connect() as connection:
        number = sa.func.count().label("number")
        found = sa.select(queue.attempt.c.queue, number).group_by(queue.attempt.c.queue).order_by(queue.attempt.c.queue)
        return [(row.queue, row.number) for row in connection.execute(found)]


def test_old_attempts_of_the_queue_are_deleted(mixed: HistoryQueue) -> None:
    add(mixed, 2 * BATCH + 20, 15)
    add(mixed, 30, 13)
    add(mixed, 40, 1000, name="other")
    with mixed.running():
        wait_until(lambda: left(mixed) == [("job", 30), ("other", 40)])


def test_attempts_that_become_old_are_deleted(leased: HistoryQueue) -> None:
    with leased.running():
        wait_until(lambda: leased.execute("SELECT count(*) FROM sqlaqueue_consumer") == 1)
        for _ in range(2):
            add(leased, 5, (KEPT - timedelta(seconds=0.5)) / timedelta(days=1))
            assert left(leased) == [("job", 5)]
            wait_until(lambda: left(leased) == [])


def test_only_the_first_consumers_delete(leased: HistoryQueue, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Peers, "rank", MAINTAINERS)
    add(leased, 5, 15)
    leased.enqueue(None)
    with leased.running():
        wait_until(lambda: leased.execute("SELECT count(*) FROM job WHERE status = 'completed'") == 1)
    assert left(leased) == [("job", 6)]


def test_a_locked_attempt_is_passed_over(leased: HistoryQueue) -> None:
    add(leased, 10, 15)
    with leased.sessions() as other, leased.sessions() as session:
        other.execute(sa.text("SELECT FROM sqlaqueue_attempt WHERE key = '[3]' FOR UPDATE"))
        assert delete_batch(session, settings_of(leased.Job), Walk("attempt", KEPT)).number == 9
        other.rollback()


@pytest.mark.parametrize("analyzed", [False, True])
def test_a_batch_reads_a_few_pages(leased: HistoryQueue, *, analyzed: bool) -> None:
    leased.execute("ALTER TABLE sqlaqueue_attempt SET (autovacuum_enabled = off)")
    add(leased, 50_000, 5)
    add(leased, 10, 15)
    if analyzed:
        leased.execute("ANALYZE sqlaqueue_attempt")
    plans: list[Any] = []

    @sa.event.listens_for(leased.engine, "before_cursor_execute", retval=True)
    def explain(_: Any, cursor: Any, statement: str, parameters: Any, *__: Any) -> tuple[str, Any]:
        if "DELETE FROM" in statement:
            cursor.execute(f"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) {statement}", parameters)
            plans.append(cursor.fetchone()[0][0]["Plan"])
        return statement, parameters

    with leased.sessions() as session:
        delete_batch(session, settings_of(leased.Job), Walk("attempt", KEPT))
    (plan,) = plans
    assert plan["Shared Hit Blocks"] + plan["Shared Read Blocks"] < 150, plan
    assert left(leased) == [("job", 50_000)]


# -- ``sqlaqueue.testing`` writes the history in the test's transaction --------------------------------------------


def work(_: Session, job: Any) -> None:
    match job.payload:
        case "raise":
            raise ValueError("no address")
        case "snooze":
            raise Snooze(60)


@pytest.fixture(params=KINDS)
def queue(database: Database, request: pytest.FixtureRequest) -> HistoryQueue:
    """Each strategy; here no Consumer runs, of one API or the other."""
    return HistoryQueue(database, request.param)


@pytest.fixture
def session(queue: HistoryQueue) -> Iterator[Session]:
    with queue.sessions() as session:
        yield session
        session.rollback()
    assert queue.history() == []


def outcomes(session: Session, model: Any, key: Any) -> list[tuple[int, str]]:
    return [(one.attempt, one.outcome) for one in reversed(QueueAdmin(session, model).attempts(key))]


def enqueue(session: Session, queue: HistoryQueue, *payloads: str | None) -> list[Any]:
    jobs = [queue.Job(payload=payload) for payload in payloads]
    session.add_all(jobs)
    session.flush()
    return jobs


def test_run_job_and_drain(queue: HistoryQueue, session: Session) -> None:
    first, second, third = enqueue(session, queue, "raise", None, "snooze")
    keys = [first.id, second.id, third.id]
    run_job(session, first, work)
    assert outcomes(session, queue.Job, keys[0]) == [(1, "retried")]
    drain(session, queue.Job, work)
    assert [outcomes(session, queue.Job, key) for key in keys] == [
        [(1, "retried"), (2, "failed")],
        [(1, "completed")],
        [(1, "released")],
    ]


def test_crash(queue: HistoryQueue, session: Session) -> None:
    [job] = enqueue(session, queue, None)
    key = job.id
    crash(session, job)
    drain(session, queue.Job, work)
    rescued = [(1, "rescued")] if queue.kind == "update_status" else []
    assert outcomes(session, queue.Job, key) == [*rescued, (2, "completed")]


def test_travel_moves_attempts(queue: HistoryQueue, session: Session) -> None:
    [job] = enqueue(session, queue, None)
    key = job.id
    drain(session, queue.Job, work)
    (before,) = QueueAdmin(session, queue.Job).attempts(key)
    travel(session, timedelta(days=3))
    (after,) = QueueAdmin(session, queue.Job).attempts(key)
    assert before.ended_at - after.ended_at == timedelta(days=3)
    assert before.seconds == after.seconds
    assert session.scalar(sa.select(sa.func.count()).select_from(queue.attempt)) == 1
