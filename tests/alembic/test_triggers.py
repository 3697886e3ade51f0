"""Migrations create, change and drop the triggers that wake idle consumers; and versions of trigger functions."""

import hashlib
import threading
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from psycopg import sql
from sqlalchemy.exc import ProgrammingError
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session, mapped_column

from sqlaqueue import QueueConfig, States, claim, complete
from sqlaqueue.mapping.mixin import spec_of
from sqlaqueue.postgresql.ddl import Trigger, TriggerFunction, objects_of
from sqlaqueue.postgresql.start_checks import outdated_triggers_of, undefined_object_advice
from sqlaqueue.postgresql.triggers import MESSAGE_VERSION, channel_of, lock_numbers
from tests.alembic.conftest import (
    Project,
    changed,
    dump,
    enqueue,
    execute,
    in_any_order,
    new_base,
    order,
    run_all,
    statuses,
    wanted,
)
from tests.models import STRATEGIES
from tests.programs import wait_until
from tests.servers import Database

one_strategy = pytest.mark.parametrize(
    "strategy",
    [STRATEGIES[0], *(pytest.param(each, marks=pytest.mark.thorough) for each in STRATEGIES[1:])],
)
WAKE = "sqlaqueue_wake_orders"
INSERT = "sqlaqueue_wake_insert"
WAITS = """
    SELECT 1 FROM pg_locks
    WHERE relation = 'orders'::regclass AND NOT granted AND mode IN ('AccessExclusiveLock', 'ShareRowExclusiveLock')
"""
MORE = [
    "ALTER TABLE orders ENABLE REPLICA TRIGGER {update}",
    "DROP TRIGGER {update} ON orders",
    "DROP FUNCTION {function} CASCADE",
    "ALTER TRIGGER {update} ON orders RENAME TO sqlaqueue_wake_update_by_another_name",
    "CREATE OR REPLACE TRIGGER {update} AFTER UPDATE ON orders FOR EACH ROW EXECUTE FUNCTION {function}()",
    """CREATE OR REPLACE TRIGGER {update} AFTER UPDATE OF status ON orders FOR EACH ROW
       WHEN ({when}) EXECUTE FUNCTION {function}()""",
    """CREATE OR REPLACE TRIGGER {update} BEFORE UPDATE ON orders FOR EACH ROW
       WHEN ({when}) EXECUTE FUNCTION {function}()""",
    """CREATE OR REPLACE TRIGGER {update} AFTER UPDATE ON orders FOR EACH ROW
       WHEN ({when}) EXECUTE FUNCTION {function}('argument')""",
]


def update_trigger(model: type[Any]) -> Trigger:
    (trigger,) = (each for each in objects_of(model.__table__) if isinstance(each, Trigger) and each.when)
    return trigger


@pytest.mark.parametrize(
    "strategy", ["update_status", "delete_returning", pytest.param("batch_select", marks=pytest.mark.thorough)]
)
def test_notify_is_disabled_and_enabled(database: Database, make: Any, engine: sa.Engine, strategy: str) -> None:
    """The jobs do not change, neither in the upgrade nor in the downgrade."""
    notifying, silent = (order(QueueConfig(strategy=strategy, notify=notify)) for notify in (True, False))
    project = make(notifying)
    enqueue(engine, notifying, "waits", "runs")
    if strategy == "update_status":
        with Session(engine) as session:
            assert len(session.scalars(claim(notifying, 1)).all()) == 1
            session.commit()
    before = statuses(engine)
    off = changed(project, silent)
    assert dump(database) == wanted(silent, database)
    on = changed(project, notifying)
    assert dump(database) == wanted(notifying, database)
    for text in (off, on):
        assert "op.lock_queue_tables(" in text
        assert "op.fill_queue_messages(" not in text
        assert "op.release_queue_jobs(" not in text
    assert statuses(engine) == before


@pytest.mark.parametrize(
    "change",
    [
        "ALTER TABLE orders DISABLE TRIGGER {update}",
        """CREATE OR REPLACE TRIGGER {update} AFTER UPDATE ON orders FOR EACH ROW
           WHEN (NEW.status = 'pending' AND OLD.article <> ') EXECUTE FUNCTION (') EXECUTE FUNCTION {function}()""",
        """CREATE OR REPLACE TRIGGER {insert} AFTER INSERT ON orders REFERENCING NEW TABLE AS new_rows
           FOR EACH STATEMENT WHEN (false) EXECUTE FUNCTION {function}()""",
        *(pytest.param(change, marks=pytest.mark.thorough) for change in MORE),
    ],
)
def test_changes_by_hand_are_repaired(database: Database, make: Any, engine: sa.Engine, change: str) -> None:
    model = order(QueueConfig())
    trigger = update_trigger(model)
    project = make(model)
    good = dump(database)
    execute(engine, change.format(update=trigger.name, when=trigger.when, function=WAKE, insert=INSERT))
    assert dump(database) != good
    changed(project)
    assert dump(database) == good


def test_a_condition_in_another_spelling_is_no_difference(make: Any, engine: sa.Engine) -> None:
    model = order(QueueConfig())
    trigger = update_trigger(model)
    project = make(model)
    with engine.connect() as connection:
        printed = connection.scalar(
            sa.text("SELECT pg_get_triggerdef(oid) FROM pg_trigger WHERE tgname = :name"), {"name": trigger.name}
        )
    assert trigger.when not in printed
    execute(engine, f"DROP TRIGGER {trigger.name} ON orders", printed)
    project.check()


@one_strategy
def test_other_status_values_change_the_condition(
    database: Database, make: Any, engine: sa.Engine, strategy: str
) -> None:
    old = order(QueueConfig(strategy=strategy))
    new = order(QueueConfig(strategy=strategy, states=States(pending="is :new 100% it's"), columns={"run_at": None}))
    assert update_trigger(old).name != update_trigger(new).name
    project = make(old)
    changed(project, new)
    assert dump(database) == wanted(new, database)


def test_a_column_in_the_condition_gets_another_type(database: Database, make: Any, engine: sa.Engine) -> None:
    """PostgreSQL refuses this while the trigger exists."""

    def of(type_: Any) -> type[Any]:
        column = mapped_column(type_, nullable=False, server_default="pending")
        return order(QueueConfig(columns={"status": "state"}), state=column)

    project = make(of(sa.String(20)))
    enqueue(engine, of(sa.String(20)), "1")
    longer = of(sa.String(30))
    changed(project, longer)
    assert dump(database) == wanted(longer, database)
    assert run_all(engine, longer) == ["1"]


def test_a_table_renamed_by_hand(database: Database, make: Any, engine: sa.Engine) -> None:
    """The names of its functions, indexes and message table contain the old name."""
    model = order(QueueConfig(strategy="delete_returning"))
    project = make(model)
    enqueue(engine, model, "1")
    renamed = order(QueueConfig(strategy="delete_returning"), __tablename__="purchase")
    execute(engine, "ALTER TABLE orders RENAME TO purchase")
    changed(project, renamed)
    assert "sqlaqueue_wake_orders" not in dump(database)
    with Session(engine) as session:
        (job,) = session.scalars(claim(renamed, 5)).all()
        session.execute(complete([job]))
        session.commit()


def test_quoted_names_in_a_translated_schema(database: Database, engine: sa.Engine, tmp_path: Path) -> None:
    def mapped(*, notify: bool) -> type[Any]:
        config = QueueConfig(notify=notify, columns={"status": "state"})
        state = mapped_column("the: State", sa.Text, nullable=False, server_default="pending")
        return order(config, __tablename__='Job "x" 100%', state=state)

    notifying, silent = mapped(notify=True), mapped(notify=False)
    before = dump(database)
    project = Project(directory=tmp_path, database=database, metadata=notifying.metadata)
    for message, model in (("create", notifying), ("off", silent), ("on", notifying)):
        project.metadata = model.metadata
        project.revise(message)
        project.upgrade()
        project.check()
    project.downgrade("base")
    execute(engine, "DROP TABLE alembic_version")
    assert dump(database) == before

    schema = "Tenant's"
    with database.connect() as connection:
        connection.execute(sql.SQL("CREATE SCHEMA {}").format(sql.Identifier(schema)))
    empty = dump(database)
    project.execution_options = {"schema_translate_map": {None: schema}}
    # Otherwise Alembic writes its version to the translated schema, and looks for it in the default one.
    project.options = {"version_table_schema": "public"}
    project.upgrade()
    up = dump(database)
    translated = engine.execution_options(**project.execution_options)
    with database.connect() as listener:
        channel = channel_of(spec_of(notifying))
        listener.execute(sql.SQL("LISTEN {}").format(sql.Identifier(channel)))
        listener.execute("SELECT pg_advisory_lock(%s, %s)", lock_numbers(channel))
        with Session(translated) as session:
            job = notifying(article="1")
            session.add(job)
            session.commit()
            session.execute(complete(session.scalars(claim(notifying, 1)).all()))
            session.commit()
            job.state = "pending"
            session.commit()
        # One for the insert, one for the update that made the job pending again.
        assert len([*listener.notifies(timeout=10, stop_after=2)]) == 2
    project.downgrade("-2")
    project.upgrade()
    assert dump(database) == up
    project.downgrade("base")
    assert dump(database) == empty
    assert "sqlaqueue" not in empty


@pytest.mark.parametrize(
    ("notify", "live"),
    [
        pytest.param(False, True, id="off, live"),
        pytest.param(True, False, id="on, in one transaction"),
        pytest.param(False, False, id="off, in one transaction", marks=pytest.mark.thorough),
        pytest.param(True, True, id="on, live", marks=pytest.mark.thorough),
    ],
)
def test_writers_do_not_wait_for_the_migration(database: Database, make: Any, *, live: bool, notify: bool) -> None:
    """A batch stays open; other writers overtake the migration, which waits for the batch."""
    before = order(QueueConfig(strategy="batch_select", notify=not notify))
    after = order(QueueConfig(strategy="batch_select", notify=notify))
    project = make(before)
    project.revise("switch", after, **({"live": "orders"} if live else {}))
    with database.connect() as batch, database.connect() as writer, database.connect() as watch:
        writer.execute("SET lock_timeout = '1s'")
        with batch.transaction():
            batch.execute("INSERT INTO orders (article) VALUES ('in the batch')")
            migration = threading.Thread(target=project.upgrade)
            migration.start()
            for number in range(3):
                wait_until(lambda: watch.execute(WAITS).fetchone() is not None)
                writer.execute("INSERT INTO orders (article) VALUES (%s)", [f"new {number}"])
        migration.join(60)
    assert not migration.is_alive()
    project.check()
    assert dump(database) == wanted(after, database)


def test_two_queues_are_locked_in_one_attempt(database: Database, make: Any) -> None:
    """Waiting for one table while holding the other would block other sessions."""

    def models(*, notify: bool) -> type[Any]:
        base = new_base()
        for name in ("one", "two"):
            order(QueueConfig(notify=notify), base, __tablename__=name)
        return base

    project = make(models(notify=True))
    text = changed(project, models(notify=False))
    assert text.count("op.lock_queue_tables(['one', 'two'])") == 2
    assert in_any_order(dump(database)) == in_any_order(wanted(models(notify=False), database))


# -- the version of a trigger function is stored in its comment, and a Consumer reports another version ----------------

WITH_MESSAGES = QueueConfig(strategy="delete_returning")
FUNCTION = "sqlaqueue_message_orders_sync"


def outdated(engine: sa.Engine, model: type[Any]) -> str | None:
    with Session(engine) as session:
        return outdated_triggers_of(session, spec_of(model).table, model.__name__)


@pytest.mark.once
def test_a_changed_function_has_another_version() -> None:
    """When this fails, the text of a function has changed: raise its VERSION, and put the new digest here."""
    functions = [each for each in objects_of(order(WITH_MESSAGES).__table__) if isinstance(each, TriggerFunction)]
    assert {each.name: (each.comment, hashlib.sha256(each.body.encode()).hexdigest()[:16]) for each in functions} == {
        FUNCTION: ("sqlaqueue, version 3", "9a82d71a8ca8a62b"),
        WAKE: ("sqlaqueue, version 5", "b2da225c010700ed"),
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


@pytest.mark.few(3)
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
        (f"COMMENT ON FUNCTION {WAKE} IS NULL", f"{WAKE} is of version 0, and version 5 is needed"),
        (f"DROP FUNCTION {WAKE} CASCADE", f"{WAKE} is missing, and version 5 is needed"),
        ("ALTER TABLE orders DISABLE TRIGGER sqlaqueue_wake_insert", "sqlaqueue_wake_insert is disabled"),
    ],
)
def test_an_older_version_is_reported_and_autogenerate_replaces_it(
    make: Any, engine: sa.Engine, change: str, said: str
) -> None:
    model = order(WITH_MESSAGES)
    project = make(model)
    execute(engine, change)
    message = outdated(engine, model)
    assert message is not None
    assert message.startswith("Order: the table orders is not up to date")
    assert said in message
    assert "alembic revision --autogenerate" in message
    project.migrate()
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
    assert "restart this process" in (undefined_object_advice(undefined.value, spec_of(old)) or "")
    with Session(engine) as session, pytest.raises(ProgrammingError) as other:
        session.execute(sa.text("SELECT 1 +"))
    assert undefined_object_advice(other.value, spec_of(old)) is None
    assert undefined_object_advice(ValueError(), spec_of(old)) is None
