"""The version of a trigger function is stored in its comment, and a Consumer reports another version."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

import pytest
import sqlalchemy as sa
from sqlalchemy.exc import ProgrammingError
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from sqlaqueue import QueueConfig, claim
from sqlaqueue.mapping.mixin import spec_of
from sqlaqueue.postgresql.ddl import TriggerFunction, objects_of
from sqlaqueue.postgresql.start_checks import outdated_triggers_of, undefined_object_advice
from sqlaqueue.postgresql.triggers import MESSAGE_VERSION
from tests.migrations.models import order
from tests.migrations.project import Project, execute
from tests.models import STRATEGIES

if TYPE_CHECKING:
    from pathlib import Path

    from tests.servers import Database

WITH_MESSAGES = QueueConfig(strategy="delete_returning")
FUNCTION = "sqlaqueue_message_orders_sync"
WAKE = "sqlaqueue_wake_orders"


def outdated(engine: sa.Engine, model: type[Any]) -> str | None:
    with Session(engine) as session:
        return outdated_triggers_of(session, spec_of(model).table, model.__name__)


@pytest.mark.once
def test_a_changed_function_has_another_version() -> None:
    """When this fails, the text of a function has changed: raise its VERSION, and put the new digest here."""
    functions = [each for each in objects_of(order(WITH_MESSAGES).__table__) if isinstance(each, TriggerFunction)]
    assert {each.name: (each.comment, hashlib.sha256(each.body.encode()).hexdigest()[:16]) for each in functions} == {
        FUNCTION: ("sqlaqueue, version 3", "9a82d71a8ca8a62b"),
        WAKE: ("sqlaqueue, version 4", "9917b08b204a8bfc"),
    }


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_current_database_is_accepted(engine: sa.Engine, strategy: str) -> None:
    model = order(QueueConfig(strategy=strategy))
    model.metadata.create_all(engine)
    assert outdated(engine, model) is None


def test_the_version_is_in_the_comment(engine: sa.Engine) -> None:
    order(WITH_MESSAGES).metadata.create_all(engine)
    with engine.connect() as connection:
        query = sa.text(f"SELECT obj_description('{FUNCTION}'::regproc, 'pg_proc')")
        assert connection.scalar(query) == f"sqlaqueue, version {MESSAGE_VERSION}"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (f"COMMENT ON FUNCTION {FUNCTION} IS NULL", "is of version 0, and version 3 is needed"),
        (f"COMMENT ON FUNCTION {FUNCTION} IS 'mine'", "is of version 0, and version 3 is needed"),
        (f"DROP FUNCTION {FUNCTION} CASCADE", "is missing, and version 3 is needed"),
        (
            "ALTER TABLE orders DISABLE TRIGGER sqlaqueue_message_delete",
            "sqlaqueue_message_delete is disabled",
        ),
        ("DROP TRIGGER sqlaqueue_message_insert ON orders", "sqlaqueue_message_insert is missing"),
        (f"COMMENT ON FUNCTION {WAKE} IS NULL", f"{WAKE} is of version 0, and version 4 is needed"),
        (f"DROP FUNCTION {WAKE} CASCADE", f"{WAKE} is missing, and version 4 is needed"),
        ("ALTER TABLE orders DISABLE TRIGGER sqlaqueue_wake_insert", "sqlaqueue_wake_insert is disabled"),
    ],
)
def test_an_older_version_is_reported_and_autogenerate_replaces_it(
    database: Database, engine: sa.Engine, tmp_path: Path, change: str, said: str
) -> None:
    model = order(WITH_MESSAGES)
    project = Project(directory=tmp_path, database=database, metadata=model.metadata)
    project.revise()
    project.upgrade()
    execute(engine, change)
    message = outdated(engine, model)
    assert message is not None
    assert message.startswith("Order: the table orders is not up to date")
    assert said in message
    assert "alembic revision --autogenerate" in message
    project.revise()
    project.upgrade()
    project.check()
    assert outdated(engine, model) is None
    project.downgrade()
    assert outdated(engine, model) == message


def test_a_newer_version_is_reported(engine: sa.Engine) -> None:
    model = order(WITH_MESSAGES)
    model.metadata.create_all(engine)
    execute(engine, f"COMMENT ON FUNCTION {FUNCTION} IS 'sqlaqueue, version 99'")
    message = outdated(engine, model)
    assert message is not None
    assert "its sqlaqueue is older than the one that the database was migrated for" in message


@pytest.mark.parametrize("driver", ["psycopg", "asyncpg"])
async def test_versions_in_a_translated_schema(database: Database, driver: Any) -> None:
    model = order(WITH_MESSAGES)
    engine = create_async_engine(database.url(driver), execution_options={"schema_translate_map": {None: "Tenant's"}})
    async with engine.begin() as connection:
        await connection.exec_driver_sql('CREATE SCHEMA "Tenant\'s"')
        await connection.run_sync(model.metadata.create_all)
    async with AsyncSession(engine) as session:
        assert await session.run_sync(outdated_triggers_of, spec_of(model).table, model.__name__) is None
        await session.execute(sa.text(f'COMMENT ON FUNCTION "Tenant\'s".{FUNCTION} IS NULL'))
        assert "version 0" in (await session.run_sync(outdated_triggers_of, spec_of(model).table, model.__name__) or "")
    await engine.dispose()


def test_a_consumer_of_the_former_strategy_is_told_to_restart(engine: sa.Engine) -> None:
    old, new = order(WITH_MESSAGES), order(QueueConfig())
    new.metadata.create_all(engine)
    with Session(engine) as session, pytest.raises(ProgrammingError) as undefined:
        session.execute(claim(old, 1))
    assert "restart this consumer" in (undefined_object_advice(undefined.value, spec_of(old)) or "")
    with Session(engine) as session, pytest.raises(ProgrammingError) as other:
        session.execute(sa.text("SELECT 1 +"))
    assert undefined_object_advice(other.value, spec_of(old)) is None
    assert undefined_object_advice(ValueError(), spec_of(old)) is None
