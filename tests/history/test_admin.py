"""``admin.attempts()``, its async version, and ``sqlaqueue job``."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from datetime import datetime
from decimal import Decimal
from typing import TYPE_CHECKING, Any
from uuid import UUID, uuid4

import pytest
import sqlalchemy as sa
from click.testing import CliRunner
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Session, mapped_column, sessionmaker

from sqlaqueue import Consumer, QueueConfig, QueueMixin, admin
from sqlaqueue.cli import main
from sqlaqueue.exc import ConfigurationError, StatementError
from tests.history import queues
from tests.history.queues import HistoryQueue

if TYPE_CHECKING:
    from tests.servers import Database


def test_the_attempts_of_a_job_newest_first(leased: HistoryQueue) -> None:
    key, other = leased.enqueue("raise", None)
    leased.drain()
    with leased.sessions() as session:
        failed, retried = admin.attempts(session, leased.Job, key)
        assert [failed] == admin.attempts(session, leased.Job, str(key), limit=1)
        assert [one.outcome for one in admin.attempts(session, leased.Job, other)] == ["completed"]
        assert admin.attempts(session, leased.Job, 100) == []
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

    async def read() -> list[admin.Attempt]:
        engine = create_async_engine(leased.database.url("asyncpg"))
        async with AsyncSession(engine) as session:
            found = await admin.async_attempts(session, leased.Job, key)
        await engine.dispose()
        return found

    (attempt,) = asyncio.run(read())
    assert attempt.outcome == "completed"


def test_wrong_arguments(database: Database) -> None:
    queue = HistoryQueue(database, "update_status")
    plain = queues.make_model("update_status", attempt_history=None)
    with queue.sessions() as session:
        with pytest.raises(StatementError, match=r"attempts\(Job\): the queue has no attempt history; turn it on with"):
            admin.attempts(session, plain, 1)
        with pytest.raises(StatementError, match="limit=0"):
            admin.attempts(session, queue.Job, 1, limit=0)
    with pytest.raises(ConfigurationError, match="give a Session"):
        admin.attempts(queue.engine, queue.Job, 1)  # type: ignore[arg-type]  # it is refused
    queue.engine.dispose()


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


@pytest.mark.each_value
@pytest.mark.parametrize("kind", KEYS)
@pytest.mark.parametrize("driver", ["psycopg", "psycopg2"])
def test_keys_of_each_type(database: Database, kind: str, driver: str) -> None:
    model, key = KEYS[kind]
    engine = sa.create_engine(database.url(driver))
    Base.metadata.create_all(engine)
    with Session(engine) as session:
        names = [column.key for column in sa.inspect(model).primary_key]
        session.add(model(**dict(zip(names, key, strict=True))))
        session.commit()
    assert Consumer(model, lambda session, job: None, sessionmaker(engine)).drain() == 1
    with Session(engine) as session:
        (attempt,) = admin.attempts(session, model, key)
        assert attempt.outcome == "completed"
    engine.dispose()


# -- the command line ------------------------------------------------------------------------------------------------

TARGET = "tests.history.test_admin:Shown"
Shown = queues.make_model("update_status", on_complete="delete")


def invoke(database: Database, *arguments: str) -> Any:
    return CliRunner().invoke(main, ["job", TARGET, *arguments, "--url", database.url()])


@pytest.fixture
def shown(database: Database) -> HistoryQueue:
    queue = HistoryQueue(database, "update_status", on_complete="delete")
    queue.engine.dispose()
    return queue


def test_the_command_shows_attempts(shown: HistoryQueue) -> None:
    [key] = shown.enqueue("raise")
    shown.drain()
    printed = invoke(shown.database, str(key)).output
    assert f"job {key} is failed" in printed
    lines = [line.split() for line in printed.splitlines()[-3:]]
    assert lines[0] == ["attempt", "outcome", "started", "ran", "worker", "error"]
    assert [line[:2] for line in lines[1:]] == [["2", "failed"], ["1", "retried"]]
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
